"""Batches at fixed addresses: making them, and copying one into another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rl_lab.buffers.ring import torch_dtype
from rl_lab.errors import ConfigError, closest
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex


@dataclass(frozen=True)
class MaskedIndex(RowIndex):
    """Where a padded batch came from. A write-back to its padding would hit other episodes, so it is dropped."""

    mask: torch.Tensor | None = None  # (B, T) bool, the batch's own


def allocate(
    columns: Mapping[str, ArraySpec], spec: BatchSpec, device: torch.device, pin: bool = False
) -> Batch:
    """An empty batch for a BatchSpec: columns (B, T, …), index and, for padded sequences, mask."""
    names = list(columns) if spec.keys is None else list(spec.keys)
    unknown = [name for name in names if name not in columns]
    if unknown:
        raise ConfigError(f"the buffer has no column '{unknown[0]}'.{closest(unknown[0], columns)}")

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pin)

    data = {
        name: empty((spec.size, spec.rows, *columns[name].shape), torch_dtype(columns[name].dtype))
        for name in names
    }
    stream, position = empty((spec.size,), torch.int64), empty((spec.size,), torch.int64)
    if spec.boundary != "pad":
        return Batch(data, RowIndex(stream, position))
    mask = empty((spec.size, spec.rows), torch.bool)
    return Batch(data, MaskedIndex(stream, position, mask=mask), mask)


def tensors(batch: Batch) -> list[torch.Tensor]:
    """Every tensor of a batch that `sample` fills, in a fixed order."""
    assert batch.index is not None
    mask = [] if batch.mask is None else [batch.mask]
    return [*batch.columns.values(), batch.index.stream, batch.index.position, *mask]


def copy_batch(source: Batch, target: Batch) -> None:
    """Copy into the target's addresses, without waiting when the source is pinned and the target on a GPU.

    Towards the host the copy waits, because the host may read at once.
    """
    for here, there in zip(tensors(source), tensors(target), strict=True):
        there.copy_(here, non_blocking=there.is_cuda)


def part(batch: Batch, begin: int, end: int) -> Batch:
    """Sequences begin … end of a batch, as views of the same memory."""
    assert batch.index is not None
    columns = {name: value[begin:end] for name, value in batch.columns.items()}
    index = part_of_index(batch.index, begin, end)
    return Batch(columns, index, None if batch.mask is None else batch.mask[begin:end])


def part_of_index(index: RowIndex, begin: int, end: int) -> RowIndex:
    stream, position = index.stream[begin:end], index.position[begin:end]
    if isinstance(index, MaskedIndex) and index.mask is not None:
        return MaskedIndex(stream, position, mask=index.mask[begin:end])
    return RowIndex(stream, position)


# --------------------
# One consumer's batches: always at the same addresses, and on CUDA one ahead when rows are in host memory.


class BatchStream:
    """Batches of one BatchSpec, from a buffer or a mix.

        batch = stream.next()        # always the same tensors, with new content
        …launch the update, write back…
        stream.ahead()               # prefetch=1: fetch the next batch while the device is busy
        …before a checkpoint…
        stream.settle()

    prefetch=0 draws when asked. prefetch=1 draws in `ahead()`, into pinned memory, and sends the batch on a side
    stream. The host gathers the rows itself, before `ahead()` returns, so no later `add` can touch what it reads;
    rows that live on the device are gathered there in order and need no prefetch.

    A stream that prefetches needs a generator of its own: it winds it back for a batch that nobody took.
    """

    def __init__(
        self,
        buffer: Any,
        spec: BatchSpec,
        generator: torch.Generator,
        *,
        prefetch: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.buffer = buffer
        self.spec = spec
        self.generator = generator
        self.batch: Batch = buffer.make_batch(spec, device=device)
        assert self.batch.index is not None
        place = self.batch.index.stream.device
        self.prefetch = prefetch if buffer.storage_device.type == "cpu" else 0
        self._before: torch.Tensor | None = None  # generator state before a batch that waits to be taken
        if self.prefetch:
            self._gathered: Batch = buffer.make_batch(spec, device="cpu")
            self._sender = _Sender(buffer.make_batch(spec, device=place)) if place.type == "cuda" else None

    def next(self) -> Batch:
        """The next batch. It stays valid until the call after this one."""
        if self._before is None:
            return self.buffer.sample(self.spec, generator=self.generator, out=self.batch)
        self._before = None
        if self._sender is None:
            copy_batch(self._gathered, self.batch)
        else:
            self._sender.deliver(self.batch)
        return self.batch

    def ahead(self) -> None:
        """Fetch the next batch now, if that is wanted, possible and not yet done."""
        if not self.prefetch or self._before is not None or not self.buffer.ready(self.spec):
            return
        if self._sender is not None:
            self._sender.wait()
        before = self.generator.get_state()
        self.buffer.sample(self.spec, generator=self.generator, out=self._gathered)
        if self._sender is not None:
            self._sender.send(self._gathered)
        self._before = before

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        """Columns for the rows of a batch that was taken; see ReplayBuffer.write_back."""
        self.buffer.write_back(index, columns, offset=offset)

    def settle(self) -> None:
        """Forget a batch that was fetched and not taken, as if it had never been drawn. Before a checkpoint."""
        if self._before is not None:
            self.generator.set_state(self._before)
            self.buffer.undo(self.spec)
            self._before = None

    def state(self) -> torch.Tensor:
        """The generator's state for a checkpoint: the one from which the next batch to be taken is drawn."""
        return self.generator.get_state() if self._before is None else self._before


class _Sender:
    """Host to device on a side stream: pinned memory -> landing place -> the consumer's batch.

    The landing place lets a batch arrive while the consumer still reads the one before.
    """

    def __init__(self, landing: Batch) -> None:
        self._landing = landing
        self._side = torch.cuda.Stream()
        self._sent, self._free = torch.cuda.Event(), torch.cuda.Event()
        self._free.record()

    def wait(self) -> None:
        """Until the host may write to the pinned memory again."""
        self._sent.synchronize()

    def send(self, source: Batch) -> None:
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._free)
            copy_batch(source, self._landing)
            self._sent.record()

    def deliver(self, target: Batch) -> None:
        torch.cuda.current_stream().wait_event(self._sent)
        copy_batch(self._landing, target)
        self._free.record()


# --------------------
# Write-backs from a GPU to rows in host memory, without making the host wait for the GPU.


MOST_WAITING = 2  # write-backs on their way before the host waits for the oldest

Apply = Callable[[RowIndex, Mapping[str, torch.Tensor], int], None]


@dataclass
class _Write:
    index: RowIndex
    columns: dict[str, torch.Tensor]
    offset: int
    arrived: torch.cuda.Event


class LateWrites:
    """Copies to pinned memory are started at once and applied, in order, when they have arrived.

    Rows that were overwritten in the meantime are dropped when the write is applied.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._waiting: deque[_Write] = deque()

    def push(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        mask = index.mask if isinstance(index, MaskedIndex) else None
        here: RowIndex = RowIndex(_fetch(index.stream), _fetch(index.position))
        if mask is not None:
            here = MaskedIndex(here.stream, here.position, mask=_fetch(mask))
        event = torch.cuda.Event()
        write = _Write(here, {name: _fetch(value) for name, value in columns.items()}, offset, event)
        event.record()
        self._waiting.append(write)
        self.settle(leave=MOST_WAITING)

    def settle(self, leave: int = 0) -> None:
        """Apply what has arrived, and wait for the oldest while more than `leave` are on their way."""
        while self._waiting and (len(self._waiting) > leave or self._waiting[0].arrived.query()):
            write = self._waiting.popleft()
            write.arrived.synchronize()
            self._apply(write.index, write.columns, write.offset)


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    """A pinned host copy, on its way."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)
