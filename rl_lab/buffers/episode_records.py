"""Records of the episode log: what one says, as bytes and back.

A record is its length, a checksum, and a body. The index of a folder is nothing but such records, one behind the
other; a chunk file has, for each episode, the same record and then its blocks. So the end of a log that was cut off at
any byte can be told from what is whole, and an index that is gone can be made again from the chunks.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

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
