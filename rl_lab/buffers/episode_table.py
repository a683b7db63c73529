"""Which episodes are stored, where, and which follow one another. Facts only; no rows.

An episode is known by its number: they are counted in the order in which they were closed, and the oldest go first.
A dropped episode keeps its number, with no rows. Positions are those of RowIndex: every row that was ever added to a
stream, so two episodes follow one another when one starts at the position where the other ends.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from rl_lab.buffers.episode_records import ENDED, Episode

_FIELDS = {
    "stream": np.int32,
    "start": np.int64,
    "rows": np.int32,
    "flags": np.uint8,
    "chunk": np.int32,
    "offset": np.int64,
    "codec": np.uint8,
    "reward": np.float64,
    "size": np.int64,
    "block": np.int64,  # its first block among all blocks
    "blocks": np.int32,
}


class Growing:
    """An array that grows at its end, and may forget its beginning. Index 0 is the first that is left."""

    def __init__(self, dtype: type) -> None:
        self._data: np.ndarray = np.zeros(64, dtype=dtype)
        self._begin = self._end = 0

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def view(self) -> np.ndarray:
        return self._data[self._begin : self._end]

    def extend(self, values: Sequence[float] | np.ndarray) -> None:
        if self._end + len(values) > len(self._data):
            kept = self.view.copy()
            self._data = np.zeros(max(64, 2 * (len(kept) + len(values))), dtype=self._data.dtype)
            self._begin, self._end = 0, len(kept)
            self._data[: self._end] = kept
        self._data[self._end : self._end + len(values)] = values
        self._end += len(values)

    def forget(self, count: int) -> None:
        self._begin += count


class StreamEpisodes:
    """The episodes of one stream in the order of their positions, and the runs without a gap that they form."""

    def __init__(self) -> None:
        self.starts, self.numbers, self.ends = array("q"), array("q"), array("q")
        self._head = 0
        self.runs: list[list[int]] = []  # [first position, position after the last]

    def __len__(self) -> int:
        return len(self.starts) - self._head

    def append(self, number: int, start: int, rows: int) -> None:
        self.starts.append(start)
        self.numbers.append(number)
        self.ends.append(start + rows)
        if self.runs and self.runs[-1][1] == start:
            self.runs[-1][1] = start + rows
        else:
            self.runs.append([start, start + rows])

    def forget_oldest(self) -> None:
        self.runs[0][0] = self.ends[self._head]
        if self.runs[0][0] == self.runs[0][1]:
            self.runs.pop(0)
        self._head += 1
        if self._head > 1024 and 2 * self._head > len(self.starts):
            for values in (self.starts, self.numbers, self.ends):
                del values[: self._head]
            self._head = 0

    def remove(self, numbers: set[int]) -> None:
        kept = [entry for entry in self.entries() if entry[0] not in numbers]
        self.__init__()  # type: ignore[misc]
        for number, start, rows in kept:
            self.append(number, start, rows)

    def entries(self) -> Iterator[tuple[int, int, int]]:
        """Number, start and rows of each."""
        for k in range(self._head, len(self.starts)):
            yield self.numbers[k], self.starts[k], self.ends[k] - self.starts[k]

    def at(self, position: int) -> int:
        """Number of the episode that holds a position; -1: none."""
        k = bisect_right(self.starts, position, self._head) - 1
        return self.numbers[k] if k >= self._head and position < self.ends[k] else -1


class EpisodeTable:
    """All stored episodes: numbers `first` … `end`."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._columns = {name: Growing(dtype) for name, dtype in _FIELDS.items()}
        self._block_sizes, self._block_crcs = Growing(np.uint32), Growing(np.uint32)
        self._block_offsets = Growing(np.int64)  # in the chunk
        self._forgotten_blocks = 0
        self.streams: dict[int, StreamEpisodes] = {}
        self.rows = 0  # of all episodes
        self.episodes = 0  # that are not dropped
        self.size = 0  # bytes in chunks
        self.changes = 0  # counts drops: what was summed up over episodes before must be summed up anew

    @property
    def end(self) -> int:
        return self.first + len(self._columns["rows"])

    def column(self, name: str) -> np.ndarray:
        """A fact about every episode, (end - first,)."""
        return self._columns[name].view

    def fact(self, number: int, name: str) -> int:
        return int(self.column(name)[number - self.first])

    def extend(self, episodes: Sequence[Episode]) -> None:
        """Add the next episodes, whose numbers go on from `end`."""
        if not episodes:
            return
        assert [episode.number for episode in episodes] == list(range(self.end, self.end + len(episodes)))
        counts = np.array([len(episode.blocks) for episode in episodes])
        blocks = np.array([block for episode in episodes for block in episode.blocks], dtype=np.int64)
        before = self._forgotten_blocks + len(self._block_sizes)
        facts: dict[str, Any] = {
            "stream": [episode.stream for episode in episodes],
            "start": [episode.start for episode in episodes],
            "rows": [episode.rows for episode in episodes],
            "flags": [episode.flags for episode in episodes],
            "chunk": [episode.chunk for episode in episodes],
            "offset": [episode.offset for episode in episodes],
            "codec": [episode.codec for episode in episodes],
            "reward": [episode.total_reward for episode in episodes],
            "size": [episode.size for episode in episodes],
            "block": before + np.cumsum(counts) - counts,
            "blocks": counts,
        }
        for name, values in facts.items():
            self._columns[name].extend(values)
        self._block_sizes.extend(blocks[:, 0])
        self._block_crcs.extend(blocks[:, 1])
        heads = [episode.offset + episode.head_size for episode in episodes]
        before_block = np.cumsum(blocks[:, 0]) - blocks[:, 0]
        first_of = np.repeat(before_block[np.cumsum(counts) - counts], counts)
        self._block_offsets.extend(np.repeat(heads, counts) + before_block - first_of)
        for episode in episodes:
            if episode.stream not in self.streams:
                self.streams[episode.stream] = StreamEpisodes()
            self.streams[episode.stream].append(episode.number, episode.start, episode.rows)
        self.rows += sum(facts["rows"])
        self.size += sum(facts["size"])
        self.episodes += len(episodes)

    def skip_to(self, number: int) -> None:
        """Use up numbers before `number` without episodes."""
        missing = max(0, number - self.end)
        for name, column in self._columns.items():
            empty = self._forgotten_blocks + len(self._block_sizes) if name == "block" else 0
            column.extend(np.full(missing, empty))

    def forget_oldest(self) -> None:
        """Evict number `first`."""
        rows = self.fact(self.first, "rows")
        if rows:
            stream = self.fact(self.first, "stream")
            self.streams[stream].forget_oldest()
            if not len(self.streams[stream]):
                del self.streams[stream]
            self._count_out(self.first)
        blocks = self.fact(self.first, "blocks")
        for values in (self._block_sizes, self._block_crcs, self._block_offsets):
            values.forget(blocks)
        self._forgotten_blocks += blocks
        for column in self._columns.values():
            column.forget(1)
        self.first += 1

    def drop(self, numbers: set[int]) -> None:
        """Take damaged episodes out. Their numbers stay, without rows."""
        present = {n for n in numbers if self.first <= n < self.end and self.fact(n, "rows")}
        for stream in {self.fact(number, "stream") for number in present}:
            self.streams[stream].remove(present)
            if not len(self.streams[stream]):
                del self.streams[stream]
        for number in present:
            self._count_out(number)
            self._columns["rows"].view[number - self.first] = 0
        self.changes += bool(present)

    def block(self, number: int, index: int) -> tuple[int, int, int]:
        """Offset in the chunk, bytes and crc32 of a block of an episode."""
        at = int(self.column("block")[number - self.first]) - self._forgotten_blocks + index
        sizes, crcs, offsets = self._block_sizes.view, self._block_crcs.view, self._block_offsets.view
        return int(offsets[at]), int(sizes[at]), int(crcs[at])

    def records(self, numbers: Iterable[int]) -> Iterator[Episode]:
        """The whole records of episodes, as they were added."""
        facts = {name: self.column(name).tolist() for name in _FIELDS}
        sizes, crcs = self._block_sizes.view.tolist(), self._block_crcs.view.tolist()
        for number in numbers:
            at = number - self.first
            begin = facts["block"][at] - self._forgotten_blocks
            end = begin + facts["blocks"][at]
            yield Episode(
                number=number,
                chunk=facts["chunk"][at],
                offset=facts["offset"][at],
                stream=facts["stream"][at],
                start=facts["start"][at],
                rows=facts["rows"][at],
                flags=facts["flags"][at],
                codec=facts["codec"][at],
                total_reward=facts["reward"][at],
                blocks=tuple(zip(sizes[begin:end], crcs[begin:end])),
            )

    def numbers(self) -> np.ndarray:
        """Numbers of the episodes that have rows."""
        return self.first + np.flatnonzero(self.column("rows"))

    def in_chunk(self, chunk: int) -> np.ndarray:
        """Numbers of the episodes of a chunk that have rows."""
        return self.first + np.flatnonzero((self.column("chunk") == chunk) & (self.column("rows") > 0))

    def oldest_chunk(self) -> int:
        """Number of the oldest chunk that holds an episode; a large number when there is none."""
        rows, chunk = self.column("rows"), self.column("chunk")
        return next((int(chunk[k]) for k in range(len(rows)) if rows[k]), 1 << 62)

    def ended(self) -> np.ndarray:
        """(end - first,) bool: episodes whose last row is an end."""
        return (self.column("flags") & ENDED).astype(bool) & (self.column("rows") > 0)

    def _count_out(self, number: int) -> None:
        self.rows -= self.fact(number, "rows")
        self.size -= self.fact(number, "size")
        self.episodes -= 1
