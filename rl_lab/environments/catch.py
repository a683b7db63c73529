"""Catch: a ball falls, a paddle moves. The smallest game with pictures, memory of motion and a delayed reward.

In the manner of bsuite's Catch (Osband et al. 2019), written anew: several balls an episode, any picture size.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

BALL, PADDLE, FIELD = (240, 200, 60), (80, 170, 255), (16, 16, 32)


class Catch(gymnasium.Env):
    """Observation: a picture (side, side, 3). Actions: left, stay, right. +1 for a ball caught, -1 for one missed.

    cells:   the field's side; the ball falls one cell a step
    length:  balls of an episode, which then terminates: the best return is `length`
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's form)

    def __init__(
        self, cells: int = 8, side: int = 64, length: int = 3, render_mode: str | None = None
    ) -> None:
        self.cells, self.side, self.length = cells, side, length
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (side, side, 3), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.fallen = 0

    @property
    def best_return(self) -> float:
        return float(self.length)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.fallen = 0
        self.paddle = self.cells // 2
        self._throw()
        return self.render(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 0, self.cells - 1))
        self.row += 1
        reward, info = 0.0, {"log/hits": 0.0}
        if self.row == self.cells - 1:
            caught = self.column == self.paddle
            reward, info["log/hits"] = (1.0, 1.0) if caught else (-1.0, 0.0)
            self.fallen += 1
            if self.fallen < self.length:
                self._throw()
        return self.render(), reward, self.fallen >= self.length, False, info

    def render(self) -> np.ndarray:
        """The observation itself."""
        field = np.empty((self.cells, self.cells, 3), np.uint8)
        field[:] = FIELD
        field[-1, self.paddle] = PADDLE
        field[self.row, self.column] = BALL
        # Cell i begins at pixel i · side / cells: every size is filled, also one that cells does not divide.
        index = np.arange(self.side) * self.cells // self.side
        return field[index][:, index]

    def _throw(self) -> None:
        self.row, self.column = 0, int(self.np_random.integers(self.cells))
