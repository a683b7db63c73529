"""Counter streams: all columns of row p of stream n encode 1000·n + p, so misplaced rows are detected."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.records import ArraySpec, Batch

COLUMNS = {
    "obs/count": ArraySpec((), "int64"),
    "obs/image": ArraySpec((3, 2, 2), "uint8"),
    "action": ArraySpec((2,), "float32"),
    "reward": ArraySpec((), "float32"),
    "terminated": ArraySpec((), "bool"),
    "is_first": ArraySpec((), "bool"),
    "latent": ArraySpec((3,), "bfloat16"),
}


def counter_rows(num_streams: int, position: int, episode: int = 0) -> dict[str, np.ndarray]:
    """One row per stream. Stream n starts an episode every `episode + n` rows; 0: only at position 0."""
    stream = np.arange(num_streams)
    value = 1000 * stream + position
    length = episode + stream
    first = (position % length == 0) if episode else np.full(num_streams, position == 0)
    last = ((position + 1) % length == 0) if episode else np.zeros(num_streams, dtype=bool)
    return {
        "obs/count": value.astype(np.int64),
        "obs/image": (value[:, None, None, None] % 251 * np.ones((3, 2, 2))).astype(np.uint8),
        "action": np.stack([value, -value], axis=1).astype(np.float32),
        "reward": (value / 2).astype(np.float32),
        "terminated": last,
        "is_first": first,
        "latent": np.full((num_streams, 3), position % 128, dtype=np.float32),
    }


def counter_buffer(
    rows: int, *, num_streams: int = 2, per_stream: int = 32, episode: int = 0, **options: Any
) -> ReplayBuffer:
    options = {"mutable": ("latent",), "chunk_rows": 8, **options}
    buffer = ReplayBuffer(COLUMNS, capacity=num_streams * per_stream, num_streams=num_streams, **options)
    extend(buffer, rows, episode)
    return buffer


def extend(buffer: ReplayBuffer, rows: int, episode: int = 0) -> None:
    for _ in range(rows):
        buffer.add(counter_rows(buffer.num_streams, buffer.total_rows, episode))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expected(batch: Batch) -> torch.Tensor:
    """Return the counts (B, T) that a batch must have, computed from its index."""
    steps = torch.arange(batch["obs/count"].shape[1])
    return 1000 * batch.index.stream[:, None] + batch.index.position[:, None] + steps


def assert_aligned(batch: Batch) -> None:
    """Check every column of every row that is not padding against its stream and position."""
    count = expected(batch)
    real = torch.ones_like(count, dtype=torch.bool) if batch.mask is None else batch.mask
    assert torch.equal(batch["obs/count"], torch.where(real, count, 0))
    assert torch.equal(batch["obs/image"][..., 2, 1, 1], torch.where(real, count % 251, 0).to(torch.uint8))
    assert torch.equal(batch["action"][..., 1], torch.where(real, -count, 0).float())
    assert torch.equal(batch["reward"], torch.where(real, count / 2, 0).float())


def episode_numbers(buffer: ReplayBuffer) -> np.ndarray:
    """Return the episode (N, stored) of each stored row, by counting `is_first` in a loop."""
    batch = buffer.read(buffer.oldest_position, buffer.total_rows - buffer.oldest_position)
    numbers = np.zeros(batch.is_first.shape, dtype=int)
    for stream in range(numbers.shape[0]):
        episode = 0
        for step in range(numbers.shape[1]):
            episode += int(batch.is_first[stream, step])
            numbers[stream, step] = episode
    return numbers
