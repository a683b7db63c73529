"""Ring (positions and episode boundaries), Columns (the arrays of the rows) and MappedFiles (arrays on disk).

A position counts every row ever added to a stream, so it never repeats: row `p` is stored in slot `p %
capacity` until row `p + capacity` replaces it. All streams advance together, so they share one cursor.
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
    """Which rows N rings of `capacity` rows hold, and where episodes begin. It holds no row data.

    `age` (N, capacity) is the distance of each row to the first row of its episode (or of its stream). Rows p
    … p+k belong to one episode if and only if `age` of row p+k is at least k; sampling needs nothing else
    about episodes.
    """

    def __init__(self, num_streams: int, capacity: int) -> None:
        self.num_streams = num_streams
        self.capacity = capacity
        self.cursor = 0  # position of the next row
        self.first = (
            0  # no row before this position was ever stored; above 0 only after a restore with lost files
        )
        self.age = np.zeros((num_streams, capacity), dtype=np.int32)
        self._unbroken: dict[int, int] = {}  # rows -> number of starts inside one episode

    @property
    def oldest(self) -> int:
        return max(self.first, self.cursor - self.capacity)

    @property
    def stored(self) -> int:
        """Rows stored per stream."""
        return self.cursor - self.oldest

    def advance(self, is_first: np.ndarray) -> None:
        """Count one more row in each stream. is_first: (N,) bool"""
        position, slot = self.cursor, self.cursor % self.capacity
        if position - self.capacity >= self.first:  # remove sequences that start at the replaced row
            lost = position - self.capacity
            for rows in self._unbroken:
                self._unbroken[rows] -= int(np.count_nonzero(self._spans(lost + rows - 1, rows)))
        previous = self.age[:, slot - 1] if self.stored else np.full(self.num_streams, -1, dtype=np.int32)
        self.age[:, slot] = np.where(is_first, 0, previous + 1)
        self.cursor += 1
        for rows in self._unbroken:
            self._unbroken[rows] += int(np.count_nonzero(self._spans(position, rows)))

    def rebuild(self, cursor: int, is_first: np.ndarray | None, first: int = 0) -> None:
        """Set the state of a restored ring. is_first: (N, stored), oldest first; None: one endless episode

        The oldest row counts as the first of an episode: no sequence can contain the rows before it.
        """
        self.cursor, self.first = cursor, first
        steps = np.arange(self.stored)
        starts = np.zeros((self.num_streams, self.stored), dtype=bool) if is_first is None else is_first
        begin = np.maximum.accumulate(np.where(starts, steps, 0), axis=1)
        self.age[:, (self.oldest + steps) % self.capacity] = steps - begin
        for rows in self._unbroken:
            self._unbroken[rows] = len(self.unbroken_starts(rows)[0])

    def unbroken(self, stream: np.ndarray, start: np.ndarray, rows: int) -> np.ndarray:
        """(K,) bool: whether the `rows` rows from each start belong to one episode. Starts must be stored."""
        age: np.ndarray = self.age[stream, (start + rows - 1) % self.capacity]
        return np.asarray(age >= rows - 1)

    def unbroken_count(self, rows: int) -> int:
        """Return the number of starts in all streams for which `unbroken` is true."""
        if rows not in self._unbroken:
            self._unbroken[rows] = len(self.unbroken_starts(rows)[0])
        return self._unbroken[rows]

    def unbroken_starts(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return streams and positions of all these starts; it searches the complete ring."""
        last = np.arange(self.oldest + rows - 1, self.cursor)
        stream, which = np.nonzero(self.age[:, last % self.capacity] >= rows - 1)
        return stream, last[which] - (rows - 1)

    def episode_mask(self, stream: np.ndarray, start: np.ndarray, rows: int, anchor: int) -> np.ndarray:
        """(B, rows) bool: which rows of a window are stored and belong to the episode of its row `anchor`."""
        offset = np.arange(rows)
        position = start[:, None] + offset
        age = self.age[stream[:, None], position % self.capacity]
        same = age - age[:, anchor : anchor + 1] == offset - anchor
        return np.asarray(same & (position >= self.oldest) & (position < self.cursor))

    def _spans(self, last: int, rows: int) -> np.ndarray:
        """(N,) bool: whether the `rows` rows that end at position `last` belong to one episode."""
        return self.age[:, last % self.capacity] >= rows - 1


def same_episode(is_first: torch.Tensor, position: torch.Tensor, cursor: int) -> torch.Tensor:
    """`Ring.episode_mask` with the anchor 0 from stored rows, on any device.

    is_first: (B, T) of the rows from positions (B,) on; cursor: position after the newest row
    """
    starts = is_first.clone()
    starts[:, 0] = False  # the first row may start the episode
    offset = torch.arange(is_first.shape[1], device=position.device)
    return (starts.cumsum(1) == 0) & (position[:, None] + offset < cursor)


# --- Memory-mapped files ------------------------------------------------------------------------


BLOCK = 1 << 20  # bytes per write where posix_fallocate is missing


class MappedFiles:
    """Arrays in memory-mapped temporary files, one file per name.

    The files have no name (POSIX: unlinked while open), so they vanish with the process. They are sparse: a
    row takes disk space only when it is written.

    folder: None is the working directory
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self.folder = Path.cwd() if folder is None else Path(folder).expanduser().absolute()
        self._files: dict[str, IO[bytes]] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be created ({error}); set another folder") from None

    def make(self, name: str, size: int) -> np.ndarray:
        """Create a file of zeros and return it as (size,) uint8."""
        try:
            file = self._files[name] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - stays open
            file.truncate(size)
            return np.frombuffer(mmap.mmap(file.fileno(), size), dtype=np.uint8)
        except (OSError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"{self.folder}: a file of {size / 1e9:.1f} GB for column '{name}' cannot be created ({error}); lower the "
                "buffer's capacity or set another folder"
            ) from None

    def reserve(self, name: str, begin: int, end: int) -> None:
        """Reserve disk space for bytes begin … end, which were never written.

        A write to mapped memory raises no error: on a full disk the system kills the process. So the space is
        reserved first.
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
                f"{self.folder} has no space for more rows of '{name}' ({error.strerror}, "
                f"{free_bytes(self.folder) / 1e9:.2f} GB free); free some space and resume from the last checkpoint, or "
                "start a run with a lower capacity or another folder"
            ) from error

    def used_bytes(self) -> int:
        """Return the disk space used so far, as the file system reports it."""
        return sum(os.fstat(file.fileno()).st_blocks * 512 for file in self._files.values())


# --- Columns ------------------------------------------------------------------------------------


DTYPES: dict[str, torch.dtype] = {
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
DEVICE_SHARE = 0.5  # of the device's free memory; with storage "auto" larger buffers are stored on the host
RESERVE_ROWS = 256  # per stream, for which disk space is reserved at a time


Array = np.ndarray | torch.Tensor


def differences(here: Mapping[str, ArraySpec], there: Mapping[str, ArraySpec]) -> list[str]:
    """Describe each column that differs. here: of this run; there: of the stored data"""

    def brief(spec: ArraySpec | None) -> str:
        return f"{spec.dtype} {spec.shape}" if spec else "absent"

    return [
        f"'{name}' is {brief(here.get(name))} in this run and {brief(there.get(name))} in the stored data"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]


def torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype '{name}' cannot be stored; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def to_device(array: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to the device without waiting for the device."""
    if device.type != "cuda":
        return array.to(device)
    return array.pin_memory().to(device, non_blocking=True)


def row_bytes(spec: ArraySpec) -> int:
    """Return the bytes of one stored array."""
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def choose_storage(storage: str, device: torch.device, nbytes: int) -> torch.device:
    """Return the device of the rows. storage: see ReplayBuffer; "disk" is memory-mapped on the host"""
    if storage not in ("auto", "device", "host", "disk"):
        raise ConfigError(f"storage '{storage}' is unknown; choose auto, device, host or disk")
    if storage in ("host", "disk") or device.type == "cpu":
        return torch.device("cpu")
    if storage == "auto" and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if nbytes >= DEVICE_SHARE * free:
            return torch.device("cpu")
    return device


def choose_files(storage: str, folder: Path | str | None) -> MappedFiles | None:
    """Return the files of rows on disk, or None for rows in memory."""
    if storage == "disk":
        return MappedFiles(folder)
    if folder is not None:
        raise ConfigError(
            f"folder is used only with storage: disk, not '{storage}'; use storage: disk or folder: null"
        )
    return None


class Columns:
    """Named arrays of N rings × `capacity` rows, plus one spare row at the end for discarded writes.

    Rows are copied as machine words whatever their dtype: a 64×64×3 image is 1536 words of 8 bytes, so a
    gather costs about as much as a memcpy of the same bytes, on the CPU and on a GPU.

    files: store the arrays in these files instead of memory; `device` is then the CPU
    """

    def __init__(
        self, num_streams: int, capacity: int, device: torch.device, files: MappedFiles | None = None
    ) -> None:
        self.num_streams = num_streams
        self.capacity = capacity
        self.rows = num_streams * capacity
        self.device = device
        self.files = files
        self._reserved = 0  # slots of each stream with reserved disk space
        self.specs: dict[str, ArraySpec] = {}
        self.rings: dict[str, torch.Tensor] = {}  # (N, capacity, …) in the column's own dtype
        self._words: dict[str, torch.Tensor] = {}  # same memory with the spare row, (rows + 1, words per row)

    @property
    def spare(self) -> int:
        """Index of the spare row, which is never read."""
        return self.rows

    def place(self, wanted: torch.device) -> str:
        """Describe where the rows are stored. wanted: device of the batches"""
        if self.files is not None:
            folder = self.files.folder
            return f"on disk in {folder} ({free_bytes(folder) / 1e9:.1f} GB are free there)"
        sent = wanted.type == "cuda" and self.device.type == "cpu"
        return "host memory, copied through pinned memory" if sent else str(self.device)

    def allocate(self, name: str, spec: ArraySpec) -> None:
        """Add a column of zeros."""
        size = (self.rows + 1) * row_bytes(spec)
        if not size:
            raise ConfigError(f"column '{name}' of shape {spec.shape} has no elements; remove it")
        try:
            if self.files is not None:
                memory = torch.from_numpy(self.files.make(name, size))
            elif self.device.type == "cpu":  # zero pages take memory only when they are written
                memory = torch.from_numpy(np.zeros(size, dtype=np.uint8))
            else:
                memory = torch.zeros(size, dtype=torch.uint8, device=self.device)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(
                f"column '{name}' needs {size / 1e9:.1f} GB for {self.rows:,} rows of {row_bytes(spec):,} bytes, which "
                f"{self.device} cannot allocate ({type(error).__name__}); lower the buffer's capacity"
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
        """Copy rows into `out`. index: (K,) int64; out: (…, *shape) with K rows; mask: (K,), False is 0"""
        stored = self._words[name]
        words = _as_words(out, index.shape[0], stored.dtype)
        torch.index_select(stored, 0, index, out=words)
        if mask is not None:
            words.masked_fill_(~mask[:, None], 0)

    def scatter(self, name: str, index: torch.Tensor, values: torch.Tensor) -> None:
        """Store rows. index: (K,); values: (…, *shape) with K rows. On a CPU the last duplicate wins."""
        stored = self._words[name]
        words = _as_words(values.to(self.rings[name].dtype).contiguous(), index.shape[0], stored.dtype)
        if self.device.type == "cpu":  # NumPy guarantees the order of repeated indices, torch does not
            stored.numpy()[index.numpy()] = words.numpy()
        else:
            stored.index_copy_(0, index, words)

    def index(self, stream: torch.Tensor, position: torch.Tensor, offset: int, count: int) -> torch.Tensor:
        """Return row indices (B, count) of positions position+offset … +count. stream, position: (B,)"""
        steps = torch.arange(offset, offset + count, device=position.device)
        return stream[:, None] * self.capacity + (position[:, None] + steps) % self.capacity

    def held(self, index: RowIndex, offset: int, count: int, oldest: int, cursor: int) -> torch.Tensor:
        """As `index`, (B * count,); the spare row for padding and for positions outside oldest … cursor."""
        steps = torch.arange(offset, offset + count, device=index.position.device)
        position = index.position[:, None] + steps  # (B, count)
        there = (position >= oldest) & (position < cursor)
        mask = getattr(index, "mask", None)
        if mask is not None:
            there = there & mask[:, offset : offset + count]
        where = self.index(index.stream, index.position, offset, count)
        return torch.where(there, where, self.spare).view(-1)

    def locate(self, stream: Array, position: Array, count: int, starts: RowIndex) -> torch.Tensor:
        """Write drawn starts (B,) to `starts`; return the indices of `count` rows from each, (B * count,)."""
        if isinstance(stream, torch.Tensor) or isinstance(position, torch.Tensor):  # drawn on the device
            starts.stream.copy_(torch.as_tensor(stream))
            starts.position.copy_(torch.as_tensor(position))
            return self.index(starts.stream, starts.position, 0, count).view(-1)
        if self.device.type == "cpu":  # NumPy is faster than torch for small arrays
            starts.stream.numpy()[:] = stream
            starts.position.numpy()[:] = position
            rows = (position[:, None] + np.arange(count)) % self.capacity
            return torch.from_numpy((stream[:, None] * self.capacity + rows).ravel())
        both = to_device(torch.from_numpy(np.stack([stream, position])), self.device)  # (2, B)
        starts.stream.copy_(both[0])
        starts.position.copy_(both[1])
        return self.index(both[0], both[1], 0, count).view(-1)

    def read(self, name: str, position: int, count: int) -> torch.Tensor:
        """Return a copy of consecutive rows of all streams, (N, count, …)."""
        return self.rings[name].index_select(1, self._slots(position, count))

    def put(self, position: int, count: int, rows: Mapping[str, torch.Tensor]) -> None:
        """Store new rows of all streams, (N, count, …), up to the ring's end; other columns become zero."""
        slot = position % self.capacity
        self.reserve(slot + count)
        for name, ring in self.rings.items():
            target = ring[:, slot : slot + count]
            if name not in rows:
                target.zero_()
            elif rows[name].device == target.device or not target.is_cuda:
                target.copy_(rows[name])
            else:  # pinned, so that the host does not wait
                target.copy_(rows[name].contiguous().pin_memory(), non_blocking=True)

    def write(self, name: str, position: int, rows: torch.Tensor) -> None:
        """Store consecutive rows of all streams, (N, count, …)."""
        self.reserve(position + rows.shape[1])
        ring = self.rings[name]
        ring.index_copy_(1, self._slots(position, rows.shape[1]), rows.to(ring))

    def reserve(self, end: int) -> None:
        """Reserve disk space for rows before position `end`; LabError if the disk is full."""
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
    """Return a value as a tensor; ConfigError unless its shape is (*lead, *spec.shape) and its dtype fits."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach()
    else:  # torch accepts neither read-only arrays nor negative strides
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
    """View the memory of a contiguous tensor as (rows, words)."""
    return tensor.view(rows, -1).view(word)
