"""Suite `dummy`: small deterministic environments with known optimal returns, for tests and first steps.

    dummy/discrete     the observation shows which of 3 actions is correct          best return 10
    dummy/continuous   the observation shows the correct action, in 2 dimensions    best return 10
    dummy/dict         image and vector show the two parts of the correct action    best return 10
    dummy/catch        image observation: catch the falling balls                   best return 3
    dummy/lock         only a whole sequence of correct actions is rewarded           best return 1
    dummy/count        observation and reward are the number of the step

The first three are truncated after `length` steps, or terminated at the third mistake. Every step logs
`log/hits`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import known_task

StepResult = tuple[Any, float, bool, bool, dict[str, Any]]
BALL, PADDLE, BACKGROUND = (240, 200, 60), (80, 170, 255), (16, 16, 32)


class Catch(gymnasium.Env):
    """Image (side, side, 3). Actions: left, stay, right. Reward +1 for a caught ball, -1 for a missed one.

    A small task with images, motion and delayed rewards, similar to bsuite's Catch (Osband et al. 2019), with
    several balls per episode and any image size.

    cells:   side length of the grid; the ball falls one cell per step
    length:  number of balls, after which the episode terminates; the best return is `length`
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

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
        self._drop_ball()
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
                self._drop_ball()
        return self.render(), reward, self.fallen >= self.length, False, info

    def render(self) -> np.ndarray:
        """Return the observation."""
        grid = np.empty((self.cells, self.cells, 3), np.uint8)
        grid[:] = BACKGROUND
        grid[-1, self.paddle] = PADDLE
        grid[self.row, self.column] = BALL
        # Cell i starts at pixel i · side / cells, so `side` need not be a multiple of `cells`.
        index = np.arange(self.side) * self.cells // self.side
        return grid[index][:, index]

    def _drop_ball(self) -> None:
        self.row, self.column = 0, int(self.np_random.integers(self.cells))


class Bounce(gymnasium.Env):
    """Image (side, side, 3). Actions: left, stay, right. Reward +1 for a returned ball, -1 for a missed one.

    A ball flies diagonally and bounces off the walls, also above the paddle if that misses it, so everything after the
    first frames is determined by the actions: a world model can predict a whole episode.

    cells:  side length of the grid; the ball moves one cell per step in both directions
    length: steps, after which the episode is truncated
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self, cells: int = 5, side: int = 16, length: int = 40, render_mode: str | None = None
    ) -> None:
        self.cells, self.side, self.length = cells, side, length
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, (side, side, 3), np.uint8)
        self.action_space = spaces.Discrete(3)
        self.elapsed = 0

    @property
    def best_return(self) -> float:
        """Return of an agent that misses no ball: one comes after cells - 2 steps, then every 2 · (cells - 2)."""
        fall = self.cells - 2
        return float((self.length + fall) // (2 * fall))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.elapsed = 0
        self.paddle = self.cells // 2
        self.row, self.column = 0, int(self.np_random.integers(self.cells))
        self.down, self.right = 1, int(self.np_random.choice([-1, 1]))
        return self.render(), {}

    def step(self, action: Any) -> StepResult:
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 0, self.cells - 1))
        self.elapsed += 1
        if not 0 <= self.column + self.right < self.cells:
            self.right = -self.right
        self.row, self.column = self.row + self.down, self.column + self.right
        reward, info = 0.0, {"log/hits": 0.0}
        if self.row == self.cells - 2:  # the row above the paddle
            hit = self.column == self.paddle
            reward, info["log/hits"] = (1.0, 1.0) if hit else (-1.0, 0.0)
            self.down = -1
        elif self.row == 0:
            self.down = 1
        return self.render(), reward, False, self.elapsed >= self.length, info

    def render(self) -> np.ndarray:
        """Return the observation."""
        grid = np.empty((self.cells, self.cells, 3), np.uint8)
        grid[:] = BACKGROUND
        grid[-1, self.paddle] = PADDLE
        grid[self.row, self.column] = BALL
        index = np.arange(self.side) * self.cells // self.side
        return grid[index][:, index]


EXTRA = ""
MISTAKES = 3  # number of mistakes that terminates the episode
FRAME = 32


class CueEnv(gymnasium.Env):
    """Base class: the observation contains a random cue; the reward, at most 1, rates the action."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, length: int = 10, render_mode: str | None = None) -> None:
        self.length = length
        self.render_mode = render_mode
        self.elapsed = 0
        self.mistakes = 0

    @property
    def best_return(self) -> float:
        return float(self.length)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.elapsed = self.mistakes = 0
        self.draw_cue()
        return self.observe(), {}

    def step(self, action: Any) -> StepResult:
        reward, hit = self.score(action)
        self.elapsed += 1
        self.mistakes += not hit
        self.draw_cue()
        terminated = self.mistakes >= MISTAKES
        truncated = self.elapsed >= self.length and not terminated
        return self.observe(), reward, terminated, truncated, {"log/hits": float(hit)}

    def render(self) -> np.ndarray:
        """Return a frame with a green bar for the elapsed time and a red bar for the mistakes."""
        frame = np.full((FRAME, FRAME, 3), 40, np.uint8)
        frame[: FRAME // 2, : FRAME * self.elapsed // self.length] = (90, 200, 90)
        frame[FRAME // 2 :, : FRAME * self.mistakes // MISTAKES] = (220, 60, 60)
        return frame

    def draw_cue(self) -> None:
        raise NotImplementedError

    def observe(self) -> Any:
        raise NotImplementedError

    def score(self, action: Any) -> tuple[float, bool]:
        raise NotImplementedError


class DiscreteCue(CueEnv):
    """Observation: one-hot cue and elapsed fraction of time. The correct action is the index of the cue."""

    CHOICES = 3

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Box(0.0, 1.0, (self.CHOICES + 1,), np.float32)
        self.action_space = spaces.Discrete(self.CHOICES)

    def draw_cue(self) -> None:
        self.cue = int(self.np_random.integers(self.CHOICES))

    def observe(self) -> np.ndarray:
        obs = np.zeros(self.CHOICES + 1, np.float32)
        obs[self.cue] = 1.0
        obs[-1] = self.elapsed / self.length
        return obs

    def score(self, action: Any) -> tuple[float, bool]:
        hit = int(action) == self.cue
        return float(hit), hit


class ContinuousCue(CueEnv):
    """Observation: target in [-1, 1]² and elapsed fraction of time. Reward: 1 minus the distance to it.

    The bounds of the action space are asymmetric to test the rescaling of actions.
    """

    LOW, HIGH = np.array([-2.0, -1.0], np.float32), np.array([2.0, 3.0], np.float32)
    NEAR = 0.75  # mean distance that still counts as a hit

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Box(self.LOW, self.HIGH, dtype=np.float32)

    def draw_cue(self) -> None:
        self.cue = self.np_random.uniform(-1.0, 1.0, 2).astype(np.float32)

    def observe(self) -> np.ndarray:
        return np.append(self.cue, np.float32(self.elapsed / self.length))

    def score(self, action: Any) -> tuple[float, bool]:
        sent = 2.0 * (np.asarray(action) - self.LOW) / (self.HIGH - self.LOW) - 1.0
        distance = float(np.abs(sent - self.cue).mean())
        return 1.0 - distance, distance < self.NEAR


class DictCue(CueEnv):
    """Observation: image (16, 16, 3) with a red column, one-hot vector. The action has a part for each."""

    COLUMNS, CHOICES, SIZE = 4, 3, 16

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (self.SIZE, self.SIZE, 3), np.uint8),
                "vector": spaces.Box(0.0, 1.0, (self.CHOICES,), np.float32),
            }
        )
        self.action_space = spaces.MultiDiscrete([self.COLUMNS, self.CHOICES])

    def draw_cue(self) -> None:
        self.cue = (int(self.np_random.integers(self.COLUMNS)), int(self.np_random.integers(self.CHOICES)))

    def observe(self) -> dict[str, np.ndarray]:
        image = np.zeros((self.SIZE, self.SIZE, 3), np.uint8)
        width = self.SIZE // self.COLUMNS
        image[:, self.cue[0] * width : (self.cue[0] + 1) * width, 0] = 255
        image[:, :, 2] = 255 * self.elapsed // self.length
        vector = np.zeros(self.CHOICES, np.float32)
        vector[self.cue[1]] = 1.0
        return {"image": image, "vector": vector}

    def score(self, action: Any) -> tuple[float, bool]:
        right = (int(action[0]) == self.cue[0]) + (int(action[1]) == self.cue[1])
        return right / 2, right > 0


class Lock(gymnasium.Env):
    """A combination lock: the only reward, 1, follows `digits` correct actions in a row; a wrong one resets the lock.

    Observation: one-hot number of correct actions so far. The combination is the same in all episodes. Random actions
    open a lock of 8 digits in one of 6,550 episodes of 20 steps, so exploration needs demonstrations.

    digits: length of the combination
    length: steps, after which the episode is truncated; it terminates when the lock opens
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)
    CHOICES = 4

    def __init__(self, digits: int = 8, length: int = 20, render_mode: str | None = None) -> None:
        self.digits, self.length = digits, length
        self.render_mode = render_mode
        self.combination = np.random.default_rng(0).integers(self.CHOICES, size=digits)
        self.observation_space = spaces.Box(0.0, 1.0, (digits + 1,), np.float32)
        self.action_space = spaces.Discrete(self.CHOICES)
        self.elapsed = self.correct = 0

    @property
    def best_return(self) -> float:
        return 1.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.elapsed = self.correct = 0
        return self.observe(), {}

    def step(self, action: Any) -> StepResult:
        self.elapsed += 1
        hit = int(action) == self.combination[self.correct]
        self.correct = self.correct + 1 if hit else 0
        opened = self.correct == self.digits
        truncated = self.elapsed >= self.length and not opened
        return self.observe(), float(opened), opened, truncated, {"log/hits": float(hit)}

    def observe(self) -> np.ndarray:
        return np.eye(self.digits + 1, dtype=np.float32)[self.correct]

    def render(self) -> np.ndarray:
        """Return a frame with a green bar for the correct actions."""
        frame = np.full((FRAME, FRAME, 3), 40, np.uint8)
        frame[:, : FRAME * self.correct // self.digits] = (90, 200, 90)
        return frame


class Count(gymnasium.Env):
    """Observation and reward of step k are k (the reset is step 0); `length` steps per episode.

    faults: for tests of a run, a folder. While it has the file `hang` a step does not return, and while it has
            `raise` a reset raises
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        length: int = 5,
        truncate: bool = False,
        faults: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.faults = None if faults is None else Path(faults)
        self.length = length
        self.truncate = truncate
        self.render_mode = render_mode
        self.count = 0
        self.observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        if self.faults is not None and (self.faults / "raise").exists():
            raise RuntimeError("the reset fails while the file 'raise' exists")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> StepResult:
        while self.faults is not None and (self.faults / "hang").exists():
            time.sleep(0.05)
        self.count += 1
        end = self.count >= self.length
        obs = np.full(1, self.count, np.float32)
        return obs, float(self.count), end and not self.truncate, end and self.truncate, {"log/steps": 1.0}

    def render(self) -> np.ndarray:
        frame = np.zeros((FRAME, FRAME, 3), np.uint8)
        frame[:, : FRAME * self.count // self.length] = 255
        return frame


TASKS: dict[str, Callable[..., gymnasium.Env]] = {
    "discrete": DiscreteCue,
    "continuous": ContinuousCue,
    "dict": DictCue,
    "bounce": Bounce,
    "catch": Catch,
    "count": Count,
    "lock": Lock,
}


def tasks() -> list[str]:
    return sorted(TASKS)


def resolve(task: str) -> str:
    return known_task("dummy", task, TASKS)


def step_seconds(task: str) -> float:
    return 15e-6


def make(task: str, *, render: bool = False, **options: Any) -> gymnasium.Env:
    """options: `length`; for count `truncate` and `faults`; for bounce and catch `cells` and `side`; for lock `digits`"""
    return TASKS[task](render_mode="rgb_array" if render else None, **options)
