"""Files that are whole or absent, a lock on a run folder, and paths that stay where they belong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import warnings
import weakref
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO

from rl_lab.errors import CheckpointError, ConfigError, RunLockedError

BLOCK = 1 << 20  # bytes read at a time for a checksum
TEMPORARY_SUFFIX = ".tmp"
LOCK_NAME = ".lock"
_TEMPORARY_NAME = re.compile(rf"\..+\.\d+{re.escape(TEMPORARY_SUFFIX)}")  # .name.pid.tmp, see write_atomic


def write_atomic(path: Path, write: Callable[[BinaryIO], Any]) -> tuple[int, int]:
    """Write a file so that `path` is either what it was or the whole new content, even if power fails.

    `write(file)` gets a real file open for reading and writing; it may seek (zip writers do), so the checksum
    is taken from the finished file, not from the stream of writes.

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
    """Delete what a killed `write_atomic` left behind, in the folder and below. Only for the lock's holder.

    Links are not followed, and other hidden files stay.
    """
    for parent, _, names in os.walk(folder) if not folder.is_symlink() else ():
        for name in filter(_TEMPORARY_NAME.fullmatch, names):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(parent, name))


def crc32_of(path: Path) -> int:
    """Checksum of a whole file."""
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
    """Write JSON atomically; returns size and crc32. NaN and infinities are refused: they are not JSON."""
    text = json.dumps(data, indent=1, allow_nan=False)
    return write_atomic(path, lambda file: file.write(text.encode() + b"\n"))


def read_json(path: Path) -> Any:
    """Content of a JSON file; CheckpointError when it is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}): it is damaged or not ours") from None


def free_bytes(path: Path) -> int:
    """Bytes free on the disk of `path`, which need not exist yet."""
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def inside(folder: Path, path: Path | str) -> Path:
    """The path below `folder`, with links resolved; ConfigError when it would leave the folder."""
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
    """Keeps a second process out of a run folder, for as long as this process lives.

        with RunLock(run_dir):
            ...

    The kernel holds the lock (flock), so a killed process leaves none behind. The file says who has it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK_NAME
        self._file: IO[bytes] | None = None

    def acquire(self) -> RunLock:
        """Take the lock; RunLockedError, naming process and host, when another has it."""
        if self._file is not None:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            # It stays open while held; "a" does not wipe the holder's name.
            file = open(self.path, "a+b")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"nothing can be written in {self.folder}: {error}") from error
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
            f"{who} is already working in {self.folder}. Wait for it, stop it, or give this run another folder "
            "(run_dir=…)."
        )


def _try_flock(file: IO[bytes]) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        warnings.warn(
            "this system has no file locks: nothing keeps a second process out of the run folder",
            stacklevel=3,
        )
        return True
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some network file systems
        warnings.warn(
            f"{file.name} cannot be locked ({error}): a second process would not be kept out", stacklevel=3
        )
    return True


def _close_in_child() -> None:
    """A forked worker must not keep the lock of a trainer that was killed; closing here does not unlock it."""
    for lock in list(_held):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
