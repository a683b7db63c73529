"""One consumer's batches: always at the same addresses, and on CUDA one ahead when rows are in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_lab.buffers.batches import copy_batch
from rl_lab.records import Batch, BatchSpec, RowIndex


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
