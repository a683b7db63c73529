"""Write-backs from a GPU to rows in host memory, without making the host wait for the GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from rl_lab.buffers.batches import MaskedIndex
from rl_lab.records import RowIndex

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
