from __future__ import annotations

import numpy as np
import pytest
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec, BatchSpec
from tests.buffers.buffer_helpers import (
    COLUMNS,
    assert_aligned,
    counter_buffer,
    counter_rows,
    episode_numbers,
    extend,
    seeded,
)


@pytest.mark.parametrize("rows", [10, 31, 32, 33, 50, 64, 200])
@pytest.mark.parametrize("boundary", ["cross", "within"])
def test_sequences_are_aligned(rows: int, boundary: str) -> None:
    buffer = counter_buffer(rows, num_streams=3, episode=9)
    spec = BatchSpec(size=64, length=6, context=1, boundary=boundary)
    generator = seeded()
    out = buffer.make_batch(spec)
    seen = set()
    for _ in range(10):
        batch = buffer.sample(spec, generator=generator, out=out)
        assert_aligned(batch)
        assert (batch.index.position >= buffer.oldest_position).all()
        assert (batch.index.position + spec.rows <= buffer.total_rows).all()
        if boundary == "within":
            assert not batch.is_first[:, 1:].any()
        seen |= set(batch.index.position.tolist())
    if boundary == "cross":
        assert seen == set(range(buffer.oldest_position, buffer.total_rows - spec.rows + 1))


@pytest.mark.parametrize("pad", ["right", "left"])
@pytest.mark.parametrize("rows", [3, 20, 80])
def test_padding_and_mask(pad: str, rows: int) -> None:
    buffer = counter_buffer(rows, num_streams=3, episode=5)
    numbers, oldest = episode_numbers(buffer), buffer.oldest_position
    batch = buffer.sample(BatchSpec(size=256, length=7, boundary="pad", pad=pad), generator=seeded())
    for sequence in range(256):
        stream, start = int(batch.index.stream[sequence]), int(batch.index.position[sequence])
        anchor = start if pad == "right" else start + 6
        for step in range(7):
            position = start + step
            held = oldest <= position < buffer.total_rows
            same = held and numbers[stream, position - oldest] == numbers[stream, anchor - oldest]
            assert bool(batch.mask[sequence, step]) == same
    assert_aligned(batch)  # and zero where the mask is False
    assert not batch["latent"][~batch.mask].any()


def test_out_keeps_addresses() -> None:
    buffer = counter_buffer(40)
    spec = BatchSpec(size=4, length=5)
    out = buffer.make_batch(spec)
    addresses = [value.data_ptr() for value in out.columns.values()]
    first = buffer.sample(spec, generator=seeded(3), out=out)
    counts = first["obs/count"].clone()
    assert first is out and [value.data_ptr() for value in out.columns.values()] == addresses
    buffer.sample(spec, generator=seeded(4), out=out)
    assert not torch.equal(out["obs/count"], counts)
    assert torch.equal(buffer.sample(spec, generator=seeded(3))["obs/count"], counts)


def test_keys_select_columns() -> None:
    buffer = counter_buffer(40)
    batch = buffer.sample(BatchSpec(size=4, length=5, keys=("obs/count", "reward")), generator=seeded())
    assert set(batch) == {"obs/count", "reward"} and set(batch.obs) == {"count"}
    with pytest.raises(ConfigError, match="Did you mean 'reward'"):
        buffer.make_batch(BatchSpec(size=4, length=5, keys=("rewards",)))


def test_dtypes() -> None:
    batch = counter_buffer(40).sample(BatchSpec(size=4, length=5), generator=seeded())
    assert batch["obs/image"].dtype == torch.uint8 and batch["obs/image"].shape == (4, 5, 3, 2, 2)
    assert batch.is_first.dtype == torch.bool and batch["latent"].dtype == torch.bfloat16
    assert torch.equal(batch["latent"][..., 0].long(), (batch["obs/count"] % 1000) % 128)


def test_add_many_rows() -> None:
    one, many = counter_buffer(0), counter_buffer(0)
    extend(one, 75, episode=7)
    steps = [counter_rows(2, position, episode=7) for position in range(75)]
    for begin, end in ((0, 3), (3, 70), (70, 75)):  # the second is longer than the ring
        many.add({name: np.stack([step[name] for step in steps[begin:end]], axis=1) for name in COLUMNS})
    for name, value in one.read(43, 32).columns.items():
        assert torch.equal(value, many.read(43, 32)[name])
    assert np.array_equal(one.ring.age, many.ring.age)


def test_add_tensors_views_and_read_only_arrays() -> None:
    buffer = counter_buffer(0)
    rows = counter_rows(2, 0)
    rows["obs/image"] = rows["obs/image"][..., ::-1]
    rows["reward"].flags.writeable = False
    buffer.add({name: torch.from_numpy(value) if name == "action" else value for name, value in rows.items()})
    assert torch.equal(buffer.read(0, 1)["obs/count"][:, 0], torch.tensor([0, 1000]))


def test_write_back_after_context() -> None:
    buffer = counter_buffer(50)
    spec = BatchSpec(size=3, length=4, context=2)
    batch = buffer.sample(spec, generator=seeded(5))
    before = buffer.read(18, 32)["latent"].float()
    value = 200.0 + torch.arange(12.0).reshape(3, 4)
    buffer.write_back(batch.index, {"latent": value[..., None].expand(3, 4, 3)}, offset=2)
    truth = before.clone()
    for sequence in range(3):  # in order: where sequences overlap, the last one wins
        stream, start = int(batch.index.stream[sequence]), int(batch.index.position[sequence])
        for step in range(4):
            truth[stream, start + 2 + step - 18] = value[sequence, step]
    assert not torch.equal(truth, before)
    assert torch.equal(buffer.read(18, 32)["latent"].float(), truth)


def test_write_back_skips_overwritten_rows() -> None:
    buffer = counter_buffer(40)
    batch = buffer.sample(BatchSpec(size=64, length=6), generator=seeded())
    extend(buffer, 20)  # newer rows replaced half of the sampled rows
    before = buffer.read(28, 32)["latent"].float()
    buffer.write_back(batch.index, {"latent": torch.full((64, 6, 3), 500.0)}, offset=0)
    after = buffer.read(28, 32)["latent"].float()
    positions = batch.index.position[:, None] + torch.arange(6)
    streams = batch.index.stream[:, None].expand(-1, 6)
    written = torch.zeros(2, 32, dtype=torch.bool)
    kept = positions >= 28
    written[streams[kept], positions[kept] - 28] = True
    assert 0 < written.sum() < 64 and (~kept).any()
    assert torch.equal(after, torch.where(written[..., None], 500.0, before))


def test_last_overlapping_write_back_wins() -> None:
    buffer = counter_buffer(10, num_streams=1, per_stream=10)
    batch = buffer.sample(BatchSpec(size=32, length=10), generator=seeded())  # the only sequence, 32 times
    values = torch.arange(32.0)[:, None, None].expand(32, 10, 3)
    buffer.write_back(batch.index, {"latent": values}, offset=0)
    assert (buffer.read(0, 10)["latent"] == 31).all()


@pytest.mark.parametrize("pad", ["right", "left"])
def test_write_back_skips_padding(pad: str) -> None:
    buffer = counter_buffer(50, episode=5)
    batch = buffer.sample(BatchSpec(size=2, length=8, boundary="pad", pad=pad), generator=seeded(2))
    before = buffer.read(18, 32)["latent"].float()
    buffer.write_back(batch.index, {"latent": torch.full((2, 8, 3), 300.0)}, offset=0)
    changed = (buffer.read(18, 32)["latent"].float() != before).any(-1)
    truth = torch.zeros_like(changed)
    for sequence in range(2):
        for step in range(8):
            if batch.mask[sequence, step]:
                truth[batch.index.stream[sequence], batch.index.position[sequence] + step - 18] = True
    assert not batch.mask.all() and torch.equal(changed, truth)


def test_read_write_and_add_column() -> None:
    buffer = counter_buffer(50)
    buffer.add_column("code", ArraySpec((2,), "uint8"))
    for position in range(buffer.oldest_position, buffer.total_rows, 5):
        batch = buffer.read(position, min(5, buffer.total_rows - position))
        assert_aligned(batch)
        code = (batch["obs/count"] % 200).to(torch.uint8)
        buffer.write(position, {"code": torch.stack([code, code + 1], -1)})
    batch = buffer.sample(BatchSpec(size=8, length=4), generator=seeded())
    assert torch.equal(batch["code"][..., 1].long(), batch["obs/count"] % 200 + 1)
    extend(buffer, 1)  # new rows are not transformed
    assert not buffer.read(50, 1)["code"].any()
    buffer.add_column("code", ArraySpec((2,), "uint8"))
    with pytest.raises(ConfigError, match=r"uint8 \(2,\), not uint8 \(3,\)"):
        buffer.add_column("code", ArraySpec((3,), "uint8"))
    with pytest.raises(ConfigError, match="holds 19 to 51"):
        buffer.read(18, 2)
    with pytest.raises(ConfigError, match="'reward' cannot be changed"):
        buffer.write(40, {"reward": torch.zeros(2, 1)})


def test_ready_and_shortage() -> None:
    buffer = counter_buffer(4, episode=3)
    cross, within = BatchSpec(size=2, length=5), BatchSpec(size=2, length=5, boundary="within")
    assert not buffer.ready(
        cross
    ) and "holds 4 rows per environment, and a sequence needs 5" in buffer.shortage(cross)
    assert buffer.ready(BatchSpec(size=2, length=5, boundary="pad"))
    extend(buffer, 8, episode=3)  # episodes of three and four rows
    assert buffer.ready(cross) and buffer.shortage(cross) == ""
    assert not buffer.ready(within) and "no episode in it has the 5 rows" in buffer.shortage(within)
    with pytest.raises(ConfigError, match="nothing to sample"):
        buffer.sample(within, generator=seeded())
    with pytest.raises(ConfigError, match="capacity of at least 66"):
        buffer.ready(BatchSpec(size=2, length=33))


def test_sizes_and_memory() -> None:
    buffer = counter_buffer(40)
    assert (buffer.size, buffer.capacity, buffer.total_rows, buffer.oldest_position) == (64, 64, 40, 8)
    assert buffer.bytes_per_row == 8 + 12 + 8 + 4 + 1 + 1 + 6 + 4
    assert buffer.nbytes == 64 * buffer.bytes_per_row
    assert "64 rows (2 × 32) × 44 bytes" in buffer.describe() and buffer.on_host


def test_buffers_share_no_memory() -> None:
    replay, held_out = counter_buffer(40), counter_buffer(8, num_streams=1)
    extend(replay, 5)
    assert (held_out.total_rows, replay.total_rows) == (8, 45)
    assert_aligned(held_out.sample(BatchSpec(size=4, length=4), generator=seeded()))


def test_errors() -> None:
    buffer = counter_buffer(0)
    rows = counter_rows(2, 0)
    with pytest.raises(ConfigError, match="column 'reward' is missing"):
        buffer.add({name: value for name, value in rows.items() if name != "reward"})
    with pytest.raises(ConfigError, match="column 'value' is unknown"):
        buffer.add({**rows, "value": rows["reward"]})
    with pytest.raises(ConfigError, match=r"'action' has shape \(2, 3\), but the buffer expects \(2, 2\)"):
        buffer.add({**rows, "action": np.zeros((2, 3), np.float32)})
    with pytest.raises(ConfigError, match="dtype float32, which does not fit the stored uint8"):
        buffer.add({**rows, "obs/image": rows["obs/image"].astype(np.float32)})
    assert buffer.size == 0
    with pytest.raises(ConfigError, match="'reward' cannot be changed once stored"):
        extend(buffer, 9)
        index = buffer.sample(BatchSpec(size=1, length=2), generator=seeded()).index
        buffer.write_back(index, {"reward": torch.zeros(1, 2)}, offset=0)
    with pytest.raises(ConfigError, match="less than one row for each of 4 environments"):
        ReplayBuffer(COLUMNS, capacity=3, num_streams=4)
    with pytest.raises(ConfigError, match="choose auto, device, host or disk"):
        ReplayBuffer(COLUMNS, capacity=8, num_streams=4, storage="gpu")
    with pytest.raises(ConfigError, match="dtype 'complex64'"):
        ReplayBuffer({"x": ArraySpec((), "complex64")}, capacity=8, num_streams=4)
    with pytest.raises(ConfigError, match="needs the column 'is_first'"):
        ReplayBuffer({"x": ArraySpec((), "float32")}, capacity=8, num_streams=4).ready(
            BatchSpec(size=1, length=2, boundary="within")
        )
