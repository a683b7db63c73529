"""The actions since each environment's last reset: with the episode's seed, all that an exact resume needs."""

from __future__ import annotations

import numpy as np

from rl_lab.records import ActionSpec

FIRST_CAPACITY = 64


class ActionHistory:
    """Actions of the open episode of each of N environments, in the smallest dtype that holds them."""

    def __init__(self, action: ActionSpec, num_envs: int) -> None:
        choices = max(action.choices, default=0)
        compact = np.uint8 if choices <= 256 else np.int32
        dtype = np.float32 if action.kind == "continuous" else compact
        self.lengths = np.zeros(num_envs, np.int64)
        self._actions = np.zeros((num_envs, FIRST_CAPACITY, *action.shape), dtype)
        self._envs = np.arange(num_envs)
        self._longest = 0  # no length is greater; exact only after it was recomputed

    def record(self, actions: np.ndarray, ignored: np.ndarray) -> None:
        """Add one vector step. `ignored` (N,) bool: those that reset instead and are at their first row."""
        if self._longest == self._actions.shape[1]:
            self._longest = int(self.lengths.max())
            if self._longest == self._actions.shape[1]:
                self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], axis=1)
        self._actions[self._envs, self.lengths] = actions
        self.lengths += 1
        self.lengths[ignored] = 0
        self._longest += 1

    def clear(self) -> None:
        self.lengths[:] = 0
        self._longest = 0

    def get(self, env: int) -> np.ndarray:
        """(length, …) actions of one environment; a copy."""
        return self._actions[env, : self.lengths[env]].copy()

    def set(self, env: int, actions: np.ndarray) -> None:
        """Take back what `get` gave."""
        while self._actions.shape[1] <= len(actions):
            self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], axis=1)
        self._actions[env, : len(actions)] = actions
        self.lengths[env] = len(actions)
        self._longest = max(self._longest, len(actions))
