"""Suite `carracing`: CarRacing-v3, a car on a random track in top-down view

    carracing/continuous    steering, gas, brake
    carracing/discrete      do nothing, right, left, gas, brake

    backend: gymnasium      Gymnasium's implementation
             envpool        `EnvPoolCarRacing`, in C++ and several times faster; only continuous

The frame is 96×96 RGB; `crop` removes the 12 rows of indicators, as in World Models (Ha and Schmidhuber 2018,
who scale the rest to 64×64 and use episodes of 1,000 frames).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.pools import BACKENDS as BACKENDS
from rl_lab.environments.pools import NO_LIMIT, PooledEnv, require_backend
from rl_lab.errors import ConfigError, MissingPackageError, install_line, known_task

EXTRA = "box2d"
TASKS = ("continuous", "discrete")
INDICATOR_ROWS = 12  # rows at the bottom of the frame


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("carracing", task, TASKS)


def make(
    task: str,
    *,
    render: bool = False,
    backend: str = "gymnasium",
    crop: bool = False,
    lap_complete_percent: float = 0.95,
    domain_randomize: bool = False,
) -> gymnasium.Env:
    require_backend(backend)
    if backend == "envpool":
        env = _make_envpool(task, render, lap_complete_percent, domain_randomize)
    else:
        env = _make_gymnasium(task, render, lap_complete_percent, domain_randomize)
    return Crop(env) if crop else env


def _make_gymnasium(task: str, render: bool, percent: float, randomize: bool) -> gymnasium.Env:
    try:
        return gymnasium.make(
            "CarRacing-v3",
            continuous=task == "continuous",
            lap_complete_percent=percent,
            domain_randomize=randomize,
            render_mode="rgb_array" if render else None,
            disable_env_checker=True,
        )
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingPackageError(
            f"carracing/{task} needs Box2D and pygame: {install_line(EXTRA)}"
        ) from error


def _make_envpool(task: str, render: bool, percent: float, randomize: bool) -> gymnasium.Env:

    if task != "continuous" or randomize:
        what = "domain_randomize" if randomize else f"carracing/{task}"
        raise ConfigError(
            f"environment.backend=envpool does not support {what}: remove it, or set environment.backend=gymnasium"
        )
    env = EnvPoolCarRacing(lap_complete_percent=percent, render_mode="rgb_array" if render else None)
    return gymnasium.wrappers.TimeLimit(env, MAX_STEPS)


class Crop(gymnasium.ObservationWrapper):
    """Removes the indicators at the bottom of the frame."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        assert env.observation_space.shape is not None
        height, width, channels = env.observation_space.shape
        self.observation_space = spaces.Box(0, 255, (height - INDICATOR_ROWS, width, channels), np.uint8)

    def observation(self, observation: Any) -> np.ndarray:
        return observation[:-INDICATOR_ROWS]


def step_seconds(task: str) -> float:
    return 8e-3


# --- EnvPool ---------------------------------------------------------------------------------------------

MAX_STEPS = 1000  # as registered in Gymnasium; a wrapper outside enforces it, so that it can be replaced


class EnvPoolCarRacing(PooledEnv):
    """EnvPool's CarRacing as a single Gymnasium environment with one thread and a seed for every episode.

    EnvPool's authors wrote the game again in C++: physics (up to float32), rewards and ends are the same;
    edges are not antialiased, and a seed leads to another track than in Gymnasium. A pool is created in a
    millisecond.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, *, lap_complete_percent: float = 0.95, render_mode: str | None = None) -> None:
        super().__init__(
            "CarRacing-v3", max_episode_steps=NO_LIMIT, lap_complete_percent=lap_complete_percent
        )
        self._frame = np.zeros((96, 96, 3), np.uint8)
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, self._frame.shape, np.uint8)
        low, high = np.array([-1.0, 0.0, 0.0], np.float32), np.ones(3, np.float32)
        self.action_space = spaces.Box(low, high)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return super().step(np.asarray(action, np.float32))

    def render(self) -> np.ndarray:
        """Return the last frame, (96, 96, 3) uint8; EnvPool has no larger one."""
        return self._frame

    def _read(self, obs: Any) -> np.ndarray:
        self._frame = obs
        return obs
