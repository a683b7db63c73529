"""A slow reference model of EpisodeBuffer: lists of counts, with every rule as a loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.records import ArraySpec, Batch, BatchSpec

COLUMNS = {
    "obs/count": ArraySpec((), "int64"),
    "obs/image": ArraySpec((2, 3), "uint8"),
    "reward": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "truncated": ArraySpec((), "bool"),
    "is_first": ArraySpec((), "bool"),
    "latent": ArraySpec((3,), "bfloat16"),
}


def episode_buffer(folder: Path, **options: Any) -> EpisodeBuffer:
    """Create an EpisodeBuffer with small blocks and chunks, so that short episodes need several."""
    given = {"num_streams": 2, "block_rows": 4, "chunk_bytes": 4096, "mutable": ("latent",), **options}
    return EpisodeBuffer(COLUMNS, folder=folder, **given)


def rows_of(
    counts: np.ndarray, first: np.ndarray, ended: np.ndarray, truncated: bool = False
) -> dict[str, Any]:
    """Return rows whose columns all encode the count. counts, first, ended: (N, T)"""
    counts = np.asarray(counts, dtype=np.int64)
    return {
        "obs/count": counts,
        "obs/image": (counts[..., None, None] % 251 * np.ones((2, 3))).astype(np.uint8),
        "reward": (counts / 2).astype(np.float32),
        "terminated": np.asarray(ended) & (not truncated),
        "truncated": np.asarray(ended) & truncated,
        "is_first": np.asarray(first),
        "latent": np.broadcast_to(counts[..., None] % 128, (*counts.shape, 3)).astype(np.float32),
    }


def add_episodes(buffer: EpisodeBuffer, lengths: list[int], *, end: bool = True) -> None:
    """Add episodes of these lengths to stream 0; other streams get one-row episodes."""
    for length in lengths:
        start, n = buffer.total_rows, buffer.num_streams
        counts = 1000 * np.arange(n)[:, None] + np.arange(start, start + length)
        first, ended = np.ones((n, length), bool), np.ones((n, length), bool)
        first[0, 1:] = ended[0, :-1] = False
        ended[0, -1] = end
        buffer.add(rows_of(counts, first, ended))


@dataclass
class Held:
    """An episode of the reference model."""

    stream: int
    start: int
    counts: list[int] = field(default_factory=list)
    firsts: list[bool] = field(default_factory=list)
    ended: bool = False


class Model:
    """The expected contents of a buffer."""

    def __init__(self, streams: int, capacity: int | None, with_open: bool, longest: int = 10**9) -> None:
        self.streams, self.capacity, self.with_open, self.longest = streams, capacity, with_open, longest
        self.closed: list[Held] = []
        self.open: list[Held | None] = [None] * streams
        self.cursor = 0

    def add(self, counts: np.ndarray, first: np.ndarray, ended: np.ndarray) -> None:
        for step in range(counts.shape[1]):
            for stream in range(self.streams):
                if first[stream, step] and self.open[stream] is not None:
                    self._close(stream, False)
            for stream in range(self.streams):
                if self.open[stream] is None:
                    self.open[stream] = Held(stream, self.cursor)
                episode = self.open[stream]
                episode.counts.append(int(counts[stream, step]))
                episode.firsts.append(bool(first[stream, step]))
            self.cursor += 1
            for stream in range(self.streams):
                if ended[stream, step] or len(self.open[stream].counts) >= self.longest:
                    self._close(stream, bool(ended[stream, step]))

    def _close(self, stream: int, ended: bool) -> None:
        episode, self.open[stream] = self.open[stream], None
        episode.ended = ended
        self.closed.append(episode)
        while (
            self.capacity and len(self.closed) > 1 and sum(len(e.counts) for e in self.closed) > self.capacity
        ):
            self.closed.pop(0)

    def lose_open(self) -> None:
        """The process was killed: what was in memory is gone, and positions go on behind a gap."""
        self.open = [None] * self.streams
        self.cursor = max([e.start + len(e.counts) for e in self.closed], default=-1) + 1

    def all(self) -> list[Held]:
        return self.closed + [e for e in self.open if e is not None and self.with_open]

    def row(self, stream: int, position: int) -> tuple[Held, int] | None:
        for episode in self.all():
            if episode.stream == stream and 0 <= position - episode.start < len(episode.counts):
                return episode, position - episode.start
        return None

    def starts(self, spec: BatchSpec) -> set[tuple[int, int]]:
        """(stream, position) of every sequence that may be drawn; for pad: of the row that it is laid around."""
        found = set()
        for episode in self.all():
            for row in range(len(episode.counts)):
                position, inside = episode.start + row, len(episode.counts) - row >= spec.rows
                if (
                    spec.boundary == "pad"
                    or (spec.boundary == "within" and inside)
                    or (
                        spec.boundary == "cross"
                        and all(self.row(episode.stream, position + k) for k in range(spec.rows))
                    )
                ):
                    found.add((episode.stream, position))
        return found

    def check(self, batch: Batch, spec: BatchSpec) -> None:
        """Every row of a batch is what was stored at its stream and position, or padding."""
        for b in range(spec.size):
            stream, position = int(batch.index.stream[b]), int(batch.index.position[b])
            anchor = None
            if batch.mask is not None:
                real = batch.mask[b].nonzero().flatten().tolist()
                assert real == list(range(real[0], real[-1] + 1))
                anchor = self.row(stream, position + real[0])[0]
            for t in range(spec.rows):
                found = self.row(stream, position + t)
                padding = anchor is not None and (found is None or found[0] is not anchor)
                if padding:
                    assert not batch.mask[b, t]
                    assert not any(value[b, t].any() for value in batch.columns.values())
                    continue
                assert batch.mask is None or batch.mask[b, t]
                episode, row = found
                assert int(batch["obs/count"][b, t]) == episode.counts[row]
                assert bool(batch.is_first[b, t]) == episode.firsts[row]
                assert bool(batch.terminated[b, t]) == (episode.ended and row == len(episode.counts) - 1)
                assert int(batch["obs/image"][b, t, 1, 2]) == episode.counts[row] % 251
                assert float(batch.reward[b, t]) == episode.counts[row] / 2
                if spec.boundary == "within":
                    assert found[0] is self.row(stream, position)[0]


def assert_same_content(buffer: EpisodeBuffer, model: Model) -> None:
    table = buffer._store.table
    stored = [
        (table.fact(n, "stream"), table.fact(n, "start"), table.fact(n, "rows")) for n in table.numbers()
    ]
    assert stored == [(e.stream, e.start, len(e.counts)) for e in model.closed]
    assert table.ended()[table.column("rows") > 0].tolist() == [e.ended for e in model.closed]
    opened = [0 if e is None else len(e.counts) for e in model.open]
    assert buffer._open.rows().tolist() == opened
    assert buffer.size == sum(len(e.counts) for e in model.closed) + sum(opened)
    assert buffer.episodes == len(model.closed)


def everything(buffer: EpisodeBuffer, numbers: list[int] | None = None) -> dict[int, list[int]]:
    """Return episode number -> counts, read from disk."""
    found = {}
    for number in buffer._store.table.numbers().tolist() if numbers is None else numbers:
        blocks = buffer._store.layout.blocks(buffer._store.table.fact(number, "rows"))
        content = buffer._store.read([(number, block) for block in range(blocks)])
        found[number] = [
            count
            for block in content
            for count in buffer._store.layout.as_tensor("obs/count", block["obs/count"].copy()).tolist()
        ]
    return found


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
