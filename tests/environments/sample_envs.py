"""Test environments for worker processes, which import this module; it imports no large packages."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Base(gymnasium.Env):
    """Scalar observation, two actions, never ends."""

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


def box(*shape, dtype=np.uint8):
    return spaces.Box(0, 255, shape, dtype)


# Every kind of observation space
OBSERVATIONS = {
    "vector": box(3, dtype=np.float32),
    "large_image": box(210, 160, 3),
    "small_gray_image": box(9, 7),
    "fitting_image": box(32, 48, 3),
    "image_and_vector": spaces.Dict({"camera": box(30, 40, 3), "joints": box(4, dtype=np.float64)}),
    "cameras": spaces.Dict({"front": box(84, 84, 1), "hand": box(3, 16, 16), "touch": spaces.Discrete(3)}),
    "nested": spaces.Dict({"body": spaces.Tuple([spaces.MultiBinary(2), box(2, 2, dtype=np.float32)])}),
    "integers": spaces.MultiDiscrete([2, 3], start=[1, 0]),
}


class Sampled(Base):
    """Observes random values of one of the spaces above."""

    def __init__(self, render_mode=None, kind="vector"):
        super().__init__(render_mode)
        self.observation_space = OBSERVATIONS[kind]

    def observe(self):
        self.observation_space.seed(self.count)
        return self.observation_space.sample()


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
    """The first environment of a process uses random numbers of the system, so it is not deterministic."""

    def observe(self):
        return np.frombuffer(os.urandom(4), np.uint32).astype(np.float32)


class EndsByChance(Unseeded):
    """Ends at random steps that do not depend on the seed."""

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
    """Observes its process: id, whether torch is imported, BLAS threads, an environment variable."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode)
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def observe(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(os.getpid(), number)  # a worker ignores it
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
    """Fails on request: action 0 nothing, 1 raise, 2 die, 3 hang, 4 incomplete observation. Ends after 9 steps.

    bad_seeds: from the second reset on, all but the last of this many consecutive seeds fail
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
    """Every reset fails while the file `mark` exists."""

    def __init__(self, render_mode=None, mark=""):
        super().__init__(render_mode)
        self.mark = mark

    def reset(self, *, seed=None, options=None):
        if os.path.exists(self.mark):
            raise RuntimeError("the levels are used up")
        return super().reset(seed=seed)


def chance_of_failure(render_mode=None, raises=0.02, dies=0.0, spoils=0.0, exits=0.0):
    """CartPole that fails at random steps, which depend only on the seed of the episode.

    spoils: probability of an unusable row: half of them have NaN in the observation, the others an infinite reward
    """
    env = gymnasium.make("CartPole-v1").unwrapped
    original = env.step

    def step(action):
        draw = env.np_random.random()
        if draw < raises:
            raise ValueError("the wheel came off")
        if draw < raises + dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if 0 < draw - raises - dies < exits:
            sys.exit(0)
        obs, reward, *rest = original(action)
        if draw > 1 - spoils:
            if draw > 1 - spoils / 2:
                obs[1] = np.nan
            else:
                reward = float("inf")
        return (obs, reward, *rest)

    env.step = step
    return env


class Spoils(Base):
    """Observes a position and a camera; the action is an index into `TROUBLES`. Ends after 9 steps.

    bad_reset: from the second reset on, replaces the position if the seed is even
    """

    TROUBLES = (
        "fine",
        "position nan",
        "position infinite",
        "position overflow",
        "position object",
        "position text",
        "position complex",
        "position turned",
        "position ragged",
        "position missing",
        "camera 300",
        "camera nan",
        "camera fractions",
        "reward nan",
        "reward infinite",
        "reward overflow",
        "reward None",
        "reward text",
        "reward object",
        "terminated text",
        "terminated nan",
        "terminated array",
        "truncated list",
        "info None",
        "info text",
        "values four",
        "values none",
        "exit",
        "log nan",
    )
    POSITIONS = {  # noqa: RUF012
        "nan": np.array([[0, np.nan], [0, 0], [0, 0]]),
        "infinite": np.array([[0, 0], [-np.inf, 0], [0, np.inf]]),
        "overflow": np.full((3, 2), 1e300),
        "object": np.full((3, 2), None),
        "text": np.full((3, 2), "1"),
        "complex": np.full((3, 2), 1j),
        "turned": np.zeros((2, 3)),
        "ragged": [[0.0], [0.0, 1.0], [0.0, 1.0]],
    }
    REWARDS = {  # noqa: RUF012
        "nan": float("nan"),
        "infinite": -float("inf"),
        "overflow": 1e300,
        "None": None,
        "text": "1",
        "object": np.array(None),
    }

    def __init__(self, render_mode=None, bad_reset=""):
        super().__init__(render_mode)
        self.observation_space = spaces.Dict(
            {
                "position": spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
                "camera": spaces.Box(0, 255, (4, 4, 3), np.uint8),
            }
        )
        self.action_space = spaces.Discrete(len(self.TROUBLES))
        self.bad_reset = bad_reset
        self.begun = False

    def observe(self):
        return {"position": np.full((3, 2), float(self.count)), "camera": np.full((4, 4, 3), 7, np.uint8)}

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        if self.bad_reset and self.begun and seed % 2 == 0:
            obs["position"] = self.POSITIONS[self.bad_reset]
        self.begun = True
        return obs, info

    def step(self, action):
        obs, reward, terminated, _, info = super().step(action)
        what, _, how = self.TROUBLES[action].partition(" ")
        info = {"log/good": 2.0, "log/odd": float("nan") if what == "log" else 1.0}
        if what == "exit":
            sys.exit(0)
        elif what == "reward":
            reward = self.REWARDS[how]
        elif what == "terminated":
            terminated = {"text": "no", "nan": float("nan"), "array": np.zeros(2, bool)}[how]
        elif how == "missing":
            del obs["position"]
        elif what == "position":
            obs["position"] = self.POSITIONS[how]
        elif what == "camera":
            obs["camera"] = np.full((4, 4, 3), {"300": 300, "nan": np.nan, "fractions": 0.5}[how])
        elif what == "info":
            info = {"None": None, "text": {"log/odd": "many"}}[how]
        elif what == "values":
            return (obs, reward, terminated, info) if how == "four" else None
        truncated = [] if what == "truncated" else self.count >= 9
        return obs, reward, terminated, truncated, info


class Exits(Base):
    """Calls sys.exit() in the method `where`; in the constructor not the first time."""

    made = 0

    def __init__(self, render_mode=None, where="close"):
        type(self).made += 1
        super().__init__(render_mode)
        self.where = where
        if where == "make" and type(self).made > 1:
            sys.exit(3)

    def render(self):
        if self.where == "render":
            sys.exit()
        return np.zeros((4, 4, 3), np.uint8)

    def close(self):
        if self.where == "close" and self.count:
            sys.exit(1)


class BadRender(Base):
    """Its render() fails in the way `render`: it raises, or returns no frame or one of another type or shape."""

    def __init__(self, render_mode=None, render="raise", length=4):
        super().__init__(render_mode)
        self.how, self.length = render, length

    def step(self, action):
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, self.count >= self.length, info

    def render(self):
        if self.how == "raise":
            raise RuntimeError("render fails")
        if self.how == "exit":
            os._exit(3)
        frames = {"none": None, "float": np.zeros((8, 8, 3), np.float32)}
        return frames.get(self.how, np.zeros((8 + self.count, 8, 3), np.uint8))


class Hangs(Base):
    """Never returns from step number `at`: `how` is a sleep, or a C function that keeps the interpreter's lock."""

    def __init__(self, render_mode=None, at=3, how="sleep"):
        super().__init__(render_mode)
        self.at, self.how = at, how

    def step(self, action):
        if self.count == self.at and self.how == "sleep":
            time.sleep(10_000)
        elif self.count == self.at:
            ctypes.PyDLL(None).sleep(10_000)
        return super().step(action)


class NamedActions(gymnasium.Env):
    """Says what its actions are called."""

    metadata = {"render_modes": [], "action_names": ["jump", "duck"]}  # noqa: RUF012 (as in Gymnasium)
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Meets(Base):
    """Each call waits until `count` processes are in the same call; an episode has 3 steps. Fails if they do not come.

    Before there is a file `together` in the folder it waits for nobody; a file `broken` breaks the constructor.
    """

    def __init__(self, render_mode=None, folder=".", count=2):
        super().__init__(render_mode)
        self.folder, self.others, self.calls = folder, count, {}
        if os.path.exists(os.path.join(folder, "broken")):
            raise RuntimeError("it is broken")
        self.meet("open")

    def meet(self, what):
        if not os.path.exists(os.path.join(self.folder, "together")):
            return
        self.calls[what] = self.calls.get(what, 0) + 1
        name = f"{what}-{self.calls[what]}-"
        with open(os.path.join(self.folder, name + str(os.getpid())), "w"):
            pass
        end = time.monotonic() + 20
        while sum(file.startswith(name) for file in os.listdir(self.folder)) < self.others:
            if time.monotonic() > end:
                raise RuntimeError(f"nobody else is in call {self.calls[what]} of {what}")
            time.sleep(0.002)

    def reset(self, *, seed=None, options=None):
        self.meet("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.meet("step")
        obs, reward, _, _, info = super().step(action)
        return obs, reward, False, self.count % 3 == 0, info

    def render(self):
        self.meet("render")
        return np.full((8, 8, 3), self.count, np.uint8)

    def close(self):
        self.meet("close")
