"""herobraine/hero/spaces.py: what the handlers use of it."""

import numpy as np


class Dict:
    def __init__(self, spaces):
        self.spaces = dict(sorted(spaces.items()))  # as old Gym's Dict does

    def __getitem__(self, name):
        return self.spaces[name]

    def seed(self, seed):
        raise AssertionError("the adapter passes seed_spaces=False")

    def sample(self):
        return {name: space.sample() for name, space in self.spaces.items()}


class Box:
    def __init__(self, low, high, shape=(), dtype=np.float64):
        self.low, self.high, self.shape, self.dtype = low, high, tuple(shape), np.dtype(dtype)

    def __contains__(self, value):
        value = np.asarray(value)
        return value.shape == self.shape and bool((self.low <= value).all() and (value <= self.high).all())

    def sample(self):
        return np.zeros(self.shape, self.dtype) + 1


class Discrete:
    def __init__(self, n):
        self.n = n

    def __contains__(self, value):
        return isinstance(value, int) and 0 <= value < self.n

    def sample(self):
        return 0


class Enum(Discrete):  # lines 227-251: `values` is a sorted numpy array of strings
    def __init__(self, *values, default=None):
        super().__init__(len(values))
        self.default = values[0] if default is None else default
        self.values = np.array(sorted(values))

    def __contains__(self, value):
        return value in self.values

    def sample(self):
        return str(self.values[-1])
