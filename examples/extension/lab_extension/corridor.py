"""Suite `corridor`: walk to the end that a light at the start pointed to."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

EXTRA = ""  # no extra of rl-lab is needed
LENGTHS = {"short": 3, "long": 10}  # steps from the middle to an end


class Corridor(gymnasium.Env):
    """Observation: place in [-1, 1], the light (-1 left, 1 right), share of time passed. Actions: left, right.

    The right end gives 1, the wrong one -1; either terminates. Dawdling is truncated.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's form)

    def __init__(self, length: int, render_mode: str | None = None) -> None:
        self.length = length
        self.render_mode = render_mode
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)  # seeds self.np_random: draw from it alone, and runs resume exactly
        self.place = self.elapsed = 0
        self.light = 1 if self.np_random.integers(2) else -1
        return self.look(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.place += 1 if action else -1
        self.elapsed += 1
        terminated = abs(self.place) == self.length
        found = terminated and self.place * self.light > 0
        reward = (1.0 if found else -1.0) if terminated else 0.0
        truncated = not terminated and self.elapsed >= 8 * self.length
        return self.look(), reward, terminated, truncated, {"log/found": float(found)}

    def look(self) -> np.ndarray:
        time = self.elapsed / (8 * self.length)
        return np.array([self.place / self.length, self.light, time], np.float32)

    def render(self) -> np.ndarray:
        frame = np.full((16, 16 * (2 * self.length + 1), 3), 40, np.uint8)
        cell = 16 * (self.place + self.length)
        frame[4:12, cell + 4 : cell + 12] = (90, 200, 90)
        end = frame[:, -16:] if self.light > 0 else frame[:, :16]
        end[:2] = (240, 220, 90)
        return frame


def tasks() -> list[str]:
    return sorted(LENGTHS)


def make(task: str, *, render: bool = False, **options: Any) -> gymnasium.Env:
    return Corridor(LENGTHS[task], render_mode="rgb_array" if render else None, **options)


def resolve(task: str) -> str:
    """Checked once, before any worker starts."""
    from rl_lab.errors import ConfigError, closest

    if task not in LENGTHS:
        raise ConfigError(f"no environment 'corridor/{task}'.{closest(task, LENGTHS)}")
    return task
