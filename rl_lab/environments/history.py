"""The actions since each environment's last true beginning: with the episodes' seeds, all that an exact resume needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl_lab.records import ActionSpec

FIRST_CAPACITY = 64


class ActionHistory:
    """Actions of each of N environments, in the smallest dtype that holds them.

    A reset that continues a game (a life was lost, the episode ended, the game did not) only marks a cut: what follows
    depends on all that came before, back to the game's start. Actions beyond `limit` are counted and not kept: from
    then on the environment is `forgotten`, until its next true beginning.
    """

    def __init__(self, action: ActionSpec, num_envs: int, limit: int = 100_000) -> None:
        choices = max(action.choices, default=0)
        compact = np.uint8 if choices <= 256 else np.int32
        dtype = np.float32 if action.kind == "continuous" else compact
        self.limit = limit
        self.lengths = np.zeros(num_envs, np.int64)  # actions since the last true beginning
        self._cuts: list[list[int]] = [[] for _ in range(num_envs)]
        # The last place is a spare one, for actions beyond the limit.
        self._actions = np.zeros((num_envs, min(FIRST_CAPACITY, limit) + 1, *action.shape), dtype)
        self._envs = np.arange(num_envs)
        self._longest = 0  # no length is greater; exact only after it was recomputed
        self.overflown = False  # whether any environment was ever forgotten

    @property
    def forgotten(self) -> np.ndarray:
        """(N,) bool: more actions than the limit, so that they cannot be replayed."""
        return self.lengths > self.limit

    def record(self, actions: np.ndarray, began: np.ndarray, continued: np.ndarray) -> None:
        """Add one vector step.

        began: (N,) bool, those that reset instead, at their first row now; continued: which of these resets went on
        with the game of the episode before.
        """
        spare = self._actions.shape[1] - 1
        if self._longest >= spare:
            self._longest = int(self.lengths.max())
            if self._longest >= spare and spare < self.limit:
                self._grow(self._longest + 1)
        index = self.lengths
        if self._longest >= self.limit:
            index = np.minimum(index, self.limit)
            self.overflown = self.overflown or bool(index.max(initial=0) >= self.limit)
        self._actions[self._envs, index] = actions
        self.lengths += 1
        self._longest += 1
        for env in np.flatnonzero(began):
            self._begin(int(env), bool(continued[env]))

    def _begin(self, env: int, continued: bool) -> None:
        if continued:
            self.lengths[env] -= 1  # the action that a reset ignores
            if self.lengths[env] <= self.limit:
                self._cuts[env].append(int(self.lengths[env]))
        else:
            self.lengths[env] = 0
            self._cuts[env] = []

    def begin(self, envs: Sequence[int]) -> None:
        """These environments began truly, out of turn."""
        for env in envs:
            self._begin(env, continued=False)

    def get(self, env: int) -> tuple[np.ndarray, list[int]]:
        """Actions (length, …) of one environment, a copy, and where resets that continued cut them."""
        return self._actions[env, : self.lengths[env]].copy(), list(self._cuts[env])

    def set(self, env: int, actions: np.ndarray, cuts: Sequence[int] = ()) -> None:
        """Take back what `get` gave."""
        self._grow(len(actions))
        self._actions[env, : len(actions)] = actions
        self.lengths[env] = len(actions)
        self._cuts[env] = [int(cut) for cut in cuts]
        self._longest = max(self._longest, len(actions))

    def _grow(self, length: int) -> None:
        """Room for that many actions, by doubling, and for the spare one."""
        room = self._actions.shape[1] - 1
        if length <= room:
            return
        while room < length:
            room = max(1, 2 * room)
        room = max(min(room, self.limit), length)
        added = np.zeros(
            (self._actions.shape[0], room + 1 - self._actions.shape[1], *self._actions.shape[2:]),
            self._actions.dtype,
        )
        self._actions = np.concatenate([self._actions, added], axis=1)
