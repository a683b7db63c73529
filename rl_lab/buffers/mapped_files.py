"""Arrays in files, mapped into memory: the system keeps in memory what is used and writes out the rest.

The files are scratch without a name (POSIX: unlinked while open), so nothing is left of them when the process
ends, however it ends. They are sparse: a row takes disk once it is about to be written.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import IO

import numpy as np

from rl_lab.errors import ConfigError, LabError
from rl_lab.utils.files import free_bytes

BLOCK = 1 << 20  # bytes written at a time where the system cannot reserve


class MappedFiles:
    """One file per name, in a folder. folder: None is where the process was started."""

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path.cwd() if folder is None else Path(folder).expanduser().absolute()
        self._files: dict[str, IO[bytes]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"a buffer cannot keep its rows in {self.folder}: {error}") from None

    def make(self, name: str, size: int) -> np.ndarray:
        """(size,) uint8, zeros."""
        try:
            file = self._files[name] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - lives as long as we
            file.truncate(size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"no file of {size / 1e9:.1f} GB for column '{name}' can be made in {self.folder} ({error}). Lower the "
                "buffer's capacity, or name another folder."
            ) from None

    def reserve(self, name: str, begin: int, end: int) -> None:
        """Get the disk for bytes begin … end, which were never written.

        A write to mapped memory cannot fail in an orderly way: on a full disk the system kills the process. So
        the disk is asked for first.
        """
        handle = self._files[name].fileno()
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, begin, end - begin)
            else:
                for start in range(begin, end, BLOCK):
                    os.pwrite(handle, bytes(min(BLOCK, end - start)), start)
        except OSError as error:
            raise LabError(
                f"the disk has no room for more rows of '{name}': {error.strerror} in {self.folder}, where "
                f"{free_bytes(self.folder) / 1e9:.2f} GB are free. Make room and resume from the last checkpoint, or start "
                "a run with a lower capacity or another folder."
            ) from error

    def used_bytes(self) -> int:
        """Disk taken so far, as the file system counts it."""
        return sum(os.fstat(file.fileno()).st_blocks * 512 for file in self._files.values())
