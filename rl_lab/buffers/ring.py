"""Which rows a ring holds, and where episodes begin in it. Index arithmetic on the host; no row data.

A position counts every row ever added to a stream, so it never repeats: row `p` lies in slot `p % capacity`
until row `p + capacity` replaces it. All streams advance together, so one cursor serves them all.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
import torch

from rl_lab.errors import ConfigError, LabError
from rl_lab.records import ArraySpec, RowIndex
from rl_lab.utils.files import free_bytes


class Ring:
    """N rings of `capacity` rows in lock step.

    `age` (N, capacity) is each row's distance to the first row of its episode (or to the first row of its
    stream). Rows p … p+k lie inside one episode exactly when `age` of row p+k is at least k, which is all
    that sampling needs to know about episodes.
    """

    def __init__(self, num_streams: int, capacity: int) -> None:
        self.num_streams = num_streams
        self.capacity = capacity
        self.cursor = 0  # position of the next row to be written
        self.first = 0  # no row before this position was ever held: above 0 only after a restore with losses
        self.age = np.zeros((num_streams, capacity), dtype=np.int32)
        self._unbroken: dict[int, int] = {}  # rows -> number of starts inside one episode, kept up to date

    @property
    def oldest(self) -> int:
        return max(self.first, self.cursor - self.capacity)

    @property
    def stored(self) -> int:
        """Rows held per stream."""
        return self.cursor - self.oldest

    def advance(self, is_first: np.ndarray) -> None:
        """Note that one row was added to each stream. is_first: (N,) bool"""
        position, slot = self.cursor, self.cursor % self.capacity
        if position - self.capacity >= self.first:  # sequences that start at the row now replaced are lost
            lost = position - self.capacity
            for rows in self._unbroken:
                self._unbroken[rows] -= int(np.count_nonzero(self._spans(lost + rows - 1, rows)))
        previous = self.age[:, slot - 1] if self.stored else np.full(self.num_streams, -1, dtype=np.int32)
        self.age[:, slot] = np.where(is_first, 0, previous + 1)
        self.cursor += 1
        for rows in self._unbroken:
            self._unbroken[rows] += int(np.count_nonzero(self._spans(position, rows)))

    def rebuild(self, cursor: int, is_first: np.ndarray | None, first: int = 0) -> None:
        """Take over a restored ring. is_first: (N, stored) from the oldest row on; None: one endless episode.

        The oldest row counts as a beginning. Its true age is gone with the rows before it, and no sequence can
        reach back to them.
        """
        self.cursor, self.first = cursor, first
        steps = np.arange(self.stored)
        starts = np.zeros((self.num_streams, self.stored), dtype=bool) if is_first is None else is_first
        begin = np.maximum.accumulate(np.where(starts, steps, 0), axis=1)
        self.age[:, (self.oldest + steps) % self.capacity] = steps - begin
        for rows in self._unbroken:
            self._unbroken[rows] = len(self.unbroken_starts(rows)[0])

    def unbroken(self, stream: np.ndarray, start: np.ndarray, rows: int) -> np.ndarray:
        """(K,) bool: whether `rows` rows from each start lie inside one episode. Starts must be held."""
        return self.age[stream, (start + rows - 1) % self.capacity] >= rows - 1

    def unbroken_count(self, rows: int) -> int:
        """How many starts `unbroken` is true for, over all streams."""
        if rows not in self._unbroken:
            self._unbroken[rows] = len(self.unbroken_starts(rows)[0])
        return self._unbroken[rows]

    def unbroken_starts(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Streams and positions of all those starts, by walking the whole ring."""
        last = np.arange(self.oldest + rows - 1, self.cursor)
        stream, which = np.nonzero(self.age[:, last % self.capacity] >= rows - 1)
        return stream, last[which] - (rows - 1)

    def episode_mask(self, stream: np.ndarray, start: np.ndarray, rows: int, anchor: int) -> np.ndarray:
        """(B, rows) bool: which rows of each window are held and belong to the episode of row `anchor` of it."""
        offset = np.arange(rows)
        position = start[:, None] + offset
        age = self.age[stream[:, None], position % self.capacity]
        same = age - age[:, anchor : anchor + 1] == offset - anchor
        return same & (position >= self.oldest) & (position < self.cursor)

    def _spans(self, last: int, rows: int) -> np.ndarray:
        """(N,) bool: whether the `rows` rows that end at position `last` lie inside one episode."""
        return self.age[:, last % self.capacity] >= rows - 1


# --------------------
# Arrays in files, mapped into memory: the system keeps in memory what is used and writes out the rest.
#
# The files are scratch without a name (POSIX: unlinked while open), so nothing is left of them when the process
# ends, however it ends. They are sparse: a row takes disk once it is about to be written.


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


# --------------------
# Memory for rows: one array per column, and moving rows in and out of it.
#
# Rows are moved as machine words, whatever their dtype: a 64×64×3 image is 1536 words of 8 bytes, so a gather
# costs about as much as a memcpy of the same bytes, on the CPU and on a GPU.


DTYPES = {
    name: getattr(torch, name)
    for name in (
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
    )
}
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
DEVICE_SHARE = 0.5  # of the device's free memory that a buffer may take before it moves to the host
RESERVE_ROWS = 256  # per stream, for which disk is asked at a time


Array = np.ndarray | torch.Tensor


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"a buffer cannot store dtype '{name}'; it stores {', '.join(DTYPES)}")
    return DTYPES[name]


def to_device(array: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small host tensor on the device, sent without waiting for the device."""
    if device.type != "cuda":
        return array.to(device)
    return array.pin_memory().to(device, non_blocking=True)


def row_bytes(spec: ArraySpec) -> int:
    """Bytes of one stored array."""
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def choose_storage(storage: str, device: torch.device, nbytes: int) -> torch.device:
    """Where rows live: "device", "host" ("disk": mapped there), or ("auto") the device if under half of its memory."""
    if storage not in ("auto", "device", "host", "disk"):
        raise ConfigError(f"storage '{storage}' is not known; choose auto, device, host or disk")
    if storage in ("host", "disk") or device.type == "cpu":
        return torch.device("cpu")
    if storage == "auto" and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if nbytes >= DEVICE_SHARE * free:
            return torch.device("cpu")
    return device


def choose_files(storage: str, folder: Path | str | None) -> MappedFiles | None:
    """Files for rows on disk; None for rows in memory."""
    if storage == "disk":
        return MappedFiles(folder)
    if folder is not None:
        raise ConfigError(
            f"rows with storage '{storage}' lie in no folder; use storage: disk, or folder: null"
        )
    return None


class Columns:
    """Named arrays of N rings × `capacity` rows, plus one spare row at the end for what must not be stored.

    files: keep the arrays in these files instead of memory; `device` is then the CPU.
    """

    def __init__(
        self, num_streams: int, capacity: int, device: torch.device, files: MappedFiles | None = None
    ) -> None:
        self.num_streams = num_streams
        self.capacity = capacity
        self.rows = num_streams * capacity
        self.device = device
        self.files = files
        self._reserved = 0  # slots of each stream that have their disk
        self.specs: dict[str, ArraySpec] = {}
        self.rings: dict[str, torch.Tensor] = {}  # (N, capacity, …) in the column's own dtype
        self._words: dict[
            str, torch.Tensor
        ] = {}  # the same memory and the spare row, (rows + 1, words per row)

    @property
    def spare(self) -> int:
        """Index of the row that nobody reads."""
        return self.rows

    def place(self, wanted: torch.device) -> str:
        """Where the rows are, in words. wanted: the device of batches"""
        if self.files is not None:
            folder = self.files.folder
            return f"on disk in {folder} ({free_bytes(folder) / 1e9:.1f} GB are free there)"
        sent = wanted.type == "cuda" and self.device.type == "cpu"
        return "host memory, sent through pinned memory" if sent else str(self.device)

    def allocate(self, name: str, spec: ArraySpec) -> None:
        """Add a column of zeros."""
        size = (self.rows + 1) * row_bytes(spec)
        if not size:
            raise ConfigError(f"column '{name}' of shape {spec.shape} holds nothing; leave it out")
        try:
            if self.files is not None:
                memory = torch.from_numpy(self.files.make(name, size))
            elif self.device.type == "cpu":  # zero pages that take memory only once written
                memory = torch.from_numpy(np.zeros(size, dtype=np.uint8))
            else:
                memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"no memory for column '{name}': {size / 1e9:.1f} GB for {self.rows:,} rows of {row_bytes(spec):,} "
                f"bytes on {self.device} ({type(error).__name__}). Lower the buffer's capacity."
            ) from None
        self.specs[name] = spec
        typed = memory.view(torch_dtype(spec.dtype)).view(self.rows + 1, *spec.shape)
        self.rings[name] = typed[:-1].view(self.num_streams, self.capacity, *spec.shape)
        word = next(dtype for size, dtype in WORDS.items() if row_bytes(spec) % size == 0)
        self._words[name] = _as_words(typed, self.rows + 1, word)
        if self.files is not None:
            self.files.reserve(name, self.rows * row_bytes(spec), size)
            self._reserve(name, 0, self._reserved)

    def gather(
        self, name: str, index: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None = None
    ) -> None:
        """Copy rows into `out`. index: (K,) int64; out: (…, *shape) with K rows; mask: (K,), zeros where False."""
        stored = self._words[name]
        words = _as_words(out, index.shape[0], stored.dtype)
        torch.index_select(stored, 0, index, out=words)
        if mask is not None:
            words.masked_fill_(~mask[:, None], 0)

    def scatter(self, name: str, index: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows. index: (K,); values: (…, *shape) with K rows. On the CPU the last of equal indices wins."""
        stored = self._words[name]
        words = _as_words(values.to(self.rings[name].dtype).contiguous(), index.shape[0], stored.dtype)
        if self.device.type == "cpu":  # NumPy promises an order for repeated indices, torch does not
            stored.numpy()[index.numpy()] = words.numpy()
        else:
            stored.index_copy_(0, index, words)

    def index(self, stream: torch.Tensor, position: torch.Tensor, offset: int, count: int) -> torch.Tensor:
        """Where rows position+offset … +count of each stream are kept. stream, position: (B,); returns: (B, count)"""
        steps = torch.arange(offset, offset + count, device=position.device)
        return stream[:, None] * self.capacity + (position[:, None] + steps) % self.capacity

    def held(self, index: RowIndex, offset: int, count: int, oldest: int, cursor: int) -> torch.Tensor:
        """Where those rows are kept, (B * count,); the spare row for what is padding or not in oldest … cursor."""
        steps = torch.arange(offset, offset + count, device=index.position.device)
        position = index.position[:, None] + steps  # (B, count)
        there = (position >= oldest) & (position < cursor)
        mask = getattr(index, "mask", None)
        if mask is not None:
            there = there & mask[:, offset : offset + count]
        where = self.index(index.stream, index.position, offset, count)
        return torch.where(there, where, self.spare).view(-1)

    def locate(self, stream: Array, position: Array, count: int, starts: RowIndex) -> torch.Tensor:
        """Write drawn starts (B,) into `starts`; returns where `count` rows from each on are kept, (B * count,)."""
        if isinstance(stream, torch.Tensor) or isinstance(position, torch.Tensor):  # drawn on the device
            starts.stream.copy_(torch.as_tensor(stream))
            starts.position.copy_(torch.as_tensor(position))
            return self.index(starts.stream, starts.position, 0, count).view(-1)
        if self.device.type == "cpu":  # NumPy is quicker than torch with a handful of numbers
            starts.stream.numpy()[:] = stream
            starts.position.numpy()[:] = position
            rows = (position[:, None] + np.arange(count)) % self.capacity
            return torch.from_numpy((stream[:, None] * self.capacity + rows).ravel())
        both = to_device(torch.from_numpy(np.stack([stream, position])), self.device)  # (2, B)
        starts.stream.copy_(both[0])
        starts.position.copy_(both[1])
        return self.index(both[0], both[1], 0, count).view(-1)

    def read(self, name: str, position: int, count: int) -> torch.Tensor:
        """A copy of neighbouring rows of all streams, (N, count, …)."""
        return self.rings[name].index_select(1, self._slots(position, count))

    def put(self, position: int, count: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Store new rows of all streams, (N, count, …), up to the ring's end at most; zeros in other columns."""
        slot = position % self.capacity
        self.reserve(slot + count)
        for name, ring in self.rings.items():
            target = ring[:, slot : slot + count]
            if name not in rows:
                target.zero_()
            elif rows[name].device == target.device or not target.is_cuda:
                target.copy_(rows[name])
            else:  # pinned, so that the host need not wait
                target.copy_(rows[name].contiguous().pin_memory(), non_blocking=True)

    def write(self, name: str, position: int, rows: torch.Tensor) -> None:
        """Store neighbouring rows of all streams, (N, count, …)."""
        self.reserve(position + rows.shape[1])
        ring = self.rings[name]
        ring.index_copy_(1, self._slots(position, rows.shape[1]), rows.to(ring))

    def reserve(self, end: int) -> None:
        """Get the disk for rows before position `end`; LabError when it is full. In memory: nothing to do."""
        if self.files is None or end <= self._reserved or self._reserved == self.capacity:
            return
        end = min(self.capacity, math.ceil(end / RESERVE_ROWS) * RESERVE_ROWS)
        for name in self.specs:
            self._reserve(name, self._reserved, end)
        self._reserved = end

    def _reserve(self, name: str, begin: int, end: int) -> None:
        assert self.files is not None
        size = row_bytes(self.specs[name])
        for first in range(0, self.rows if end > begin else 0, self.capacity):
            self.files.reserve(name, (first + begin) * size, (first + end) * size)

    def _slots(self, position: int, count: int) -> torch.Tensor:
        return torch.arange(position, position + count, device=self.device) % self.capacity


def as_rows(
    name: str, value: np.ndarray | torch.Tensor, spec: ArraySpec, lead: tuple[int, ...]
) -> torch.Tensor:
    """A value as a tensor of shape (*lead, *spec.shape) that can be stored without losing its meaning."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    else:  # torch takes neither read-only nor mirrored arrays as they are
        plain = value.flags.writeable and value.flags.c_contiguous
        tensor = torch.from_numpy(value if plain else value.copy())
    if tensor.shape != (*lead, *spec.shape):
        raise ConfigError(
            f"column '{name}' has shape {tuple(tensor.shape)}, but the buffer expects {(*lead, *spec.shape)}"
        )
    if not torch.can_cast(tensor.dtype, torch_dtype(spec.dtype)):
        raise ConfigError(
            f"column '{name}' has dtype {str(tensor.dtype).removeprefix('torch.')}, which does not fit the stored "
            f"{spec.dtype}; convert it first"
        )
    return tensor


def _as_words(tensor: torch.Tensor, rows: int, word: torch.dtype) -> torch.Tensor:
    """The memory of a contiguous tensor as (rows, words)."""
    return tensor.view(rows, -1).view(word)
