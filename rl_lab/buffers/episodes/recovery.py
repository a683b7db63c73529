"""Opening a folder of episodes after a crash (`recover`), reading chunk files (ChunkReader), compression.

The index is read up to the first incomplete record. Episodes that are in a chunk but not in the index are
found in the chunk itself, so a killed process loses at most the episode that it was writing and the open
episodes. Missing and damaged files are reported once, with the number of episodes and rows; all other
episodes are used.
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

from rl_lab.buffers.chunk_files import LostFile
from rl_lab.buffers.episodes.table import (
    HEAD,
    MAX_BODY_BYTES,
    DamagedRecord,
    DroppedEpisode,
    EpisodeRecord,
    EpisodeTable,
    FirstKept,
    Record,
    Seal,
    read_log,
    unpack,
)
from rl_lab.errors import ConfigError, MissingPackageError, closest, install_line
from rl_lab.utils.untrusted import open_regular, read_bytes

INDEX = "index.log"
LARGEST_INDEX = 4 << 30  # bytes; an episode takes about 100
CHANGED = "has changed since it was written (checksum)"


@dataclass
class Recovered:
    """Contents of a folder of episodes."""

    table: EpisodeTable
    seals: dict[int, Seal] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # chunk -> end of its last complete record, in bytes
    lost: list[LostFile] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # messages about repairs
    index_is_complete: bool = True  # it is intact and lists all episodes
    index_size: int = 0
    index_records: int = 0


def chunk_files(folder: Path) -> dict[int, Path]:
    """Return chunk number -> file, sorted by number."""
    found = {}
    for path in folder.glob("chunk-*.episodes"):
        match = re.fullmatch(r"chunk-(\d+)\.episodes", path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def recover(folder: Path, *, index: Path | None = None, verify: bool = False) -> Recovered:
    """Read a folder of episodes. verify: check every block of every chunk, not only of the last one"""
    index = index or folder / INDEX
    data = read_bytes(index, LARGEST_INDEX) if index.exists() else b""
    records, good = read_log(data)
    files = chunk_files(folder)
    found = Recovered(table_of(records), index_size=good, index_records=len(records))
    found.seals = {record.chunk: record for record in records if isinstance(record, Seal)}
    if good < len(data):
        found.notes.append(f"{index} was cut at byte {good:,} of {len(data):,}: the rest is incomplete")
    elif files and not data:
        found.notes.append(f"{index} is missing and was rebuilt from the chunk files")
    found.index_is_complete = good == len(data) and bool(data or not files)
    _find_unlisted(files, found)
    _find_missing(folder, files, found)
    newest = [chunk for chunk in files if chunk not in found.seals]
    damaged = check_chunks(folder, found.table, list(files) if verify else newest, found.lost)
    for chunk in damaged:  # the seal's checksum is no longer valid
        found.seals.pop(chunk, None)
    return found


def table_of(records: Iterable[Record]) -> EpisodeTable:
    """Return the table described by the records of an index."""
    records = list(records)
    episodes = [record for record in records if isinstance(record, EpisodeRecord)]
    first = max([record.number for record in records if isinstance(record, FirstKept)], default=0)
    table = EpisodeTable(min([first, *(episode.number for episode in episodes[:1])]))
    run: list[EpisodeRecord] = []
    for episode in episodes:
        if episode.number != table.end + len(run):
            table.extend(run)
            table.skip_to(episode.number)
            run = []
        if episode.number == table.end + len(run):
            run.append(episode)
    table.extend(run)
    while table.first < min(first, table.end):
        table.evict_oldest()
    if not len(table.column("rows")):
        table = EpisodeTable(max(first, table.end))
    table.drop({record.number for record in records if isinstance(record, DroppedEpisode)})
    return table


def _find_unlisted(files: dict[int, Path], found: Recovered) -> None:
    """Add episodes that are in a chunk but not in the index, and set `found.ends`."""
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
        content = _RecordReader(path, found.ends.get(number, 0))
        while (episode := content.next(number)) is not None:
            table.skip_to(episode.number)
            if episode.number != table.end:  # already in the table
                continue
            table.extend([episode])
            if not content.is_intact(episode):
                found.lost.append(_drop_lost(table, np.array([episode.number]), path, CHANGED))
        if content.position < content.size:
            found.notes.append(f"{path}: {content.describe_rest(last)}")
            found.index_is_complete = False
        found.ends[number] = content.position
    if table.end > before:
        found.index_is_complete = False


class _RecordReader:
    """Reads the records of a chunk file, starting at a position."""

    def __init__(self, path: Path, position: int) -> None:
        self._file = open_regular(path)  # closed with the object
        self.size = path.stat().st_size
        self.position = position

    def next(self, chunk: int) -> EpisodeRecord | None:
        """Return the episode at the position and advance, or None if it is not completely in the file."""
        record = self._record()
        if not isinstance(record, EpisodeRecord) or (record.chunk, record.offset) != (chunk, self.position):
            return None
        if self.position + record.size > self.size:
            return None
        self.position += record.size
        return record

    def is_intact(self, episode: EpisodeRecord) -> bool:
        return _is_intact(self._file, episode)

    def describe_rest(self, last: bool) -> str:
        rest = f"{self.size - self.position:,} bytes"
        if not last:
            return f"the last {rest} cannot be read; the episodes in them are lost"
        record = self._record()
        what = f"an episode of {record.rows:,} rows" if isinstance(record, EpisodeRecord) else "an episode"
        return f"{what} was being written when the process ended; it is lost ({rest})"

    def _record(self) -> Record | None:
        self._file.seek(self.position)
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size or (length := HEAD.unpack(head)[0]) > MAX_BODY_BYTES:
            return None
        try:
            return unpack(head + self._file.read(length), 0)[0]
        except DamagedRecord:
            return None


def _find_missing(folder: Path, files: dict[int, Path], found: Recovered) -> None:
    """Remove episodes whose chunk is missing or too short."""
    table = found.table
    oldest = min(files, default=0)
    for chunk in np.unique(table.column("chunk")[table.column("rows") > 0]).tolist():
        numbers = table.in_chunk(chunk)
        if chunk not in files:
            # Deleted to keep the limits, and its record in the index was cut off.
            if chunk < oldest and not found.index_is_complete:
                table.drop(set(numbers.tolist()))
            else:
                found.lost.append(_drop_lost(table, numbers, chunk_path(folder, chunk), "is missing"))
            continue
        at = numbers - table.first
        beyond = numbers[(table.column("offset") + table.column("size"))[at] > files[chunk].stat().st_size]
        if len(beyond):
            found.lost.append(_drop_lost(table, beyond, files[chunk], "is cut off"))
            found.seals.pop(chunk, None)


def check_chunks(folder: Path, table: EpisodeTable, chunks: Iterable[int], lost: list[LostFile]) -> list[int]:
    """Compare every block of these chunks with its checksum, and remove damaged episodes from the table.

    returns: chunks with damaged episodes
    """
    found = []
    for chunk in chunks:
        path = chunk_path(folder, chunk)
        numbers = table.in_chunk(chunk)
        try:
            with open_regular(path) as file:
                damaged = [e.number for e in table.records(numbers.tolist()) if not _is_intact(file, e)]
            reason = CHANGED
        except OSError as error:
            damaged, reason = numbers.tolist(), f"cannot be read ({error.strerror})"
        if damaged:
            lost.append(_drop_lost(table, np.array(damaged), path, reason))
            found.append(chunk)
    return found


def _is_intact(file: BinaryIO, episode: EpisodeRecord) -> bool:
    file.seek(episode.offset + episode.head_size)
    return all(zlib.crc32(file.read(size)) == crc for size, crc in episode.blocks)


def _drop_lost(table: EpisodeTable, numbers: np.ndarray, path: Path, reason: str) -> LostFile:
    rows = int(table.column("rows")[numbers - table.first].sum())
    table.drop(set(numbers.tolist()))
    return LostFile(str(path), rows, reason, episodes=len(numbers))


# --- Chunk files --------------------------------------------------------------------------------


MAX_OPEN_FILES = 64  # for reading


class DamagedBlock(Exception):
    """A block cannot be read or does not match its checksum."""

    def __init__(self, chunk: int, reason: str) -> None:
        super().__init__(reason)
        self.chunk = chunk
        self.reason = reason


@dataclass(frozen=True)
class BlockLocation:
    """Position, size and checksum of a block in a chunk file."""

    chunk: int
    offset: int
    size: int  # stored bytes
    crc: int
    codec: int
    raw: int  # decompressed bytes


def chunk_path(folder: Path, chunk: int) -> Path:
    return folder / f"chunk-{chunk:08d}.episodes"


class ChunkReader:
    """Reads, checks and decompresses blocks of chunk files. threads: 0 uses the caller's thread"""

    def __init__(self, folder: Path, threads: int = 0) -> None:
        self._folder = folder
        self._files: OrderedDict[int, FileIO] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="episodes") if threads else None

    def read(self, blocks: Sequence[BlockLocation]) -> list[bytes]:
        """Return the content of each block, in order; DamagedBlock for the first damaged one."""
        files = [self._file(block.chunk) for block in blocks]
        if self._pool is None or len(blocks) < 2:
            contents = [_read(file, block) for file, block in zip(files, blocks)]
        else:
            contents = list(self._pool.map(_read, files, blocks))
        while len(self._files) > MAX_OPEN_FILES:
            self._files.popitem(last=False)[1].close()
        return contents

    def close_file(self, chunk: int) -> None:
        """Close the file of a chunk that is deleted or replaced."""
        file = self._files.pop(chunk, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        for chunk in list(self._files):
            self.close_file(chunk)
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


def _read(file: FileIO, block: BlockLocation) -> bytes:
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
        raise DamagedBlock(block.chunk, f"cannot be decompressed ({error})") from None


# --- Compression --------------------------------------------------------------------------------

# Each episode stores the number of its codec, so a folder may contain several.


CODEC_NUMBERS = {"none": 0, "zlib": 1, "zstd": 2}
CODEC_NAMES = {number: name for name, number in CODEC_NUMBERS.items()}
ZSTD_LEVEL = 1  # faster than the disk; higher levels gain little for images and floats
ZLIB_LEVEL = 1

_local = threading.local()  # zstd contexts are not thread-safe


def choose_compression(name: str) -> str:
    """Return the name of the compression; "auto" is zstd if it is installed, else zlib."""
    if name == "auto":
        return "zstd" if _zstd_module() else "zlib"
    if name not in CODEC_NUMBERS:
        raise ConfigError(f"compression '{name}' is unknown.{closest(name, [*CODEC_NUMBERS, 'auto'])}")
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
    compress: Callable[[bytes], bytes] = _zstd().compress
    return compress


def decompress(number: int, data: bytes, size: int) -> bytes:
    """Return the `size` decompressed bytes; ValueError if `data` is damaged or has another size."""
    name = CODEC_NAMES.get(number)
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
                "zstandard is missing, and these episodes are compressed with zstd: " + install_line("zstd")
            )
        content = _zstd().decompress(data, size)
    else:
        raise ValueError(f"codec number {number} is unknown")
    if len(content) != size:
        raise ValueError(f"{len(content)} bytes instead of {size}")
    return content


@functools.cache
def _zstd_module() -> str:
    """Return the name of an installed zstd module, or ""."""
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
                raise ValueError("a frame of the wrong size")
            return bytes(self._unpack.decompress(data)) if size else b""
        except self._module.ZstdError as error:
            raise ValueError(str(error)) from None


class _StandardLibrary:
    """The module compression.zstd of Python 3.14 and later."""

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
    """Return the codec of the calling thread."""
    found = getattr(_local, "zstd", None)
    if found is None:
        found = _local.zstd = _Zstandard() if _zstd_module() == "zstandard" else _StandardLibrary()
    return found
