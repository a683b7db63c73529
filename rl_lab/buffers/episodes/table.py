"""Which episodes are stored, where, and which follow one another. Facts only; no rows.

An episode is known by its number: they are counted in the order in which they were closed, and the oldest go first.
A dropped episode keeps its number, with no rows. Positions are those of RowIndex: every row that was ever added to a
stream, so two episodes follow one another when one starts at the position where the other ends.
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

# --------------------
# Records of the episode log: what one says, as bytes and back.
#
# A record is its length, a checksum, and a body. The index of a folder is nothing but such records, one behind the
# other; a chunk file has, for each episode, the same record and then its blocks. So the end of a log that was cut off at
# any byte can be told from what is whole, and an index that is gone can be made again from the chunks.


HEAD = struct.Struct("<II")  # bytes of the body, its crc32
_EPISODE = struct.Struct("<BQIQIQIBBdI")
_BLOCK = struct.Struct("<II")
_SEAL = struct.Struct("<BIQI")
_FIRST = struct.Struct("<BQ")
_DROPPED = struct.Struct("<BQ")
LONGEST = 1 << 28  # bytes of a body that can be true

ENDED, BEGINS = 1, 2  # flags: its last row is an end; its first row is the first of an episode


class DamagedRecord(Exception):
    """The bytes from here on are not a record."""


@dataclass(frozen=True)
class Episode:
    """A stored episode, and where it is."""

    number: int  # episodes are numbered in the order in which they were closed
    chunk: int
    offset: int  # of its record in the chunk file
    stream: int
    start: int  # position of its first row in the stream
    rows: int
    flags: int
    codec: int
    total_reward: float
    blocks: tuple[tuple[int, int], ...]  # bytes and crc32 of each block, as stored

    @property
    def head_size(self) -> int:
        """Bytes of the record itself."""
        return HEAD.size + _EPISODE.size + len(self.blocks) * _BLOCK.size

    @property
    def size(self) -> int:
        """Bytes in the chunk: the record and its blocks."""
        return self.head_size + sum(size for size, _ in self.blocks)


@dataclass(frozen=True)
class Seal:
    """A chunk that is complete: nothing will be added to it."""

    chunk: int
    size: int
    crc: int


@dataclass(frozen=True)
class First:
    """Episodes before this number have been deleted to keep the budget."""

    number: int


@dataclass(frozen=True)
class Dropped:
    """An episode was found damaged, said to be, and is no longer counted."""

    number: int


Record = Episode | Seal | First | Dropped


def pack(record: Record) -> bytes:
    if isinstance(record, Episode):
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
    elif isinstance(record, First):
        body = _FIRST.pack(2, record.number)
    else:
        body = _DROPPED.pack(3, record.number)
    return HEAD.pack(len(body), zlib.crc32(body)) + body


def unpack(data: bytes | memoryview, position: int) -> tuple[Record, int]:
    """The record at a position, and the position after it; DamagedRecord when there is none that is whole."""
    if position + HEAD.size > len(data):
        raise DamagedRecord("it is cut off")
    length, crc = HEAD.unpack_from(data, position)
    begin = position + HEAD.size
    if length > LONGEST or begin + length > len(data):
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
        return Episode(number, chunk, offset, stream, start, rows, flags, codec, reward, blocks)
    if kind == 1:
        return Seal(*_SEAL.unpack(body)[1:])
    if kind == 2:
        return First(_FIRST.unpack(body)[1])
    if kind == 3:
        return Dropped(_DROPPED.unpack(body)[1])
    raise ValueError(f"a record of kind {kind}")


def read_log(data: bytes) -> tuple[list[Record], int]:
    """The whole records at the beginning of a log, and how many bytes they are."""
    records: list[Record] = []
    position, view = 0, memoryview(data)
    try:
        while position < len(data):
            record, position = unpack(view, position)
            records.append(record)
    except DamagedRecord:
        pass
    return records, position


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
