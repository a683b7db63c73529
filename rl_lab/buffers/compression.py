"""Compression of stored blocks: zstd where it is installed, zlib otherwise, or none.

Each block carries the number of what packed it, so a folder may hold blocks of several kinds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
import zlib
from collections.abc import Callable
from typing import Any

from rl_lab.errors import ConfigError, MissingPackageError, closest
from rl_lab.utils.install import install_line

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
