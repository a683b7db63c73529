"""Claims: which machine does which run of a suite, when several share one results folder.

A claim is a file that its owner touches every few seconds. It is free again when its owner released it, when it
was not touched for `STALE_SECONDS`, or when its owner was a process of this machine that has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rl_lab.utils.files import write_atomic

STALE_SECONDS = 120.0
SUFFIX = ".claim"


def machine_identity() -> str:
    """Return a name of this machine under which process ids are comparable: two containers may share a hostname."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


class Claims:
    """Claims of one process in the folder of a suite."""

    def __init__(self, folder: Path, *, stale: float = STALE_SECONDS) -> None:
        self.folder = folder
        self.stale = stale
        self.owner = {"machine": machine_identity(), "host": socket.gethostname(), "pid": os.getpid()}
        self._mine: set[str] = set()
        self._clock = folder / f".clock_{socket.gethostname()}_{os.getpid()}"
        folder.mkdir(parents=True, exist_ok=True)

    def take(self, name: str) -> bool:
        """Claim a run; return False if another process has it."""
        with self._locked():
            file = self._file(name)
            if file.exists():
                if self._holder(name) is not None:
                    return False
                file.unlink(missing_ok=True)
            try:
                handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:  # another machine, on a file system without locks
                return False
            with os.fdopen(handle, "w") as opened:
                json.dump(self.owner, opened)
        self._mine.add(name)
        return True

    def refresh(self) -> None:
        """Show that this process still works on its claims."""
        for name in self._mine:
            with contextlib.suppress(OSError):
                os.utime(self._file(name))

    def release(self, name: str) -> None:
        if name in self._mine:
            self._mine.discard(name)
            with contextlib.suppress(OSError):
                self._file(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Release all claims."""
        for name in list(self._mine):
            self.release(name)
        self._clock.unlink(missing_ok=True)

    def others(self, names: Iterable[str]) -> dict[str, str]:
        """Return run -> "process P on HOST" for runs that another process works on."""
        held = {name: self._holder(name) for name in names if name not in self._mine}
        return {
            name: f"process {owner.get('pid')} on {owner.get('host')}"
            for name, owner in held.items()
            if owner is not None
        }

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _holder(self, name: str) -> dict[str, Any] | None:
        """Return the owner of a claim, or None if nobody works on the run."""
        file = self._file(name)
        try:
            age = self._now() - file.stat().st_mtime
            owner = json.loads(file.read_text(encoding="utf-8"))
        except OSError:
            return None
        except ValueError:  # another process is writing it
            owner = {}
        if age > self.stale:
            return None
        if not isinstance(owner, dict):
            owner = {}
        if owner.get("machine") == self.owner["machine"] and not _is_running(owner.get("pid")):
            return None
        return owner

    def _now(self) -> float:
        """Return the file system's time: the clocks of two machines may differ."""
        write_atomic(self._clock, lambda file: file.write(b""))
        return self._clock.stat().st_mtime

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time judge and take claims."""
        with (self.folder / ".lock").open("a") as file:
            with contextlib.suppress(ImportError, OSError):  # not POSIX, or a file system without locks
                import fcntl

                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
            yield


def _is_running(pid: Any) -> bool:
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    with contextlib.suppress(OSError, IndexError):
        # A process that was killed stays in the table until its parent reads its status.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return True
