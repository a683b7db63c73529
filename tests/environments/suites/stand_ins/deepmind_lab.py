"""A stand-in for DeepMind Lab with types, return values and errors of the real one, and a very small world.

Written from google-deepmind/lab @ b1db91af5b4d2f3a24466f4632a3e5e1b0829cca, python/dmlab_module.c; each fact names the
line.
"""

import numpy as np

LENGTH = 40  # frames of an episode


class Lab:
    def __init__(self, level, observations, config=None, renderer="", level_cache=None, temp_folder=""):
        # Lines 160-165: str, list, dict, str, object, str.
        if not (isinstance(level, str) and isinstance(observations, list) and isinstance(config or {}, dict)):
            raise TypeError("function takes other arguments")
        if renderer not in ("", "software", "hardware"):  # lines 193-197
            raise RuntimeError(
                f'Failed to set renderer must be "hardware" or "software" actual "{renderer}"!'
            )
        for key, value in (config or {}).items():
            if not isinstance(key, str) or not isinstance(value, str):  # lines 257-266: PyUnicode_AsUTF8
                raise TypeError("bad argument type for built-in operation")
        if not level.startswith("contributed/dmlab30/") or level.endswith("_unknown"):  # lines 277-279
            raise RuntimeError(f'Failed to init environment - "level {level} not found"')
        for name in observations:
            if name not in ("RGB_INTERLEAVED", "INSTR"):  # lines 302-304
                raise ValueError(f"Unknown observation '{name}'.")
        self.level, self.config, self.cache = level, dict(config or {}), level_cache
        self._names = observations
        self._size = int(self.config["height"]), int(self.config["width"])
        self._status = "uninitialized"
        self.actions, self.closed = [], False

    def reset(self, episode=-1, seed=None):
        if seed is not None and type(seed) is not int:  # lines 330-333: a numpy integer is refused
            raise ValueError(f"'seed' must be int or None, was '{type(seed).__name__}'.")
        if seed is not None and not -(2**31) <= seed < 2**31:  # line 337: a C int
            raise OverflowError("Python int too large to convert to C long")
        self._random = np.random.RandomState(None if seed is None else seed % 2**32)
        self._frames, self._status = 0, "running"
        if self.cache is not None and not self.cache.fetch(f"{self.level}:{seed}", "/dev/null"):
            pass
        return True

    def is_running(self):
        return self._status == "running"

    def step(self, action, num_steps=1):
        if not isinstance(action, np.ndarray):  # line 387
            raise TypeError("step() argument 1 must be numpy.ndarray")
        if not self.is_running():  # line 393
            raise RuntimeError("Environment in wrong status to advance.")
        if action.shape != (7,):  # lines 402-406
            raise ValueError("action must have shape (7)")
        if action.dtype != np.intc:  # line 410
            raise ValueError("action must have dtype np.intc")
        self.actions.append((action.tolist(), num_steps))
        self._frames += num_steps
        if self._frames >= LENGTH:
            self._status = "terminated"
        return float(action[3] * num_steps)  # a Python float, line 430

    def observations(self):
        if not self.is_running():  # lines 579-582
            raise RuntimeError("Environment in wrong status for call to observations()")
        values = {
            "RGB_INTERLEAVED": self._random.randint(0, 256, (*self._size, 3)).astype(np.uint8),
            "INSTR": "Pick the red balloon.",  # a str, line 541
        }
        return {name: values[name] for name in self._names}

    def close(self):
        self.closed = True
