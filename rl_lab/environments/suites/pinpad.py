"""Suite `pinpad`: Pin Pad, where coloured pads must be entered in one fixed order (64×64 RGB, 5 actions)

    pinpad/three, four, five, six, seven, eight     number of pads; six is the hardest of the paper

Hafner et al. 2022, "Deep Hierarchical Planning from Pixels" (Director), written here from its description; sizes,
colours and the timing of the reward as in danijar/director @ a6a649e, embodied/envs/pinpad.py. The agent walks on a
grid of 16×14 cells. The bottom of the image shows the last pads that it entered. When they are 1, 2, …, n, the reward
is 10, the floor turns green, and ten steps later the agent starts at a random place with an empty history.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.wrappers import TimeLimit
from rl_lab.errors import known_task

EXTRA = ""
WIDTH, HEIGHT = 16, 14  # cells, with the wall around them
CELL = 4  # pixels
LENGTH = 10_000  # steps of an episode
REWARD = 10.0
PAUSE = 10  # steps from the reward to the new start
MOVES = (
    (0, 0),
    (0, 1),
    (0, -1),
    (1, 0),
    (-1, 0),
)  # stay, down, up, right, left: (x, y), y counts from the top
WALL, FLOOR, SOLVED, PLAYER = (192, 192, 192), (255, 255, 255), (223, 255, 223), (0, 0, 0)
COLOURS = (
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 0),
    (255, 0, 255),
    (0, 255, 255),
    (128, 0, 128),
    (0, 128, 128),
)
# Task -> for each pad, in the order of the goal, its rectangles (x, y, width, height).
_SEVEN = (
    ((1, 1, 3, 2), (1, 3, 2, 1)),
    ((12, 11, 3, 2), (13, 10, 2, 1)),
    ((1, 5, 2, 4),),
    ((12, 1, 3, 2), (13, 3, 2, 1)),
    ((13, 5, 2, 4),),
    ((1, 11, 3, 2), (1, 10, 2, 1)),
    ((6, 11, 4, 2),),
)
LAYOUTS: dict[str, tuple[tuple[tuple[int, int, int, int], ...], ...]] = {
    "three": (((1, 1, 4, 4),), ((6, 9, 4, 4),), ((11, 1, 4, 4),)),
    "four": (((1, 1, 4, 4),), ((11, 9, 4, 4),), ((1, 9, 4, 4),), ((11, 1, 4, 4),)),
    "five": (
        ((1, 2, 3, 4),),
        ((11, 10, 4, 3),),
        ((1, 8, 3, 4),),
        ((11, 1, 4, 3),),
        ((12, 5, 3, 4),),
    ),
    "six": (
        ((1, 1, 3, 3),),
        ((12, 10, 3, 3),),
        ((1, 5, 2, 4),),
        ((1, 10, 3, 3),),
        ((12, 1, 3, 3),),
        ((13, 5, 2, 4),),
    ),
    "seven": _SEVEN,
    "eight": (*_SEVEN, ((6, 1, 4, 2),)),
}


def tasks() -> list[str]:
    return list(LAYOUTS)


def resolve(task: str) -> str:
    return known_task("pinpad", task, LAYOUTS)


def make(task: str, *, render: bool = False) -> gymnasium.Env:
    return TimeLimit(PinPad(task, render_mode="rgb_array" if render else None), LENGTH)


class PinPad(gymnasium.Env):
    """The grid of one task. `grid[x, y]` is 0 for floor, -1 for wall, and k for pad k."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, task: str, *, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.grid = np.zeros((WIDTH, HEIGHT), np.int64)
        self.grid[[0, -1], :] = self.grid[:, [0, -1]] = -1
        for number, rectangles in enumerate(LAYOUTS[task], start=1):
            for x, y, width, height in rectangles:
                self.grid[x : x + width, y : y + height] = number
        self.goal = tuple(range(1, len(LAYOUTS[task]) + 1))
        self.entered: deque[int] = deque(maxlen=len(self.goal))
        self.player = (0, 0)
        self._starts = np.argwhere(self.grid >= 0)
        self._countdown = 0
        self._floor, self._solved = (self._background(colour) for colour in (FLOOR, SOLVED))
        self.observation_space = spaces.Box(0, 255, (16 * CELL, 16 * CELL, 3), np.uint8)
        self.action_space = spaces.Discrete(len(MOVES))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self._countdown = 0
        self._start()
        return self._draw(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self._countdown:
            self._countdown -= 1
            if self._countdown == 0:
                self._start()
        right, down = MOVES[int(action)]
        place = (self.player[0] + right, self.player[1] + down)
        cell = int(self.grid[place])
        if cell >= 0:
            self.player = place
        if cell > 0 and (not self.entered or self.entered[-1] != cell):
            self.entered.append(cell)
        reward = 0.0
        if tuple(self.entered) == self.goal and not self._countdown:
            reward, self._countdown = REWARD, PAUSE
        return self._draw(), reward, False, False, {"log/solved": float(reward > 0)}

    def render(self) -> np.ndarray:
        """Return (256, 256, 3) uint8, the observation with larger pixels."""
        return np.repeat(np.repeat(self._draw(), 4, axis=0), 4, axis=1)

    def _start(self) -> None:
        x, y = self._starts[self.np_random.integers(len(self._starts))].tolist()
        self.player = (x, y)
        self.entered.clear()

    def _background(self, floor: tuple[int, int, int]) -> np.ndarray:
        """Return (16, 16, 3) uint8, x first: floor, walls and pads, which are pale unless the player is on them."""
        cells = np.empty((16, 16, 3), np.uint8)
        cells[:] = floor
        cells[:, :HEIGHT][self.grid < 0] = WALL
        for number in self.goal:
            cells[:, :HEIGHT][self.grid == number] = (10 * np.array(COLOURS[number - 1]) + 90 * 255) // 100
        cells[:, HEIGHT:] = WALL
        return cells

    def _draw(self) -> np.ndarray:
        """Return (64, 64, 3) uint8."""
        cells = (self._solved if self._countdown else self._floor).copy()
        pad = self.grid[self.player]
        if pad > 0:
            cells[:, :HEIGHT][self.grid == pad] = COLOURS[pad - 1]
        cells[self.player] = PLAYER
        for index, number in enumerate(self.entered):
            cells[2 * index + 1, HEIGHT] = COLOURS[number - 1]
        return np.repeat(np.repeat(cells.transpose(1, 0, 2), CELL, axis=0), CELL, axis=1)


def step_seconds(task: str) -> float:
    return 60e-6
