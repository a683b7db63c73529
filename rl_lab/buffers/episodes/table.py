"""EpisodeTable: number, position and file location of each stored episode; the records of the episode log.

Episodes are numbered in the order in which they were closed, and the oldest are evicted first. A dropped
(damaged) episode keeps its number, with 0 rows. Positions are those of RowIndex, which count every row ever
added to a stream: two episodes are consecutive if one starts at the position where the other ends.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ENDED, BEGINS = 1, 2  # flags: the last row is an end; the first row has is_first

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
    "block": np.int64,  # index of the first block among all blocks
    "blocks": np.int32,
}


class EpisodeTable:
    """All stored episodes, with the numbers `first` … `end`. It holds no rows."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self._columns = {name: GrowingArray(dtype) for name, dtype in _FIELDS.items()}
        self._block_sizes, self._block_crcs = GrowingArray(np.uint32), GrowingArray(np.uint32)
        self._block_offsets = GrowingArray(np.int64)  # in the chunk
        self._evicted_blocks = 0
        self.streams: dict[int, StreamEpisodes] = {}
        self.rows = 0  # of all episodes
        self.episodes = 0  # without dropped ones
        self.size = 0  # bytes in chunks
        self.changes = 0  # number of drops; after a drop, sums over episodes must be recomputed

    @property
    def end(self) -> int:
        return self.first + len(self._columns["rows"])

    def column(self, name: str) -> np.ndarray:
        """Return one field of every episode, (end - first,)."""
        return self._columns[name].view

    def fact(self, number: int, name: str) -> int:
        return int(self.column(name)[number - self.first])

    def extend(self, episodes: Sequence[EpisodeRecord]) -> None:
        """Append episodes, whose numbers start at `end`."""
        if not episodes:
            return
        assert [episode.number for episode in episodes] == list(range(self.end, self.end + len(episodes)))
        counts = np.array([len(episode.blocks) for episode in episodes])
        blocks = np.array([block for episode in episodes for block in episode.blocks], dtype=np.int64)
        before = self._evicted_blocks + len(self._block_sizes)
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
        """Skip the numbers before `number`: they have no episodes."""
        missing = max(0, number - self.end)
        for name, column in self._columns.items():
            empty = self._evicted_blocks + len(self._block_sizes) if name == "block" else 0
            column.extend(np.full(missing, empty))

    def evict_oldest(self) -> None:
        """Remove episode `first`."""
        rows = self.fact(self.first, "rows")
        if rows:
            stream = self.fact(self.first, "stream")
            self.streams[stream].evict_oldest()
            if not len(self.streams[stream]):
                del self.streams[stream]
            self._subtract(self.first)
        blocks = self.fact(self.first, "blocks")
        for values in (self._block_sizes, self._block_crcs, self._block_offsets):
            values.drop_first(blocks)
        self._evicted_blocks += blocks
        for column in self._columns.values():
            column.drop_first(1)
        self.first += 1

    def drop(self, numbers: set[int]) -> None:
        """Remove damaged episodes. They keep their numbers, with 0 rows."""
        present = {n for n in numbers if self.first <= n < self.end and self.fact(n, "rows")}
        for stream in {self.fact(number, "stream") for number in present}:
            self.streams[stream].remove(present)
            if not len(self.streams[stream]):
                del self.streams[stream]
        for number in present:
            self._subtract(number)
            self._columns["rows"].view[number - self.first] = 0
        self.changes += bool(present)

    def block(self, number: int, index: int) -> tuple[int, int, int]:
        """Return offset in the chunk, bytes and crc32 of a block of an episode."""
        at = int(self.column("block")[number - self.first]) - self._evicted_blocks + index
        sizes, crcs, offsets = self._block_sizes.view, self._block_crcs.view, self._block_offsets.view
        return int(offsets[at]), int(sizes[at]), int(crcs[at])

    def records(self, numbers: Iterable[int]) -> Iterator[EpisodeRecord]:
        """Yield the complete records of episodes."""
        facts = {name: self.column(name).tolist() for name in _FIELDS}
        sizes, crcs = self._block_sizes.view.tolist(), self._block_crcs.view.tolist()
        for number in numbers:
            at = number - self.first
            begin = facts["block"][at] - self._evicted_blocks
            end = begin + facts["blocks"][at]
            yield EpisodeRecord(
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
        """Return the numbers of the episodes that have rows."""
        return self.first + np.flatnonzero(self.column("rows"))

    def in_chunk(self, chunk: int) -> np.ndarray:
        """Return the numbers of the episodes of a chunk that have rows."""
        return self.first + np.flatnonzero((self.column("chunk") == chunk) & (self.column("rows") > 0))

    def oldest_chunk(self) -> int:
        """Return the number of the oldest chunk with an episode; a large number if there is none."""
        rows, chunk = self.column("rows"), self.column("chunk")
        return next((int(chunk[k]) for k in range(len(rows)) if rows[k]), 1 << 62)

    def ended(self) -> np.ndarray:
        """Return which episodes ended with a terminated or truncated row, (end - first,) bool."""
        return (self.column("flags") & ENDED).astype(bool) & (self.column("rows") > 0)

    def _subtract(self, number: int) -> None:
        self.rows -= self.fact(number, "rows")
        self.size -= self.fact(number, "size")
        self.episodes -= 1


class GrowingArray:
    """An array that grows at its end and can drop its first elements. Index 0 is the first kept element."""

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

    def drop_first(self, count: int) -> None:
        self._begin += count


class StreamEpisodes:
    """The episodes of one stream, sorted by position, and the runs of consecutive episodes."""

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

    def evict_oldest(self) -> None:
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
        """Yield number, start and rows of each episode."""
        for k in range(self._head, len(self.starts)):
            yield self.numbers[k], self.starts[k], self.ends[k] - self.starts[k]

    def at(self, position: int) -> int:
        """Return the number of the episode at a position, or -1."""
        k = bisect_right(self.starts, position, self._head) - 1
        return self.numbers[k] if k >= self._head and position < self.ends[k] else -1


# --- Log records --------------------------------------------------------------------------------

# A record has a length, a checksum and a body. The index is a sequence of records; a chunk file has, for each
# episode, the same record followed by its blocks. So a truncated log is detected at any byte, and a missing
# index can be rebuilt from the chunks.


HEAD = struct.Struct("<II")  # bytes of the body, its crc32
_EPISODE = struct.Struct("<BQIQIQIBBdI")
_BLOCK = struct.Struct("<II")
_SEAL = struct.Struct("<BIQI")
_FIRST = struct.Struct("<BQ")
_DROPPED = struct.Struct("<BQ")
MAX_BODY_BYTES = 1 << 28  # a longer body is damaged


class DamagedRecord(Exception):
    """The bytes are not a complete record."""


@dataclass(frozen=True)
class EpisodeRecord:
    """A stored episode and its location."""

    number: int
    chunk: int
    offset: int  # of its record in the chunk file
    stream: int
    start: int  # position of its first row in the stream
    rows: int
    flags: int
    codec: int
    total_reward: float
    blocks: tuple[tuple[int, int], ...]  # stored bytes and crc32 of each block

    @property
    def head_size(self) -> int:
        """Bytes of the record."""
        return HEAD.size + _EPISODE.size + len(self.blocks) * _BLOCK.size

    @property
    def size(self) -> int:
        """Bytes of the record and its blocks."""
        return self.head_size + sum(size for size, _ in self.blocks)


@dataclass(frozen=True)
class Seal:
    """A complete chunk, with its size and checksum."""

    chunk: int
    size: int
    crc: int


@dataclass(frozen=True)
class FirstKept:
    """Episodes before this number were evicted."""

    number: int


@dataclass(frozen=True)
class DroppedEpisode:
    """A damaged episode that was reported and removed from the table."""

    number: int


Record = EpisodeRecord | Seal | FirstKept | DroppedEpisode


def pack(record: Record) -> bytes:
    if isinstance(record, EpisodeRecord):
        e = record
        body = _EPISODE.pack(
            0,
            e.number,
            e.chunk,
            e.offset,
            e.stream,
            e.start,
            e.rows,
            e.flags,
            e.codec,
            e.total_reward,
            len(e.blocks),
        ) + b"".join(_BLOCK.pack(size, crc) for size, crc in e.blocks)
    elif isinstance(record, Seal):
        body = _SEAL.pack(1, record.chunk, record.size, record.crc)
    elif isinstance(record, FirstKept):
        body = _FIRST.pack(2, record.number)
    else:
        body = _DROPPED.pack(3, record.number)
    return HEAD.pack(len(body), zlib.crc32(body)) + body


def unpack(data: bytes | memoryview, position: int) -> tuple[Record, int]:
    """Return the record at a position and the position after it; DamagedRecord if it is not complete."""
    if position + HEAD.size > len(data):
        raise DamagedRecord("it is cut off")
    length, crc = HEAD.unpack_from(data, position)
    begin = position + HEAD.size
    if length > MAX_BODY_BYTES or begin + length > len(data):
        raise DamagedRecord("it is cut off")
    body = data[begin : begin + length]
    if zlib.crc32(body) != crc:
        raise DamagedRecord("its checksum is wrong")
    try:
        return _parse(body), begin + length
    except (struct.error, ValueError, IndexError) as error:
        raise DamagedRecord(str(error)) from None


def _parse(body: bytes | memoryview) -> Record:
    kind = body[0]
    if kind == 0:
        _, number, chunk, offset, stream, start, rows, flags, codec, reward, count = _EPISODE.unpack_from(
            body
        )
        blocks = tuple(_BLOCK.iter_unpack(body[_EPISODE.size :]))
        if len(blocks) != count or not rows:
            raise ValueError("an episode with a wrong number of blocks")
        return EpisodeRecord(number, chunk, offset, stream, start, rows, flags, codec, reward, blocks)
    if kind == 1:
        return Seal(*_SEAL.unpack(body)[1:])
    if kind == 2:
        return FirstKept(_FIRST.unpack(body)[1])
    if kind == 3:
        return DroppedEpisode(_DROPPED.unpack(body)[1])
    raise ValueError(f"a record of kind {kind}")


def read_log(data: bytes) -> tuple[list[Record], int]:
    """Return the complete records at the beginning of a log, and their size in bytes."""
    records: list[Record] = []
    position, view = 0, memoryview(data)
    try:
        while position < len(data):
            record, position = unpack(view, position)
            records.append(record)
    except DamagedRecord:
        pass
    return records, position
