"""Opening a folder of episodes, however the process that wrote it ended.

The index is read up to the first record that is not whole. Episodes that reached a chunk and not the index are found in the
chunk itself, so a kill loses at most the episode that was being written, and those that were still open. Whatever is
missing or damaged is said once, by file, with the number of episodes and rows; the rest is used.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rl_lab.buffers.chunk_files import Lost
from rl_lab.buffers.episodes.table import (
    HEAD,
    LONGEST,
    DamagedRecord,
    Dropped,
    Episode,
    EpisodeTable,
    First,
    Record,
    Seal,
    read_log,
    unpack,
)
from rl_lab.errors import ConfigError, MissingPackageError, closest
from rl_lab.utils.install import install_line

# --------------------
# Compression of stored blocks: zstd where it is installed, zlib otherwise, or none.
#
# Each block carries the number of what packed it, so a folder may hold blocks of several kinds.


NUMBERS = {"none": 0, "zlib": 1, "zstd": 2}
NAMES = {number: name for name, number in NUMBERS.items()}
ZSTD_LEVEL = 1  # quicker than the disk; higher levels gain little on images and floats
ZLIB_LEVEL = 1

_local = threading.local()  # a zstd context serves one thread at a time


def choose_compression(name: str) -> str:
    """The compression that is meant: "auto" is zstd where there is one."""
    if name == "auto":
        return "zstd" if _zstd_module() else "zlib"
    if name not in NUMBERS:
        raise ConfigError(f"compression '{name}' is not known.{closest(name, [*NUMBERS, 'auto'])}")
    if name == "zstd" and not _zstd_module():
        raise MissingPackageError(
            f"compression 'zstd' needs the package zstandard: {install_line('zstd')}, or use compression: auto"
        )
    return name


def compressor(name: str) -> Callable[[bytes], bytes]:
    if name == "none":
        return bytes
    if name == "zlib":
        return lambda data: zlib.compress(data, ZLIB_LEVEL)
    return _zstd().compress


def decompress(number: int, data: bytes, size: int) -> bytes:
    """`size` bytes again; ValueError when that is not what is in `data`, without unpacking more than that."""
    name = NAMES.get(number)
    if name == "none":
        content = data
    elif name == "zlib":
        try:
            content = zlib.decompressobj().decompress(data, size + 1)
        except zlib.error as error:
            raise ValueError(str(error)) from None
    elif name == "zstd":
        if not _zstd_module():
            raise MissingPackageError(
                "these episodes are packed with zstd, which needs the package zstandard: "
                + install_line("zstd")
            )
        content = _zstd().decompress(data, size)
    else:
        raise ValueError(f"compression number {number} is not known")
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes where {size} are expected")
    return content


@functools.cache
def _zstd_module() -> str:
    """Name of a module that has zstd, or ""."""
    for name in ("zstandard", "compression.zstd"):  # the second one: Python 3.14
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ModuleNotFoundError:
            pass
    return ""


class _Zstandard:
    """The package zstandard."""

    def __init__(self) -> None:
        import zstandard

        self._module = zstandard
        self._pack = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self._unpack = zstandard.ZstdDecompressor()

    def compress(self, data: bytes) -> bytes:
        return bytes(self._pack.compress(data))

    def decompress(self, data: bytes, size: int) -> bytes:
        try:
            if self._module.frame_content_size(data) != size:
                raise ValueError("a frame of another size")
            return bytes(self._unpack.decompress(data)) if size else b""
        except self._module.ZstdError as error:
            raise ValueError(str(error)) from None


class _StandardLibrary:
    """compression.zstd, from Python 3.14 on."""

    def __init__(self) -> None:
        self._module: Any = importlib.import_module("compression.zstd")

    def compress(self, data: bytes) -> bytes:
        return bytes(self._module.compress(data, level=ZSTD_LEVEL))

    def decompress(self, data: bytes, size: int) -> bytes:
        try:
            return bytes(self._module.ZstdDecompressor().decompress(data, max_length=size + 1))
        except self._module.ZstdError as error:
            raise ValueError(str(error)) from None


def _zstd() -> Any:
    """The calling thread has its own."""
    found = getattr(_local, "zstd", None)
    if found is None:
        found = _local.zstd = _Zstandard() if _zstd_module() == "zstandard" else _StandardLibrary()
    return found


# --------------------
# Reading blocks out of chunk files: checked, unpacked, and on several threads if wanted.


MOST_FILES = 64  # kept open for reading


class DamagedBlock(Exception):
    """A block is not what was written."""

    def __init__(self, chunk: int, reason: str) -> None:
        super().__init__(reason)
        self.chunk = chunk
        self.reason = reason


@dataclass(frozen=True)
class Block:
    """Where a block is, and what it must be."""

    chunk: int
    offset: int
    size: int  # bytes as stored
    crc: int
    codec: int
    raw: int  # bytes when unpacked


def chunk_path(folder: Path, chunk: int) -> Path:
    return folder / f"chunk-{chunk:08d}.episodes"


class ChunkReader:
    """Reads from the chunk files of a folder; at most 64 of them are open at a time. threads: 0 reads in this one."""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self._folder = folder
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="episodes") if threads else None

    def read(self, blocks: Sequence[Block]) -> list[bytes]:
        """Content of each block, in order; DamagedBlock for the first that is not what it must be."""
        files = [self._file(block.chunk) for block in blocks]
        if self._pool is None or len(blocks) < 2:
            contents = [_read(file, block) for file, block in zip(files, blocks)]
        else:
            contents = list(self._pool.map(_read, files, blocks))
        while len(self._files) > MOST_FILES:
            self._files.popitem(last=False)[1].close()
        return contents

    def forget(self, chunk: int) -> None:
        """The file was deleted or replaced."""
        file = self._files.pop(chunk, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for chunk in list(self._files):
            self.forget(chunk)
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _file(self, chunk: int) -> FileIO:
        file = self._files.get(chunk)
        if file is None:
            try:
                file = self._files[chunk] = FileIO(chunk_path(self._folder, chunk))
            except OSError as error:
                raise DamagedBlock(chunk, f"cannot be read ({error.strerror})") from None
        self._files.move_to_end(chunk)
        return file


def _read(file: FileIO, block: Block) -> bytes:
    try:
        data = os.pread(file.fileno(), block.size, block.offset)
    except OSError as error:
        raise DamagedBlock(block.chunk, f"cannot be read ({error.strerror})") from None
    if len(data) != block.size:
        raise DamagedBlock(block.chunk, "is cut off")
    if zlib.crc32(data) != block.crc:
        raise DamagedBlock(block.chunk, "has changed since it was written (checksum)")
    try:
        return decompress(block.codec, data, block.raw)
    except ValueError as error:
        raise DamagedBlock(block.chunk, f"cannot be unpacked ({error})") from None


INDEX = "index.log"
CHANGED = "has changed since it was written (checksum)"


@dataclass
class Recovered:
    """What was found in a folder."""

    table: EpisodeTable
    seals: dict[int, Seal] = field(default_factory=dict)
    ends: dict[int, int] = field(
        default_factory=dict
    )  # chunk -> bytes up to the end of its last whole record
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what happened, in words
    index_is_whole: bool = True  # and says all there is
    index_size: int = 0
    index_records: int = 0


def chunk_files(folder: Path) -> dict[int, Path]:
    """Chunk number -> file, in order."""
    found = {}
    for path in folder.glob("chunk-*.episodes"):
        match = re.fullmatch(r"chunk-(\d+)\.episodes", path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def recover(folder: Path, *, index: Path | None = None, verify: bool = False) -> Recovered:
    """Read a folder. verify: check every block of every chunk, not only of the one written last."""
    index = index or folder / INDEX
    data = index.read_bytes() if index.exists() else b""
    records, good = read_log(data)
    files = chunk_files(folder)
    found = Recovered(table_of(records), index_size=good, index_records=len(records))
    found.seals = {record.chunk: record for record in records if isinstance(record, Seal)}
    if good < len(data):
        found.notes.append(f"{index} was cut at byte {good:,} of {len(data):,}: what follows is not whole")
    elif files and not data:
        found.notes.append(f"{index} is missing and was made again from the chunk files")
    found.index_is_whole = good == len(data) and bool(data or not files)
    _find_unlisted(files, found)
    _find_missing(folder, files, found)
    newest = [chunk for chunk in files if chunk not in found.seals]
    damaged = check_chunks(folder, found.table, list(files) if verify else newest, found.lost)
    for chunk in damaged:  # a seal no longer says what the file is
        found.seals.pop(chunk, None)
    return found


def table_of(records: Iterable[Record]) -> EpisodeTable:
    """The table that an index describes."""
    records = list(records)
    episodes = [record for record in records if isinstance(record, Episode)]
    first = max([record.number for record in records if isinstance(record, First)], default=0)
    table = EpisodeTable(min([first, *(episode.number for episode in episodes[:1])]))
    run: list[Episode] = []
    for episode in episodes:
        if episode.number != table.end + len(run):
            table.extend(run)
            table.skip_to(episode.number)
            run = []
        if episode.number == table.end + len(run):
            run.append(episode)
    table.extend(run)
    while table.first < min(first, table.end):
        table.forget_oldest()
    if not len(table.column("rows")):
        table = EpisodeTable(max(first, table.end))
    table.drop({record.number for record in records if isinstance(record, Dropped)})
    return table


def _find_unlisted(files: dict[int, Path], found: Recovered) -> None:
    """Add episodes that reached a chunk and not the index, and note where each chunk's whole records end."""
    table = found.table
    stored = table.column("size") > 0
    chunk, end = table.column("chunk")[stored], (table.column("offset") + table.column("size"))[stored]
    ends = np.zeros(chunk.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(ends, chunk, end)
    found.ends = {number: int(ends[number]) for number in np.unique(chunk).tolist()}
    listed = max(found.ends, default=-1)
    before = table.end
    for number, path in files.items():
        if number < listed or number in found.seals:
            continue
        last = number == max(files)
        content = _Content(path, found.ends.get(number, 0))
        while (episode := content.next(number)) is not None:
            table.skip_to(episode.number)
            if episode.number != table.end:  # it is known already
                continue
            table.extend([episode])
            if not content.is_whole(episode):
                found.lost.append(_lose(table, np.array([episode.number]), path, CHANGED))
        if content.position < content.size:
            found.notes.append(f"{path}: {content.describe_rest(last)}")
            found.index_is_whole = False
        found.ends[number] = content.position
    if table.end > before:
        found.index_is_whole = False


class _Content:
    """A chunk file, read record by record from a position on."""

    def __init__(self, path: Path, position: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed when forgotten
        self.size = path.stat().st_size
        self.position = position

    def next(self, chunk: int) -> Episode | None:
        """The episode here, if all of it is in the file; the position is then behind it."""
        record = self._record()
        if not isinstance(record, Episode) or (record.chunk, record.offset) != (chunk, self.position):
            return None
        if self.position + record.size > self.size:
            return None
        self.position += record.size
        return record

    def is_whole(self, episode: Episode) -> bool:
        return _is_whole(self._file, episode)

    def describe_rest(self, last: bool) -> str:
        rest = f"{self.size - self.position:,} bytes"
        if not last:
            return f"its last {rest} cannot be read, and the episodes in them are lost"
        record = self._record()
        what = f"an episode of {record.rows:,} rows" if isinstance(record, Episode) else "an episode"
        return f"{what} was being written when it ended, and is lost ({rest})"

    def _record(self) -> Record | None:
        self._file.seek(self.position)
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size or (length := HEAD.unpack(head)[0]) > LONGEST:
            return None
        try:
            return unpack(head + self._file.read(length), 0)[0]
        except DamagedRecord:
            return None


def _find_missing(folder: Path, files: dict[int, Path], found: Recovered) -> None:
    """Take out episodes whose chunk is gone, or too short to hold them."""
    table = found.table
    oldest = min(files, default=0)
    for chunk in np.unique(table.column("chunk")[table.column("rows") > 0]).tolist():
        numbers = table.in_chunk(chunk)
        if chunk not in files:
            if (
                chunk < oldest and not found.index_is_whole
            ):  # deleted for the budget; the note of it was cut off
                table.drop(set(numbers.tolist()))
            else:
                found.lost.append(_lose(table, numbers, chunk_path(folder, chunk), "is missing"))
            continue
        at = numbers - table.first
        beyond = numbers[(table.column("offset") + table.column("size"))[at] > files[chunk].stat().st_size]
        if len(beyond):
            found.lost.append(_lose(table, beyond, files[chunk], "is cut off"))
            found.seals.pop(chunk, None)


def check_chunks(folder: Path, table: EpisodeTable, chunks: Iterable[int], lost: list[Lost]) -> list[int]:
    """Compare every block of these chunks with its checksum, and take damaged episodes out of the table.

    returns: chunks in which there were any
    """
    found = []
    for chunk in chunks:
        path = chunk_path(folder, chunk)
        numbers = table.in_chunk(chunk)
        try:
            with open(path, "rb") as file:
                damaged = [e.number for e in table.records(numbers.tolist()) if not _is_whole(file, e)]
            reason = CHANGED
        except OSError as error:
            damaged, reason = numbers.tolist(), f"cannot be read ({error.strerror})"
        if damaged:
            lost.append(_lose(table, np.array(damaged), path, reason))
            found.append(chunk)
    return found


def _is_whole(file: BinaryIO, episode: Episode) -> bool:
    file.seek(episode.offset + episode.head_size)
    return all(zlib.crc32(file.read(size)) == crc for size, crc in episode.blocks)


def _lose(table: EpisodeTable, numbers: np.ndarray, path: Path, reason: str) -> Lost:
    rows = int(table.column("rows")[numbers - table.first].sum())
    table.drop(set(numbers.tolist()))
    return Lost(str(path), rows, reason, episodes=len(numbers))
