"""EnvPool's CarRacing behind Gymnasium's interface: one car, one thread, a seed for every episode.

The same game as Gymnasium's, written anew in C++ by its authors: the same physics to within float32, the same rewards
and ends, the same drawing without smoothed edges. Tracks are drawn from another generator, so a seed names another
track.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

MAX_STEPS = 1000  # of Gymnasium's registration; kept by a wrapper outside, where it can be replaced
NO_LIMIT = 2**30


class PooledCarRacing(gymnasium.Env):
    """A pool of one. EnvPool takes a seed only when a pool is made, which takes a millisecond, so each episode has its own."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (Gymnasium's form)

    def __init__(self, *, lap_complete_percent: float = 0.95, render_mode: str | None = None) -> None:
        import envpool

        self._make_pool = envpool.make_gymnasium
        self._pool: Any = None
        self._frame = np.zeros((96, 96, 3), np.uint8)
        self.lap_complete_percent = lap_complete_percent
        self.render_mode = render_mode
        self.observation_space = spaces.Box(0, 255, self._frame.shape, np.uint8)
        low, high = np.array([-1.0, 0.0, 0.0], np.float32), np.ones(3, np.float32)
        self.action_space = spaces.Box(low, high)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the precision of its own bounds
            self._pool = self._make_pool(
                "CarRacing-v3",
                num_envs=1,
                num_threads=1,
                seed=int(self.np_random.integers(2**31)),
                max_episode_steps=NO_LIMIT,
                lap_complete_percent=self.lap_complete_percent,
            )
        self._frame = self._pool.reset()[0][0]
        return self._frame, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = self._pool.step(np.asarray(action, np.float32)[None])
        self._frame = obs[0]
        return self._frame, float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def render(self) -> np.ndarray:
        """(96, 96, 3) uint8: EnvPool draws no larger frame."""
        return self._frame

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
