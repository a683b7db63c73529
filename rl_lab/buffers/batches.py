"""Batches at fixed addresses: making them, and copying one into another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_lab.buffers.columns import torch_dtype
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
