"""Atomic file writes, JSON and JSON Lines, the lock of a run folder, and path checks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO

from rl_lab.errors import CheckpointError, ConfigError, RunLockedError

BLOCK = 1 << 20  # bytes read at a time for a checksum
TEMPORARY_SUFFIX = ".tmp"
LOCK_NAME = ".lock"
_TEMPORARY_NAME = re.compile(rf"\..+\.\d+{re.escape(TEMPORARY_SUFFIX)}")  # .name.pid.tmp, see write_atomic


def write_atomic(path: Path, write: Callable[[BinaryIO], Any]) -> tuple[int, int]:
    """Write a file atomically: `path` holds the old or the complete new content, even after a power failure.

    `write(file)` receives a real file open for reading and writing. It may seek (zip writers do), so the
    checksum is computed from the finished file.

    returns: size in bytes, crc32
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "w+b") as file:
            write(file)
            file.flush()
            size, crc = _checksum(file)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return size, crc


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in a folder durable; a no-op where folders cannot be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_temporary(folder: Path) -> None:
    """Delete temporary files of a killed `write_atomic` in the folder and below.

    Only the lock holder may call it. Links are not followed, and other hidden files are kept.
    """
    for parent, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in filter(_TEMPORARY_NAME.fullmatch, names):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(parent, name))


def crc32_of(path: Path) -> int:
    """crc32 of a file's content."""
    with open(path, "rb") as file:
        return _checksum(file)[1]


def _checksum(file: BinaryIO) -> tuple[int, int]:
    file.seek(0)
    block = memoryview(bytearray(BLOCK))
    size = crc = 0
    while count := file.readinto(block):  # type: ignore[attr-defined]
        size += count
        crc = zlib.crc32(block[:count], crc)
    return size, crc


def write_json_atomic(path: Path, data: Any) -> tuple[int, int]:
    """Write JSON atomically; returns size and crc32. NaN and infinities raise ValueError: JSON has none."""
    text = json.dumps(data, indent=1, allow_nan=False)
    return write_atomic(path, lambda file: file.write(text.encode() + b"\n"))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; CheckpointError when it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): it is damaged or not ours") from None


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of `path`, which need not exist yet."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def absolute(path: Path | str) -> Path:
    """Return a path that does not depend on the current folder, with `~` replaced; links are kept."""
    return Path(os.path.expanduser(path)).absolute()


def inside(folder: Path, path: Path | str) -> Path:
    """Return `path` below `folder` with links resolved; ConfigError when it is outside the folder."""
    root = folder.resolve()
    try:
        target = (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # null bytes, loops of links
        raise ConfigError(f"'{path!s}' is not a path that can be written ({error})") from None
    if target != root and root not in target.parents:
        raise ConfigError(f"'{path}' leads out of {folder}: give a path inside it, without '..' or links")
    return target


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


class RunLock:
    """Exclusive lock on a run folder, held until it is released or this process ends.

        with RunLock(run_dir):
            ...

    The kernel holds the lock (flock), so a killed process leaves none behind. The file names the holder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK_NAME
        self._file: IO[bytes] | None = None

    def acquire(self) -> RunLock:
        """Take the lock; RunLockedError, with process and host, when another process holds it."""
        if self._file is not None:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            # The file stays open while the lock is held; mode "a" keeps the holder's name.
            file = open(self.path, "a+b")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written to: {error}") from error
        try:
            if not _try_flock(file):
                raise RunLockedError(self._taken_message(file))
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            file.flush()
        except BaseException:
            file.close()
            raise
        self._file = file
        _held.add(self)
        return self

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            _held.discard(self)

    @property
    def held(self) -> bool:
        return self._file is not None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _taken_message(self, file: IO[bytes]) -> str:
        who = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            file.seek(0)
            holder = json.loads(file.read())
            who = f"process {holder['pid']} on {holder['host']}"
        return (
            f"{self.folder} is in use by {who}: wait until it ends, stop it, or choose another folder "
            "(run_dir=…)"
        )


def _try_flock(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        warnings.warn(
            "this system has no file locks: a second process can write to the same run folder",
            stacklevel=3,
        )
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems
        warnings.warn(
            f"{file.name} cannot be locked ({error}): a second process can write to this run folder",
            stacklevel=3,
        )
    return True


def _close_in_child() -> None:
    """Close the lock file in a forked worker, which must not hold the lock of a killed trainer.

    Closing it here does not release the parent's lock.
    """
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


# --- JSON Lines ---

# JSON has no NaN and no infinities. They are written as strings, which every JSON parser accepts;
# `read_jsonl` converts them back to floats.
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_safe(value: Any) -> Any:
    """Convert a value to strict JSON: numpy and 0-d tensors to numbers, NaN and infinities to strings."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
        if isinstance(value, bool):
            return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return str(value)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a file; an incomplete last line and lines that are not objects are skipped."""
    rows = []
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and line.endswith(b"\n"):
                    rows.append({key: _number(value) for key, value in row.items()})
    return rows


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


class JsonlWriter:
    """Appends lines to a file without buffering, so a killed process loses none.

    resume_bytes: truncate the file to this length first (the length stored in a checkpoint); 0 starts over,
    None appends. An incomplete last line is always removed.
    """

    def __init__(self, path: Path, *, resume_bytes: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - stays open for the life of the writer
        self._size = self._truncate(resume_bytes)
        self._warned = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. A write error (full disk) loses the line and warns once; it does not raise."""
        line = json.dumps(json_safe(row), allow_nan=False).encode() + b"\n"
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) :]
            self._size += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # never leave half a line before the next one
            if not self._warned:
                warnings.warn(
                    f"{self.path} could not be written ({error}): lines are lost until it can be",
                    stacklevel=2,
                )
                self._warned = True

    def size(self) -> int:
        """Return the bytes written so far, after fsync; stored in a checkpoint's manifest."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
        return self._size

    def close(self) -> None:
        self._file.close()

    def _truncate(self, resume_bytes: int | None) -> int:
        size = os.fstat(self._file.fileno()).st_size
        if resume_bytes is not None and resume_bytes > size > 0:  # 0: the checkpoint is from another run
            warnings.warn(
                f"{self.path} has {size} bytes, but {resume_bytes} at the checkpoint: the lines between are lost",
                stacklevel=3,
            )
        end = size if resume_bytes is None else min(size, resume_bytes)
        end = self._end_of_last_line(end)
        if end != size:
            self._file.truncate(end)
        return end

    def _end_of_last_line(self, end: int) -> int:
        block = 1 << 16
        while end > 0:
            begin = max(0, end - block)
            newline = os.pread(self._file.fileno(), end - begin, begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
        return 0
