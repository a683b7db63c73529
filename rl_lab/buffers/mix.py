"""BufferMix: batches drawn from several buffers in fixed proportions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from rl_lab.buffers.batches import MaskedIndex, allocate, part, part_of_index
from rl_lab.errors import ConfigError
from rl_lab.protocols import BatchSource
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex


def shares(weights: list[float], size: int) -> list[int]:
    """Split `size` into integers in proportion to the weights, by largest remainder (ties: the first)."""
    total = sum(weights)
    exact = [size * weight / total for weight in weights]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    return counts


class BufferMix:
    """Samples from several buffers, {name: (buffer, weight)}. Sequences are in the order of the names.

    `RowIndex.buffer` is the index of each sequence's buffer. Rows are added to the buffers directly. The mix
    has the columns that all buffers have.
    """

    def __init__(self, buffers: Mapping[str, tuple[BatchSource, float]]) -> None:
        if not buffers or any(weight <= 0 for _, weight in buffers.values()):
            raise ConfigError(f"buffer weights must be above 0, not {[w for _, w in buffers.values()]}")
        self.names = list(buffers)
        self.buffers = [buffer for buffer, _ in buffers.values()]
        self.weights = [float(weight) for _, weight in buffers.values()]
        self.device: torch.device = self.buffers[0].device
        if any(buffer.device != self.device for buffer in self.buffers):
            raise ConfigError(
                f"buffers of a mix must be on one device, not on {[b.device for b in self.buffers]}"
            )

    @property
    def columns(self) -> dict[str, ArraySpec]:
        """Columns that every buffer has; ConfigError if shape or dtype differ between buffers."""
        common = set.intersection(*(set(buffer.columns) for buffer in self.buffers))
        for name in sorted(common):
            for other, buffer in zip(self.names, self.buffers):
                first, second = self.buffers[0].columns[name], buffer.columns[name]
                if first != second:
                    raise ConfigError(
                        f"column '{name}' is {first.dtype} {first.shape} in buffer '{self.names[0]}', but {second.dtype} "
                        f"{second.shape} in '{other}'"
                    )
        return {name: spec for name, spec in self.buffers[0].columns.items() if name in common}

    @property
    def storage_device(self) -> torch.device:
        """The host if all buffers store their rows there, else the first other device."""
        devices = [buffer.storage_device for buffer in self.buffers]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def describe(self) -> str:
        return "; ".join(f"{name}: {buffer.describe()}" for name, buffer in zip(self.names, self.buffers))

    def ready(self, spec: BatchSpec) -> bool:
        # A list, so that every buffer creates its sampler and fills the sampler's queue from now on.
        return all([buffer.ready(part_spec) for _, buffer, part_spec, _, _ in self._split(spec)])

    def shortage(self, spec: BatchSpec) -> str:
        reasons = [(name, buffer.shortage(part_spec)) for name, buffer, part_spec, _, _ in self._split(spec)]
        return "; ".join(f"{name}: {reason}" for name, reason in reasons if reason)

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        self.ready(spec)
        place = self.device if device is None else torch.device(device)
        pin = place.type == "cpu" and self.device.type == "cuda"
        batch = allocate(self.columns, spec, place, pin)
        assert batch.index is not None
        counts = torch.tensor(shares(self.weights, spec.size))
        buffer_index = torch.repeat_interleave(torch.arange(len(counts)), counts).to(place)
        stream, position = batch.index.stream, batch.index.position
        if batch.mask is not None:
            return Batch(batch.columns, MaskedIndex(stream, position, buffer_index, batch.mask), batch.mask)
        return Batch(batch.columns, RowIndex(stream, position, buffer_index))

    def sample(self, spec: BatchSpec, *, generator: torch.Generator, out: Batch | None = None) -> Batch:
        out = self.make_batch(spec) if out is None else out
        for _, buffer, part_spec, begin, end in self._split(spec):
            part_spec = replace(part_spec, keys=tuple(out.columns))
            buffer.sample(part_spec, generator=generator, out=part(out, begin, end))
        return out

    def undo(self, spec: BatchSpec) -> None:
        for _, buffer, part_spec, _, _ in self._split(spec):
            buffer.undo(part_spec)

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        begin = 0
        for buffer, count in zip(self.buffers, shares(self.weights, len(index.stream))):
            if count:
                values = {name: value[begin : begin + count] for name, value in columns.items()}
                buffer.write_back(part_of_index(index, begin, begin + count), values, offset=offset)
            begin += count

    def _split(self, spec: BatchSpec) -> Iterator[tuple[str, BatchSource, BatchSpec, int, int]]:
        """Yield name, buffer, BatchSpec, begin and end in the batch, for each buffer with sequences."""
        begin = 0
        for name, buffer, count in zip(self.names, self.buffers, shares(self.weights, spec.size)):
            if count:
                yield name, buffer, replace(spec, size=count), begin, begin + count
            begin += count
