"""Reading blocks out of chunk files: checked, unpacked, and on several threads if wanted."""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from rl_lab.buffers.compression import decompress

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
