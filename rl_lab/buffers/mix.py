"""Batches drawn from several buffers at once, in fixed shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from rl_lab.buffers.batches import MaskedIndex, allocate, part, part_of_index
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex


def shares(weights: list[float], size: int) -> list[int]:
    """Split `size` by weight into whole numbers, by largest remainder (ties go to the first)."""
    total = sum(weights)
    exact = [size * weight / total for weight in weights]
    whole = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: size - sum(whole)]:
        whole[i] += 1
    return whole


class BufferMix:
    """{name: (buffer, weight)} as one buffer to sample from. The sequences of a batch lie in the order of names.

    `RowIndex.buffer` gives each sequence's buffer, as its place among the names. Rows are added to the buffers
    themselves. Columns are those that all buffers have.
    """

    def __init__(self, buffers: Mapping[str, tuple[Any, float]]) -> None:
        if not buffers or any(weight <= 0 for _, weight in buffers.values()):
            raise ConfigError(
                f"a mix needs buffers with weights above 0, not {[w for _, w in buffers.values()]}"
            )
        self.names = list(buffers)
        self.buffers = [buffer for buffer, _ in buffers.values()]
        self.weights = [float(weight) for _, weight in buffers.values()]
        self.device: torch.device = self.buffers[0].device
        if any(buffer.device != self.device for buffer in self.buffers):
            raise ConfigError(
                f"the buffers of a mix are on different devices: {[b.device for b in self.buffers]}"
            )

    @property
    def columns(self) -> dict[str, ArraySpec]:
        """Columns that every buffer has; one that differs between them is an error."""
        common = set.intersection(*(set(buffer.columns) for buffer in self.buffers))
        for name in sorted(common):
            for other, buffer in zip(self.names, self.buffers):
                mine, its = self.buffers[0].columns[name], buffer.columns[name]
                if mine != its:
                    raise ConfigError(
                        f"column '{name}' is {mine.dtype} {mine.shape} in buffer '{self.names[0]}', but {its.dtype} "
                        f"{its.shape} in '{other}'"
                    )
        return {name: spec for name, spec in self.buffers[0].columns.items() if name in common}

    @property
    def storage_device(self) -> torch.device:
        """The host only if all rows are there."""
        devices = [buffer.storage_device for buffer in self.buffers]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def describe(self) -> str:
        return "; ".join(f"{name}: {buffer.describe()}" for name, buffer in zip(self.names, self.buffers))

    def ready(self, spec: BatchSpec) -> bool:
        # A list, so that each buffer is asked and starts its sampler's queue.
        return all([buffer.ready(its) for _, buffer, its, _, _ in self._split(spec)])

    def shortage(self, spec: BatchSpec) -> str:
        reasons = [(name, buffer.shortage(its)) for name, buffer, its, _, _ in self._split(spec)]
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        self.ready(spec)
        place = self.device if device is None else torch.device(device)
        pin = place.type == "cpu" and self.device.type == "cuda"
        batch = allocate(self.columns, spec, place, pin)
        assert batch.index is not None
        counts = torch.tensor(shares(self.weights, spec.size))
        which = torch.repeat_interleave(torch.arange(len(counts)), counts).to(place)
        stream, position = batch.index.stream, batch.index.position
        if batch.mask is not None:
            return Batch(batch.columns, MaskedIndex(stream, position, which, batch.mask), batch.mask)
        return Batch(batch.columns, RowIndex(stream, position, which))

    def sample(self, spec: BatchSpec, *, generator: torch.Generator, out: Batch | None = None) -> Batch:
        out = self.make_batch(spec) if out is None else out
        for _, buffer, its, begin, end in self._split(spec):
            its = replace(its, keys=tuple(out.columns))
            buffer.sample(its, generator=generator, out=part(out, begin, end))
        return out

    def undo(self, spec: BatchSpec) -> None:
        for _, buffer, its, _, _ in self._split(spec):
            buffer.undo(its)

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        begin = 0
        for buffer, count in zip(self.buffers, shares(self.weights, len(index.stream))):
            if count:
                its = {name: value[begin : begin + count] for name, value in columns.items()}
                buffer.write_back(part_of_index(index, begin, begin + count), its, offset=offset)
            begin += count

    def _split(self, spec: BatchSpec) -> Iterator[tuple[str, Any, BatchSpec, int, int]]:
        """Name, buffer, its BatchSpec, and its place in the batch, for each buffer that has a share."""
        begin = 0
        for name, buffer, count in zip(self.names, self.buffers, shares(self.weights, spec.size)):
            if count:
                yield name, buffer, replace(spec, size=count), begin, begin + count
            begin += count
