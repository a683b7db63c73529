"""An environment whose values are known: reward 1 whatever is done, never over, cut off after 40 steps."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Constant(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._observe(), 1.0, False, self.steps >= 40, {}

    def _observe(self) -> Any:
        return np.array([np.sin(self.steps / 5.0), np.cos(self.steps / 5.0)], np.float32)
