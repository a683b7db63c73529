"""Memory for rows: one array per column, and moving rows in and out of it.

Rows are moved as machine words, whatever their dtype: a 64×64×3 image is 1536 words of 8 bytes, so a gather
costs about as much as a memcpy of the same bytes, on the CPU and on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from rl_lab.buffers.mapped_files import MappedFiles
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, RowIndex
from rl_lab.utils.files import free_bytes

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
