"""Suite `popgym`: POPGym, 42 small partially observable tasks that need memory

    popgym/RepeatPreviousEasy, popgym/popgym-RepeatPreviousEasy-v0

Morad et al. 2023, "POPGym: Benchmarking Partially Observable Reinforcement Learning".
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import ConfigError, closest

EXTRA = "memory"


def tasks() -> list[str]:
    """Return the names of the classes; none if the package is not installed."""
    try:
        return sorted(_classes())
    except ModuleNotFoundError:
        return []


def resolve(task: str) -> str:
    name = task.removeprefix("popgym-").removesuffix("-v0")
    known = {known.lower(): known for known in _classes()}
    if name.lower() not in known:
        raise ConfigError(f"no task 'popgym/{task}'.{closest(name, known.values())}")
    return known[name.lower()]


def make(task: str, *, render: bool = False, previous_action: bool = False, **options: Any) -> gymnasium.Env:
    """`previous_action` adds the last action to the observation, which some tasks need.

    options: passed to the constructor of the task
    """
    env = _classes()[task](**options)
    if previous_action:
        from popgym.wrappers import PreviousAction

        env = PreviousAction(env)
    return ObservationBars(env) if render else env


class ObservationBars(gymnasium.Wrapper):
    """Renders one bar for each value of the observation, since most of these tasks have no rendering."""

    HEIGHT = 96

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.metadata = {**env.metadata, "render_modes": ["rgb_array"], "render_fps": 4}
        self._values = np.zeros(1)

    @property
    def render_mode(self) -> str:  # type: ignore[override]
        return "rgb_array"

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self._values = self._flat(obs)
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._values = self._flat(obs)
        return obs, reward, terminated, truncated, info

    def render(self) -> np.ndarray:
        """Return (96, W, 3) uint8; bar heights are relative to the largest absolute value."""
        values = self._values
        scale = max(1.0, float(np.abs(values).max()))
        width = max(1, self.HEIGHT // len(values))
        frame = np.full((self.HEIGHT, width * len(values), 3), 40, np.uint8)
        for index, value in enumerate(values):
            top = self.HEIGHT - round(self.HEIGHT * abs(value) / scale)
            colour = (90, 200, 90) if value >= 0 else (220, 60, 60)
            frame[top:, index * width : (index + 1) * width] = colour
        return frame

    def _flat(self, obs: Any) -> np.ndarray:
        return np.asarray(spaces.flatten(self.env.observation_space, obs), np.float64).reshape(-1)


def step_seconds(task: str) -> float:
    return 30e-6


def _classes() -> dict[str, Any]:
    from popgym.envs import ALL

    return {cls.__name__: cls for cls in ALL}
