"""Episodes that are still going on: their rows, in memory, until they end and are written to disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.row_layout import Bytes, RowLayout

FEWEST = 64  # rows per stream that memory is made for at first


class OpenEpisodes:
    """The newest rows of N streams in lock step, as far back as the longest open episode begins."""

    def __init__(self, layout: RowLayout, num_streams: int, cursor: int = 0) -> None:
        self.layout = layout
        self.num_streams = num_streams
        self.cursor = cursor  # position of the next row
        self.begin = np.full(num_streams, -1, dtype=np.int64)  # position of the first row; -1: none is open
        self.begins = np.zeros(num_streams, dtype=bool)  # whether that row is the first of an episode
        self._room = 0
        self._rings: Bytes = {}  # (N, room, bytes)
        self._make(FEWEST)

    def rows(self) -> np.ndarray:
        """(N,) rows of each open episode."""
        return np.where(self.begin < 0, 0, self.cursor - self.begin)

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    def start(self, is_first: np.ndarray) -> None:
        """The next row begins an episode wherever none is open. is_first: (N,) of that row"""
        none = self.begin < 0
        self.begin[none] = self.cursor
        self.begins[none] = is_first[none]

    def put(self, rows: Bytes) -> None:
        """Add rows to every stream. rows: column -> (N, count, bytes)"""
        count = next(iter(rows.values())).shape[1]
        needed = int(self.rows().max(initial=0)) + count
        if needed > self._room:
            self._make(max(needed, 2 * self._room))
        slots = np.arange(self.cursor, self.cursor + count) % self._room
        for name, ring in self._rings.items():
            if count == 1:
                ring[:, slots[0]] = rows[name][:, 0]
            else:
                ring[:, slots] = rows[name]
        self.cursor += count

    def read(self, stream: int, first: int, last: int) -> Bytes:
        """Rows first … last (positions) of a stream, column -> (count, bytes), copied."""
        slots = np.arange(first, last) % self._room
        return {name: ring[stream, slots] for name, ring in self._rings.items()}

    def write(self, stream: int, first: int, rows: Bytes) -> None:
        """Replace columns of rows that are there. rows: column -> (count, bytes)"""
        for name, value in rows.items():
            self._rings[name][stream, np.arange(first, first + len(value)) % self._room] = value

    def close(self, stream: int) -> None:
        self.begin[stream] = -1

    def _make(self, room: int) -> None:
        """Memory for `room` rows per stream, with the rows there are."""
        kept = np.arange(self.cursor - int(self.rows().max(initial=0)), self.cursor)
        old, old_room = self._rings, self._room
        self._room = room
        self._rings = {
            name: np.zeros((self.num_streams, room, width), dtype=np.uint8)
            for name, width in self.layout.widths.items()
        }
        for name, ring in old.items():
            self._rings[name][:, kept % room] = ring[:, kept % old_room]

    def get_state(self) -> dict[str, Any]:
        """Everything, as tensors: rows of all open episodes one behind the other."""
        rows = {name: [] for name in self.layout.columns}  # type: dict[str, list[np.ndarray]]
        for stream in np.flatnonzero(self.begin >= 0).tolist():
            for name, value in self.read(stream, int(self.begin[stream]), self.cursor).items():
                rows[name].append(value)
        joined = {
            name: np.concatenate([np.zeros((0, self.layout.widths[name]), np.uint8), *values])
            for name, values in rows.items()
        }
        return {
            "cursor": self.cursor,
            "begin": torch.from_numpy(self.begin.copy()),
            "begins": torch.from_numpy(self.begins.copy()),
            "rows": {name: torch.from_numpy(value) for name, value in joined.items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.cursor = int(state["cursor"])
        self.begin = state["begin"].numpy().copy()
        self.begins = state["begins"].numpy().copy()
        self._rings, self._room = {}, 0
        lengths = self.rows()
        self._make(max(FEWEST, int(lengths.max(initial=0))))
        done = 0
        for stream in np.flatnonzero(lengths).tolist():
            count = int(lengths[stream])
            piece = {name: value.numpy()[done : done + count] for name, value in state["rows"].items()}
            self.write(stream, int(self.begin[stream]), piece)
            done += count
