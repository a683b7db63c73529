"""Which rows a ring holds, and where episodes begin in it. Index arithmetic on the host; no row data.

A position counts every row ever added to a stream, so it never repeats: row `p` lies in slot `p % capacity`
until row `p + capacity` replaces it. All streams advance together, so one cursor serves them all.
"""

from __future__ import annotations

import numpy as np


class Ring:
    """N rings of `capacity` rows in lock step.

    `age` (N, capacity) is each row's distance to the first row of its episode (or to the first row of its
    stream). Rows p … p+k lie inside one episode exactly when `age` of row p+k is at least k, which is all
    that sampling needs to know about episodes.
    """

    def __init__(self, num_streams: int, capacity: int) -> None:
        self.num_streams = num_streams
        self.capacity = capacity
        self.cursor = 0  # position of the next row to be written
        self.first = 0  # no row before this position was ever held: above 0 only after a restore with losses
        self.age = np.zeros((num_streams, capacity), dtype=np.int32)
        self._unbroken: dict[int, int] = {}  # rows -> number of starts inside one episode, kept up to date

    @property
    def oldest(self) -> int:
        return max(self.first, self.cursor - self.capacity)

    @property
    def stored(self) -> int:
        """Rows held per stream."""
        return self.cursor - self.oldest

    def advance(self, is_first: np.ndarray) -> None:
        """Note that one row was added to each stream. is_first: (N,) bool"""
        position, slot = self.cursor, self.cursor % self.capacity
        if position - self.capacity >= self.first:  # sequences that start at the row now replaced are lost
            lost = position - self.capacity
            for rows in self._unbroken:
                self._unbroken[rows] -= int(np.count_nonzero(self._spans(lost + rows - 1, rows)))
        previous = self.age[:, slot - 1] if self.stored else np.full(self.num_streams, -1, dtype=np.int32)
        self.age[:, slot] = np.where(is_first, 0, previous + 1)
        self.cursor += 1
        for rows in self._unbroken:
            self._unbroken[rows] += int(np.count_nonzero(self._spans(position, rows)))

    def rebuild(self, cursor: int, is_first: np.ndarray | None, first: int = 0) -> None:
        """Take over a restored ring. is_first: (N, stored) from the oldest row on; None: one endless episode.

        The oldest row counts as a beginning. Its true age is gone with the rows before it, and no sequence can
        reach back to them.
        """
        self.cursor, self.first = cursor, first
        steps = np.arange(self.stored)
        starts = np.zeros((self.num_streams, self.stored), dtype=bool) if is_first is None else is_first
        begin = np.maximum.accumulate(np.where(starts, steps, 0), axis=1)
        self.age[:, (self.oldest + steps) % self.capacity] = steps - begin
        for rows in self._unbroken:
            self._unbroken[rows] = len(self.unbroken_starts(rows)[0])

    def unbroken(self, stream: np.ndarray, start: np.ndarray, rows: int) -> np.ndarray:
        """(K,) bool: whether `rows` rows from each start lie inside one episode. Starts must be held."""
        return self.age[stream, (start + rows - 1) % self.capacity] >= rows - 1

    def unbroken_count(self, rows: int) -> int:
        """How many starts `unbroken` is true for, over all streams."""
        if rows not in self._unbroken:
            self._unbroken[rows] = len(self.unbroken_starts(rows)[0])
        return self._unbroken[rows]

    def unbroken_starts(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Streams and positions of all those starts, by walking the whole ring."""
        last = np.arange(self.oldest + rows - 1, self.cursor)
        stream, which = np.nonzero(self.age[:, last % self.capacity] >= rows - 1)
        return stream, last[which] - (rows - 1)

    def episode_mask(self, stream: np.ndarray, start: np.ndarray, rows: int, anchor: int) -> np.ndarray:
        """(B, rows) bool: which rows of each window are held and belong to the episode of row `anchor` of it."""
        offset = np.arange(rows)
        position = start[:, None] + offset
        age = self.age[stream[:, None], position % self.capacity]
        same = age - age[:, anchor : anchor + 1] == offset - anchor
        return same & (position >= self.oldest) & (position < self.cursor)

    def _spans(self, last: int, rows: int) -> np.ndarray:
        """(N,) bool: whether the `rows` rows that end at position `last` lie inside one episode."""
        return self.age[:, last % self.capacity] >= rows - 1
