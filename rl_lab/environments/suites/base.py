"""What the environments of several suites share: a simulator that takes one number as the seed of an episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class SeededEnv(gymnasium.Env):
    """An environment whose episodes are seeded by one number; a subclass has `metadata`, the spaces, `step`, `_start`.

    size:          height and width of the images that it observes
    action_repeat: steps of the simulator per decision
    time_limit:    decisions per episode; None: no limit of ours
    """

    SEEDS = 2**31  # the seeds of the simulator are 0 to SEEDS - 1

    def __init__(
        self,
        *,
        size: tuple[int, int] = (64, 64),
        action_repeat: int = 1,
        time_limit: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.size = size
        self.action_repeat = action_repeat
        self.time_limit = time_limit
        self.render_mode = render_mode
        self._elapsed = 0  # decisions of this episode, which `step` counts
        self._image = np.zeros((*size, 3), np.uint8)  # the last one, (H, W, 3)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; without a seed, its simulator's seed is the next number of `np_random`."""
        super().reset(seed=seed)
        self._elapsed = 0
        return self._start(int(self.np_random.integers(self.SEEDS))), {}

    def render(self) -> np.ndarray:
        """Return the last image, (H, W, 3) uint8."""
        return self._image

    @property
    def at_limit(self) -> bool:
        return self.time_limit is not None and self._elapsed >= self.time_limit

    def _start(self, seed: int) -> Any:
        """Start an episode of the simulator and return its first observation."""
        raise NotImplementedError
