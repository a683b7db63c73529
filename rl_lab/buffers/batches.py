"""Allocation and copies of batches, BatchStream (fixed addresses, prefetch) and DeferredWrites."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rl_lab.buffers.ring import torch_dtype
from rl_lab.errors import ConfigError, closest
from rl_lab.protocols import BatchSource
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex


@dataclass(frozen=True)
class MaskedIndex(RowIndex):
    """RowIndex of a padded batch. Write-backs skip the padding, which would be rows of other episodes."""

    mask: torch.Tensor | None = None  # (B, T) bool, the mask of the batch


def allocate(
    columns: Mapping[str, ArraySpec], spec: BatchSpec, device: torch.device, pin: bool = False
) -> Batch:
    """Return a batch of zeros for a BatchSpec: columns (B, T, …), index and, for padded sequences, mask."""
    names = list(columns) if spec.keys is None else list(spec.keys)
    unknown = [name for name in names if name not in columns]
    if unknown:
        raise ConfigError(f"column '{unknown[0]}' is not in the buffer.{closest(unknown[0], columns)}")

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
    """Return all tensors that `sample` fills, in a fixed order."""
    assert batch.index is not None
    mask = [] if batch.mask is None else [batch.mask]
    return [*batch.columns.values(), batch.index.stream, batch.index.position, *mask]


def copy_batch(source: Batch, target: Batch) -> None:
    """Copy the tensors of `source` into those of `target`.

    A copy to a GPU is non-blocking if the source is pinned. A copy to the host blocks, because the host may
    read it immediately.
    """
    for here, there in zip(tensors(source), tensors(target), strict=True):
        there.copy_(here, non_blocking=there.is_cuda)


def part(batch: Batch, begin: int, end: int) -> Batch:
    """Return sequences begin … end of a batch as views."""
    assert batch.index is not None
    columns = {name: value[begin:end] for name, value in batch.columns.items()}
    index = part_of_index(batch.index, begin, end)
    return Batch(columns, index, None if batch.mask is None else batch.mask[begin:end])


def part_of_index(index: RowIndex, begin: int, end: int) -> RowIndex:
    stream, position = index.stream[begin:end], index.position[begin:end]
    if isinstance(index, MaskedIndex) and index.mask is not None:
        return MaskedIndex(stream, position, mask=index.mask[begin:end])
    return RowIndex(stream, position)


# --- Prefetch -----------------------------------------------------------------------------------


class BatchStream:
    """Batches of one BatchSpec, from a buffer or a mix, always in the same tensors.

        batch = stream.next()        # the same tensors with new content
        …launch the update, write back…
        stream.prefetch_next()       # prefetch=1: fetch the next batch while the device is busy
        …before a checkpoint…
        stream.drop_prefetched()

    prefetch=0 draws the batch in `next()`. prefetch=1 draws it in `prefetch_next()`, into pinned memory, and
    copies it to the device on a side stream. The host gathers the rows before `prefetch_next()` returns, so a
    later `add` cannot change them. Rows stored on the device are gathered there in order and need no
    prefetch.

    A stream with prefetch needs its own generator, because `drop_prefetched()` resets the generator's state.
    """

    def __init__(
        self,
        buffer: BatchSource,
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
        self._before: torch.Tensor | None = None  # generator state before the prefetched batch
        if self.prefetch:
            self._gathered: Batch = buffer.make_batch(spec, device="cpu")
            self._sender = _Sender(buffer.make_batch(spec, device=place)) if place.type == "cuda" else None

    def next(self) -> Batch:
        """Return the next batch. It is valid until the next call."""
        if self._before is None:
            return self.buffer.sample(self.spec, generator=self.generator, out=self.batch)
        self._before = None
        if self._sender is None:
            copy_batch(self._gathered, self.batch)
        else:
            self._sender.receive(self.batch)
        return self.batch

    def prefetch_next(self) -> None:
        """Prefetch the next batch if prefetch is on, the buffer is ready and no batch is prefetched yet."""
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
        """Write columns back to the rows of a batch; see ReplayBuffer.write_back."""
        self.buffer.write_back(index, columns, offset=offset)

    def drop_prefetched(self) -> None:
        """Discard a prefetched batch and undo its draw. Call this before a checkpoint."""
        if self._before is not None:
            self.generator.set_state(self._before)
            self.buffer.undo(self.spec)
            self._before = None

    def state(self) -> torch.Tensor:
        """Return the generator state for a checkpoint: the state from which `next()` draws its batch."""
        return self.generator.get_state() if self._before is None else self._before


class _Sender:
    """Copies batches to the device on a side stream: pinned memory -> device batch -> the consumer's batch.

    The intermediate device batch is filled while the consumer still reads the previous batch.
    """

    def __init__(self, device_batch: Batch) -> None:
        self._device_batch = device_batch
        self._stream = torch.cuda.Stream()
        self._sent, self._free = torch.cuda.Event(), torch.cuda.Event()
        self._free.record()

    def wait(self) -> None:
        """Wait until the host may write to the pinned memory again."""
        self._sent.synchronize()

    def send(self, source: Batch) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free)
            copy_batch(source, self._device_batch)
            self._sent.record()

    def receive(self, target: Batch) -> None:
        torch.cuda.current_stream().wait_event(self._sent)
        copy_batch(self._device_batch, target)
        self._free.record()


# --- Deferred writes ----------------------------------------------------------------------------


MAX_PENDING = 2  # write-backs being copied before the host waits for the oldest

Apply = Callable[[RowIndex, Mapping[str, torch.Tensor], int], None]


@dataclass
class _Write:
    index: RowIndex
    columns: dict[str, torch.Tensor]
    offset: int
    arrived: torch.cuda.Event


class DeferredWrites:
    """Writes from a GPU to rows in host memory, without a wait for the GPU.

    `push` starts a copy to pinned memory; `flush` applies the copies that are complete, in order. Rows
    overwritten in the meantime are skipped when a write is applied.
    """

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._pending: deque[_Write] = deque()

    def push(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        mask = index.mask if isinstance(index, MaskedIndex) else None
        here: RowIndex = RowIndex(_fetch(index.stream), _fetch(index.position))
        if mask is not None:
            here = MaskedIndex(here.stream, here.position, mask=_fetch(mask))
        event = torch.cuda.Event()
        write = _Write(here, {name: _fetch(value) for name, value in columns.items()}, offset, event)
        event.record()
        self._pending.append(write)
        self.flush(max_pending=MAX_PENDING)

    def flush(self, max_pending: int = 0) -> None:
        """Apply complete writes; wait for the oldest while more than `max_pending` are incomplete."""
        while self._pending and (len(self._pending) > max_pending or self._pending[0].arrived.query()):
            write = self._pending.popleft()
            write.arrived.synchronize()
            self._apply(write.index, write.columns, write.offset)


def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    """Start a non-blocking copy to pinned host memory."""
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor.detach(), non_blocking=True)
