"""Environments with the interfaces of old gym and dm_env, written without these packages."""

import numpy as np


class Box:
    def __init__(self, low, high, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.low, self.high = np.full(shape, low, dtype), np.full(shape, high, dtype)


class Discrete:
    def __init__(self, n):
        self.n = n


class OldGym:
    """gym before 0.26: `seed`, an observation from `reset`, four values from `step`. Ends by itself or by its limit."""

    def __init__(self, length=5, early=False):
        self.observation_space, self.action_space = Box(-9, 9, (3,), np.float32), Discrete(2)
        self.length, self.early = length, early
        self.random = np.random.default_rng(0)

    def seed(self, seed=None):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.count = 0
        return self.random.standard_normal(3)  # float64, though the space says float32

    def step(self, action):
        self.count += 1
        done = self.count >= self.length
        info = {} if self.early else {"TimeLimit.truncated": done}
        return self.random.standard_normal(3) + action, float(action), done, {**info, "log/ones": 1.0}

    def render(self, mode="human"):
        return np.full((4, 4, 3), self.count, np.uint8) if mode == "rgb_array" else None

    def close(self):
        pass


class Spec:
    def __init__(self, shape, dtype, **bounds):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.__dict__.update(bounds)


class TimeStep:
    def __init__(self, observation, reward, discount, is_last):
        self.observation, self.reward, self.discount, self.is_last = observation, reward, discount, is_last

    def last(self):
        return self.is_last


class DmTask:
    def __init__(self):
        self.random = np.random.RandomState(0)


class DmEnv:
    """dm_env: ends with discount 0 if `dies`, else by a limit with discount 1."""

    def __init__(self, dies=False):
        self.task, self.dies = DmTask(), dies

    def observation_spec(self):
        return {"speed": Spec((), np.float64), "camera": Spec((6, 6, 3), np.uint8)}

    def action_spec(self):
        return Spec((2,), np.float64, minimum=-2.0, maximum=2.0)

    def reset(self):
        self.count = 0
        return TimeStep(self.look(0.0), None, None, False)

    def step(self, action):
        self.count += 1
        last = self.count >= 4
        return TimeStep(self.look(action[0]), float(action[1]), 0.0 if last and self.dies else 1.0, last)

    def look(self, offset):
        camera = self.task.random.randint(0, 255, (6, 6, 3)).astype(np.uint8)
        return {"speed": self.task.random.standard_normal() + offset, "camera": camera}


class SeededAtBirth:
    """Only the constructor takes a seed."""

    def __init__(self, seed=0):
        self.observation_space, self.action_space = Box(-9, 9, (2,), np.float64), Discrete(3)
        self.random = np.random.default_rng(seed)

    def reset(self):
        return self.random.standard_normal(2)

    def step(self, action):
        return self.random.standard_normal(2), 0.0, False, {}

    def close(self):
        pass


class NeedsPackage:
    def __init__(self):
        import a_package_that_nobody_has  # noqa: F401
