"""Atomic file writes, JSON and JSON Lines, the lock of a run folder, and path checks."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import socket
import stat
import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, BinaryIO

from rl_lab.errors import CheckpointError, ConfigError, RunFolderLostError, RunLockedError
from rl_lab.utils.untrusted import LARGEST_JSON, open_regular, read_bytes

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
    make_folder(path.parent)
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


def make_folder(folder: Path) -> None:
    """Create a folder with its parents; RunFolderLostError instead of a locked run folder that was moved."""
    if not folder.is_dir():
        for lock in list(_held):
            if lock.folder == folder or lock.folder in folder.parents:
                lock.check()
        folder.mkdir(parents=True, exist_ok=True)


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
    with open_regular(path) as file:
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
        return json.loads(read_bytes(path, LARGEST_JSON))
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


try:
    _START_FOLDER = os.getcwd()
except OSError:  # it was deleted before this process started
    _START_FOLDER = os.sep


def ensure_current_folder() -> None:
    """Give this process a current folder that exists, if its own was deleted: processes start from it.

    It is the folder that now has the same name, or else the root.
    """
    try:
        os.getcwd()
    except OSError:
        for folder in (_START_FOLDER, os.sep):
            with contextlib.suppress(OSError):
                os.chdir(folder)
                return


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

        with RunLock(run_dir) as lock:
            lock.check()

    The kernel holds the lock (flock), so a killed process leaves none behind. The lock file names the holder.
    The folder itself is locked, too, where the file system can: that lock remains if the file is deleted.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LOCK_NAME
        self._file: IO[bytes] | None = None
        self._folder_handle: int | None = None

    def acquire(self) -> RunLock:
        """Take the lock; RunLockedError, with process and host, when another process holds it."""
        if self._file is not None:
            return self
        file: IO[bytes] | None = None
        handle: int | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = _open_folder(self.folder)
            # The folder first: a process that cannot lock it must not hold a new lock file, not even for a moment,
            # because the holder would take it for one that has the folder (`_renew`).
            if not _try_flock_folder(handle):
                raise RunLockedError(self._taken_message())
            file = self._open()
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{self.path} is not a regular file: remove it")
            if not _try_flock(file):
                raise RunLockedError(self._taken_message())
            self._write_holder(file)
        except BaseException as error:
            if file is not None:
                file.close()
            if handle is not None:
                os.close(handle)
            if isinstance(error, OSError):
                raise ConfigError(f"{self.folder} cannot be written to: {error}") from error
            raise
        self._file, self._folder_handle = file, handle
        _held.add(self)
        return self

    def _open(self) -> IO[bytes]:
        # Mode "a" keeps the holder's name. The file stays open while the lock is held.
        return open(self.path, "a+b")

    @staticmethod
    def _write_holder(file: IO[bytes]) -> None:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            _held.discard(self)
        if self._folder_handle is not None:
            os.close(self._folder_handle)
            self._folder_handle = None

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # at the end of the interpreter
            self.release()

    def check(self) -> None:
        """Raise RunFolderLostError if the folder at this path is not the locked one any more.

        A lock file that was deleted is written again, if no other process has locked the folder since.
        """
        if self._file is None:
            return
        if self._folder_handle is not None:
            if not _same_file(self._folder_handle, self.folder):
                raise self._lost(self._folder_handle, "")
            if _same_file(self._file.fileno(), self.path):
                return
        elif _same_file(self._file.fileno(), self.path):
            return
        elif not self.folder.is_dir() or self.path.exists():
            raise self._lost(self._file.fileno(), LOCK_NAME)
        self._renew()

    def _renew(self) -> None:
        try:
            file = self._open()
        except OSError:  # a full disk; the lock on the folder remains
            return
        if not _try_flock(file):
            file.close()
            raise RunFolderLostError(
                f"{self.path} was deleted while this run was going on, and another process has taken the folder: "
                "this run ends without writing to it"
            )
        with contextlib.suppress(OSError):
            self._write_holder(file)
        assert self._file is not None
        self._file.close()
        self._file = file

    def _lost(self, handle: int, below: str) -> RunFolderLostError:
        """Return the error, with the new path of the folder if the system knows it."""
        with contextlib.suppress(OSError):
            now = os.readlink(f"/proc/self/fd/{handle}").removesuffix(f"/{below}")  # Linux only
            if os.path.isdir(now) and _same_file(handle, Path(now) / below):
                return RunFolderLostError(
                    f"{self.folder} was moved to {now} while this run was going on", Path(now)
                )
        what = "replaced by another folder" if self.folder.exists() else "moved or deleted"
        return RunFolderLostError(
            f"{self.folder} was {what} while this run was going on: this run ends without writing to it"
        )

    @property
    def held(self) -> bool:
        return self._file is not None

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _taken_message(self) -> str:
        who = "another process"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            holder = json.loads(read_bytes(self.path, 4096))
            who = f"process {holder['pid']} on {holder['host']}"
        return (
            f"{self.folder} is in use by {who}: wait until it ends, stop it, or choose another folder "
            "(run_dir=…)"
        )


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a run folder: whether a run is going on in it.

    The lock is taken for an instant, shared with others who ask. False if the file system or the system has no locks.
    """
    try:
        import fcntl

        with open(folder / LOCK_NAME, "rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):
        pass
    return False


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


def _open_folder(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    return None


def _try_flock_folder(handle: int | None) -> bool:
    """Lock a folder; False if another process holds it. Some file systems cannot: then it is not locked."""
    if handle is None:
        return True
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        pass
    return True


def _same_file(handle: int, path: Path) -> bool:
    """Return whether an open file or folder is the one that `path` names."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


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
    with open_regular(path) as file:
        for line in file:
            with contextlib.suppress(ValueError, RecursionError):
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
        if not stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
            self._file.close()
            raise ConfigError(f"{path} is not a regular file: remove it")
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
