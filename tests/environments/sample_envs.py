"""Environments that tests send to worker processes; imported there, so nothing heavy is imported here."""

from __future__ import annotations

import os
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Base(gymnasium.Env):
    """One number, two actions, never ends."""

    def __init__(self, render_mode=None):
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.count = 0

    def observe(self):
        return np.full(1, self.count, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        return self.observe(), 1.0, False, False, {}

    def render(self):
        return None


class Nested(Base):
    """Dict observation with a nested key, multi-discrete action that does not start at zero."""

    def __init__(self, render_mode=None, height=6):
        super().__init__(render_mode)
        self.observation_space = spaces.Dict(
            {
                "camera": spaces.Box(0, 255, (height, 8, 3), np.uint8),
                "body": spaces.Dict(
                    {"speed": spaces.Box(-1.0, 1.0, (2,), np.float64), "gear": spaces.Discrete(4)}
                ),
            }
        )
        self.action_space = spaces.MultiDiscrete([3, 2], start=[1, 10])
        self.action = np.array([1, 10])

    def observe(self):
        camera = np.zeros(self.observation_space["camera"].shape, np.uint8)
        camera[0, 1, 2] = self.action[0]
        return {"camera": camera, "body": {"speed": self.action / 10.0, "gear": self.count % 4}}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.action = action
        obs, _, _, _, info = super().step(action)
        return obs, float(action.sum()), self.count >= 3, False, info


class Unseeded(Base):
    """Environment 0 of a process draws from the system: no seed makes it come out the same."""

    def observe(self):
        return np.frombuffer(os.urandom(4), np.uint32).astype(np.float32)


class EndsByChance(Unseeded):
    """Ends at moments that no seed decides."""

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, os.urandom(1)[0] < 128, False, info


class Raises(Base):
    def step(self, action):
        if self.count >= 2 and action == 1:
            raise ValueError("the wheel came off")
        return super().step(action)


class RaisesWhenMade(Base):
    made = 0

    def __init__(self, render_mode=None, only_once=False):
        type(self).made += 1
        if type(self).made > 1 or not only_once:
            raise RuntimeError("no licence found")
        super().__init__(render_mode)


class Dies(Base):
    def step(self, action):
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class Slow(Base):
    def __init__(self, render_mode=None, seconds=0.5):
        super().__init__(render_mode)
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds if action == 1 else 0.0)
        return super().step(action)


class Process(Base):
    """Tells about its process: its id, whether torch is loaded, BLAS threads, the answer of a signal to itself."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observe(self):
        os.kill(os.getpid(), signal.SIGINT)  # a worker ignores it
        os.kill(os.getpid(), signal.SIGTERM)
        threads = float(os.environ.get("OMP_NUM_THREADS", "0"))
        return np.array(
            [os.getpid(), "torch" in sys.modules, threads, float(os.environ.get("TOLD", 0))], np.float32
        )


def make_process():
    return Process()


def with_options(size_of_step: float = 1.0, render_mode: str | None = None):
    env = Base(render_mode)
    env.count = 0
    original = env.step

    def step(action):
        obs, _, terminated, truncated, info = original(action)
        return obs, size_of_step, terminated, truncated, info

    env.step = step
    return env


not_an_environment = dict


class Fails(Base):
    """Does what the action says: 0 nothing, 1 raise, 2 die, 3 hang, 4 give half an observation. Ends after 9 steps.

    bad_seeds: of this many seeds in a row all but the last cannot begin an episode, from the second reset on
    """

    def __init__(self, render_mode=None, bad_seeds=1):
        super().__init__(render_mode)
        self.observation_space = spaces.Dict(
            {"count": spaces.Box(0, 99, (1,), np.float32), "draw": spaces.Box(0, 1, (3,), np.float32)}
        )
        self.action_space = spaces.Discrete(5)
        self.bad_seeds = bad_seeds
        self.begun = False

    def observe(self):
        draw = self.np_random.random(3).astype(np.float32)
        return {"count": np.full(1, self.count, np.float32), "draw": draw}

    def reset(self, *, seed=None, options=None):
        if self.begun and seed % self.bad_seeds:
            raise RuntimeError(f"no level for seed {seed}")
        self.begun = True
        return super().reset(seed=seed)

    def step(self, action):
        if action == 1:
            raise ValueError("the wheel came off")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 3:
            time.sleep(60)
        obs, reward, _, _, info = super().step(action)
        if action == 4:
            obs["draw"] = np.zeros(2, np.float32)
        return obs, reward, False, self.count >= 9, info


class NeverAgain(Fails):
    """Begins once, in all processes together (`mark` is a file), and never again."""

    def __init__(self, render_mode=None, mark=""):
        super().__init__(render_mode)
        self.mark = mark

    def reset(self, *, seed=None, options=None):
        if os.path.exists(self.mark):
            raise RuntimeError("the levels are used up")
        return super().reset(seed=seed)


def chance_of_failure(render_mode=None, raises=0.02, dies=0.0):
    """CartPole that fails by chance, decided by the episode's seed and so repeatable."""
    env = gymnasium.make("CartPole-v1").unwrapped
    original = env.step

    def step(action):
        draw = env.np_random.random()
        if draw < raises:
            raise ValueError("the wheel came off")
        if draw < raises + dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(action)

    env.step = step
    return env
