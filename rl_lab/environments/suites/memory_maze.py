"""Suite `memory_maze`: Memory Maze, a 3D maze whose targets must be remembered (64×64 RGB, 6 actions)

    memory_maze/9x9, 11x11, 13x13, 15x15

Pasukonis et al. 2022, "Evaluating Long-Term Memory in 3D Mazes". Episodes of 1,000 to 4,000 steps; the border
of the image has the colour of the target to find. The package imports the old `gym` but does not declare it
as a dependency.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.rendering import choose_renderer
from rl_lab.environments.suites.base import SeededEnv
from rl_lab.environments.suites.gym import load_old_gym
from rl_lab.environments.wrappers import resize
from rl_lab.errors import known_task

EXTRA = "memory-maze"
HANDLES = frozenset({"size"})
TASKS = ("9x9", "11x11", "13x13", "15x15")
MIN_SIZE = 64  # pixels: in smaller images the coloured border covers everything


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("memory_maze", task, TASKS)


def make(
    task: str, *, render: bool = False, size: tuple[int, int] | None = None, good_visibility: bool = False
) -> gymnasium.Env:
    """`good_visibility` places the targets above the walls."""
    choose_renderer(needed=True)
    return MemoryMazeEnv(
        task,
        size=size or (MIN_SIZE, MIN_SIZE),
        good_visibility=good_visibility,
        render_mode="rgb_array" if render else None,
    )


class MemoryMazeEnv(SeededEnv):
    """Creates a new maze for each episode, since a maze can only be seeded in its constructor."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, task: str, *, good_visibility: bool, **settings: Any) -> None:
        super().__init__(**settings)
        load_old_gym()
        import gym  # noqa: F401 (memory_maze imports it)
        from absl import logging
        from memory_maze import tasks as maze_tasks

        logging.set_verbosity(logging.ERROR)  # every reset would warn about a velocity that mazes do not have

        self._build = getattr(maze_tasks, f"memory_maze_{task}")
        self._arguments = {
            "image_only_obs": True,
            "camera_resolution": max(MIN_SIZE, *self.size),  # it renders squares
            "good_visibility": good_visibility,
        }
        self._env: Any = None
        self.observation_space = spaces.Box(0, 255, self._image.shape, np.uint8)
        self.action_space = spaces.Discrete(6)

    def _start(self, seed: int) -> np.ndarray:
        self.close()
        self._env = self._build(seed=seed, **self._arguments)
        return self._observe(self._env.reset())

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        result = self._env.step(int(action))
        terminated = result.last() and result.discount == 0.0
        return (
            self._observe(result),
            float(result.reward or 0.0),
            terminated,
            result.last() and not terminated,
            {},
        )

    def _observe(self, result: Any) -> np.ndarray:
        image = result.observation
        if image.shape != self.observation_space.shape:
            image = resize(np.ascontiguousarray(image.transpose(2, 0, 1)), self.size).transpose(1, 2, 0)
        self._image = image
        return image

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None


def step_seconds(task: str) -> float:
    return 40e-3
