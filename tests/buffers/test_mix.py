from __future__ import annotations

import pytest
import torch

from rl_lab.buffers.mix import BufferMix, shares
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, BatchSpec
from tests.buffers.buffer_helpers import COLUMNS, assert_aligned, counter_buffer, expected, extend, seeded


@pytest.mark.parametrize(
    ("weights", "size", "result"),
    [
        ([0.5, 0.5], 16, [8, 8]),
        ([0.5, 0.5], 5, [3, 2]),
        ([3, 1], 16, [12, 4]),
        ([0.7, 0.2, 0.1], 16, [11, 3, 2]),
        ([1, 1, 1], 16, [6, 5, 5]),
        ([0.99, 0.01], 16, [16, 0]),
    ],
)
def test_shares_by_largest_remainder(weights: list[float], size: int, result: list[int]) -> None:
    assert shares(weights, size) == result and sum(result) == size


@pytest.mark.parametrize("boundary", ["cross", "within", "pad"])
def test_each_buffer_fills_its_share(boundary: str) -> None:
    replay, demos = counter_buffer(50, episode=9), counter_buffer(100, num_streams=1, episode=9)
    mix = BufferMix({"replay": (replay, 3), "demos": (demos, 1)})
    spec = BatchSpec(size=16, length=5, boundary=boundary)
    out = mix.make_batch(spec)
    addresses = [value.data_ptr() for value in out.columns.values()]
    for seed in range(5):
        batch = mix.sample(spec, generator=seeded(seed), out=out)
        assert batch is out and [value.data_ptr() for value in out.columns.values()] == addresses
        assert_aligned(batch)
        assert batch.index.buffer.tolist() == [0] * 12 + [1] * 4
        assert (batch.index.position[:12] <= 50).all() and (batch.index.position[12:] >= 68).all()


def test_write_back_reaches_its_buffer() -> None:
    replay, demos = counter_buffer(20), counter_buffer(20, num_streams=1)
    mix = BufferMix({"replay": (replay, 0.5), "demos": (demos, 0.5)})
    spec = BatchSpec(size=6, length=3, context=1)
    batch = mix.sample(spec, generator=seeded())
    values = (expected(batch)[:, 1:, None] % 100 + 1).float().expand(6, 3, 3)
    for buffer in (replay, demos):
        buffer.write(0, {"latent": torch.zeros(buffer.num_streams, 20, 3)})
    mix.write_back(batch.index, {"latent": values}, offset=1)
    for buffer, rows in ((replay, slice(0, 3)), (demos, slice(3, 6))):
        held = buffer.read(0, 20)
        written = held["latent"][..., 0] != 0
        assert torch.equal(held["latent"][..., 0][written].long(), held["obs/count"][written] % 100 + 1)
        touched = {
            (int(stream), int(position) + step)
            for stream, position in zip(batch.index.stream[rows], batch.index.position[rows])
            for step in (1, 2, 3)
        }
        assert set(map(tuple, written.nonzero().tolist())) == touched


def test_ready_and_shortage() -> None:
    replay, demos = counter_buffer(20), counter_buffer(2, num_streams=1)
    mix = BufferMix({"replay": (replay, 1), "demos": (demos, 1)})
    spec = BatchSpec(size=4, length=5)
    assert not mix.ready(spec) and mix.shortage(spec).startswith("demos: the buffer holds 2 rows")
    extend(demos, 3)
    assert mix.ready(spec) and mix.shortage(spec) == ""


def test_common_columns_only() -> None:
    replay = counter_buffer(20)
    columns = {name: spec for name, spec in COLUMNS.items() if name != "latent"}
    demos = ReplayBuffer(columns, capacity=64, num_streams=2)
    for position in range(20):
        demos.add(
            {name: value[:, 0] for name, value in replay.read(position, 1).columns.items() if name in columns}
        )
    batch = BufferMix({"replay": (replay, 1), "demos": (demos, 1)}).sample(
        BatchSpec(size=4, length=3), generator=seeded()
    )
    assert set(batch) == set(columns)
    assert_aligned(batch)


def test_errors() -> None:
    other = ReplayBuffer({**COLUMNS, "action": ArraySpec((5,), "float32")}, capacity=64, num_streams=2)
    mix = BufferMix({"replay": (counter_buffer(9), 1), "demos": (other, 1)})
    with pytest.raises(
        ConfigError, match=r"'action' is float32 \(2,\) in buffer 'replay', but float32 \(5,\) in 'demos'"
    ):
        mix.make_batch(BatchSpec(size=4, length=3))
    with pytest.raises(ConfigError, match="weights must be above 0"):
        BufferMix({"replay": (other, 0.0)})
