"""EpisodeWriter: writes each episode to disk when it ends. OpenEpisodes: rows of unfinished episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.episodes.table import BEGINS, ENDED
from rl_lab.buffers.ring import Array, as_rows
from rl_lab.buffers.row_layout import Bytes, RowLayout
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec

INITIAL_ROWS = 64  # rows per stream that are allocated first


class OpenEpisodes:
    """Rows of the episodes that have not ended, in memory, for N streams that advance together."""

    def __init__(self, layout: RowLayout, num_streams: int, cursor: int = 0) -> None:
        self.layout = layout
        self.num_streams = num_streams
        self.cursor = cursor  # position of the next row
        self.begin = np.full(num_streams, -1, dtype=np.int64)  # position of the first row; -1: none is open
        self.begins = np.zeros(num_streams, dtype=bool)  # whether that row is the first of an episode
        self._room = 0
        self._rings: Bytes = {}  # (N, room, bytes)
        self._make(INITIAL_ROWS)

    def rows(self) -> np.ndarray:
        """Return the number of rows of each open episode, (N,)."""
        return np.where(self.begin < 0, 0, self.cursor - self.begin)

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    def start(self, is_first: np.ndarray) -> None:
        """Start an episode with the next row in each stream without one. is_first: (N,) of that row"""
        none = self.begin < 0
        self.begin[none] = self.cursor
        self.begins[none] = is_first[none]

    def put(self, rows: Bytes) -> None:
        """Append rows to every stream. rows: column -> (N, count, bytes)"""
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
        """Return a copy of the rows at positions first … last of a stream, column -> (count, bytes)."""
        slots = np.arange(first, last) % self._room
        return {name: ring[stream, slots] for name, ring in self._rings.items()}

    def write(self, stream: int, first: int, rows: Bytes) -> None:
        """Replace columns of stored rows. rows: column -> (count, bytes)"""
        for name, value in rows.items():
            self._rings[name][stream, np.arange(first, first + len(value)) % self._room] = value

    def close(self, stream: int) -> None:
        self.begin[stream] = -1

    def _make(self, room: int) -> None:
        """Allocate `room` rows per stream and copy the stored rows."""
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
        """Return the state as tensors; the rows of all open episodes are concatenated."""
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
        self._make(max(INITIAL_ROWS, int(lengths.max(initial=0))))
        done = 0
        for stream in np.flatnonzero(lengths).tolist():
            count = int(lengths[stream])
            piece = {name: value.numpy()[done : done + count] for name, value in state["rows"].items()}
            self.write(stream, int(self.begin[stream]), piece)
            done += count


PART_BYTES = 64 << 20  # a larger open episode is stored in parts
MAX_PART_ROWS = 100_000  # rows


class EpisodeWriter:
    """Receives rows of N streams that advance together.

    max_rows:  a longer episode is stored in parts; None: about 64 MB
    on_closed: called with (number, stream) after an episode was stored
    on_rows:   called after an add with (position of the first row, (N, T) whether a row begins an episode)
    """

    def __init__(
        self,
        store: EpisodeStore,
        unfinished: OpenEpisodes,
        *,
        max_rows: int | None,
        on_closed: Callable[[int, int], None],
        on_rows: Callable[[int, np.ndarray], None],
    ) -> None:
        self._store, self._open = store, unfinished
        usual = min(MAX_PART_ROWS, max(1024, PART_BYTES // store.layout.row_bytes))
        self._max_rows = usual if max_rows is None else int(max_rows)
        if self._max_rows < 1:
            raise ConfigError(f"max_episode_rows must be above 0, not {max_rows}")
        self._on_closed, self._on_rows = on_closed, on_rows

    def add(self, rows: Mapping[str, Array]) -> None:
        """rows: name -> (N, …) or (N, T, …)"""
        packed, first, ended = self._as_bytes(rows)
        steps = first.shape[1]
        stops = np.concatenate([np.flatnonzero(first.any(0)), np.flatnonzero(ended.any(0)) + 1, [steps]])
        stops = np.unique(stops)
        step = 0
        while step < steps:
            for stream in np.flatnonzero(first[:, step] & (self._open.begin >= 0)).tolist():
                self._close(stream, ended=False)  # a reset without an end
            begins = self._open.begin < 0
            self._open.start(first[:, step])
            room = self._max_rows - int(self._open.rows().max())
            end = min(int(stops[np.searchsorted(stops, step, side="right")]), step + room)
            begin = self._open.cursor
            self._open.put({name: value[:, step:end] for name, value in packed.items()})
            over = ended[:, end - 1]
            for stream in np.flatnonzero(over | (self._open.rows() >= self._max_rows)).tolist():
                self._close(stream, ended=bool(over[stream]))
            starts = first[:, step:end].copy()
            starts[:, 0] |= begins
            self._on_rows(begin, starts)
            step = end

    def _as_bytes(self, rows: Mapping[str, Array]) -> tuple[Bytes, np.ndarray, np.ndarray]:
        """Return the rows as bytes (N, T, …), and which of them begin and end an episode, (N, T)."""
        layout, streams = self._store.layout, self._open.num_streams
        missing = [name for name in layout.columns if name not in rows]
        unknown = [name for name in rows if name not in layout.columns]
        if missing or unknown:
            fault = f"'{missing[0]}' is missing" if missing else f"'{unknown[0]}' is unknown"
            raise ConfigError(
                f"column {fault}: the rows have {sorted(rows)}, but the buffer stores {sorted(layout.columns)}"
            )
        name, value = next(iter(rows.items()))
        timed = value.ndim == len(layout.columns[name].shape) + 2
        steps = int(value.shape[1]) if timed else 1
        lead = (streams, steps) if timed else (streams,)
        packed = {}
        for name, value in rows.items():
            tensor = as_rows(name, value, layout.columns[name], lead).cpu()
            packed[name] = layout.as_bytes(name, tensor if timed else tensor.unsqueeze(1), 2)

        def flag(name: str) -> np.ndarray:
            return packed[name][..., 0] != 0 if name in packed else np.zeros((streams, steps), dtype=bool)

        return packed, flag("is_first"), flag("terminated") | flag("truncated")

    def _close(self, stream: int, *, ended: bool) -> None:
        """Write a stream's open episode to disk."""
        begin, end = int(self._open.begin[stream]), self._open.cursor
        rows = self._open.read(stream, begin, end)
        number = self._store.append(
            rows,
            end - begin,
            stream=stream,
            start=begin,
            flags=(ENDED if ended else 0) | (BEGINS if self._open.begins[stream] else 0),
            total_reward=self._total(rows),
        )
        self._open.close(stream)
        self._on_closed(number, stream)

    def _total(self, rows: Bytes) -> float:
        spec: ArraySpec | None = self._store.layout.columns.get("reward")
        if spec is None:
            return 0.0
        reward: Any = self._store.layout.as_tensor("reward", rows["reward"])
        return float(reward.sum(dtype=torch.float64))
