"""Suite `carracing`: CarRacing-v3, a car on a random track seen from above

    carracing/continuous    steering, gas, brake
    carracing/discrete      do nothing, right, left, gas, brake

    backend: gymnasium      Gymnasium's own
             envpool        EnvPool's in C++, some times faster (see `carracing_envpool`); continuous only

The frame is 96×96 RGB; `crop` leaves out the 12 rows of instruments, as World Models does (Ha and Schmidhuber 2018,
who scale the rest to 64×64 and let an episode have 1,000 frames).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import ConfigError, MissingPackageError, closest
from rl_lab.utils.install import install_line

EXTRA = "box2d"
TASKS = ("continuous", "discrete")
BACKENDS = ("gymnasium", "envpool")
INSTRUMENTS = 12  # rows at the bottom of the frame


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    if task not in TASKS:
        raise ConfigError(f"no task 'carracing/{task}'.{closest(task, TASKS)}")
    return task


def make(
    task: str,
    *,
    render: bool = False,
    backend: str = "gymnasium",
    crop: bool = False,
    lap_complete_percent: float = 0.95,
    domain_randomize: bool = False,
) -> gymnasium.Env:
    if backend not in BACKENDS:
        raise ConfigError(f"environment.backend={backend!r}:{closest(str(backend), BACKENDS)}")
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
    from rl_lab.environments.carracing_envpool import MAX_STEPS, PooledCarRacing

    if task != "continuous" or randomize:
        what = "domain_randomize" if randomize else f"carracing/{task}"
        raise ConfigError(
            f"EnvPool's CarRacing has no {what}: leave it out, or set environment.backend=gymnasium"
        )
    try:
        env = PooledCarRacing(lap_complete_percent=percent, render_mode="rgb_array" if render else None)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"environment.backend=envpool needs EnvPool (750 MB): {install_line('envpool')} ({error})"
        ) from error
    return gymnasium.wrappers.TimeLimit(env, MAX_STEPS)


class Crop(gymnasium.ObservationWrapper):
    """The frame without its instruments."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        assert env.observation_space.shape is not None
        height, width, channels = env.observation_space.shape
        self.observation_space = spaces.Box(0, 255, (height - INSTRUMENTS, width, channels), np.uint8)

    def observation(self, observation: Any) -> np.ndarray:
        return observation[:-INSTRUMENTS]


def step_seconds(task: str) -> float:
    return 8e-3
