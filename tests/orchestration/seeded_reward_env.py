"""An environment with known returns. Worker processes import this file, so it has no heavy imports."""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium import spaces

STEPS: list[int] = []  # one entry for each step that any SeededReward took


class SeededReward(gymnasium.Env):
    """20 steps; action 1 gives a reward that the seed determines and the observation shows, action 0 costs 1."""

    def __init__(self, render_mode=None):
        self.observation_space = spaces.Box(-1.0, 100.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.reward = float(self.np_random.integers(1, 90))
        self.elapsed = 0
        return np.array([self.reward, 0], np.float32), {}

    def step(self, action):
        STEPS.append(1)
        self.elapsed += 1
        reward = self.reward if action == 1 else -1.0
        return np.array([self.reward, self.elapsed], np.float32), reward, False, self.elapsed >= 20, {}
