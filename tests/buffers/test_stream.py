from __future__ import annotations

import pytest
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.mix import BufferMix
from rl_lab.records import BatchSpec
from tests.buffers.buffer_helpers import assert_aligned, counter_buffer, extend, seeded

SPEC = BatchSpec(size=3, length=4, sampler="online")


def test_no_prefetch() -> None:
    buffer = counter_buffer(30)
    stream, generator = BatchStream(buffer, SPEC, seeded(7)), seeded(7)
    for _ in range(3):
        state = stream.state()
        assert torch.equal(state, generator.get_state())
        batch = stream.next()
        assert batch is stream.batch
        assert torch.equal(batch["obs/count"], buffer.sample(SPEC, generator=generator)["obs/count"])
        stream.prefetch_next()  # nothing to do


@pytest.mark.parametrize("mixed", [False, True])
def test_prefetched_batch_is_returned(mixed: bool) -> None:
    buffer = counter_buffer(30)
    source = BufferMix({"a": (buffer, 1), "b": (counter_buffer(30, num_streams=1), 1)}) if mixed else buffer
    ahead, direct = BatchStream(source, SPEC, seeded(1), prefetch=1), BatchStream(source, SPEC, seeded(1))
    addresses = [value.data_ptr() for value in ahead.batch.columns.values()]
    for _ in range(4):
        ahead.prefetch_next()
        ahead.prefetch_next()  # only one batch is prefetched
        wanted = {name: value.clone() for name, value in direct.next().columns.items()}
        served = ahead.next()
        assert all(torch.equal(served[name], wanted[name]) for name in wanted)
        assert_aligned(served)
    assert [value.data_ptr() for value in ahead.batch.columns.values()] == addresses


def test_later_rows_do_not_change_prefetched_batch() -> None:
    buffer = counter_buffer(32)
    stream = BatchStream(buffer, SPEC, seeded(1), prefetch=1)
    stream.prefetch_next()
    extend(buffer, 32)  # every row is overwritten
    batch = stream.next()
    assert_aligned(batch)
    assert (batch.index.position < 32).all()


def test_drop_prefetched_undoes_draw() -> None:
    buffer = counter_buffer(0)
    stream = BatchStream(buffer, SPEC, seeded(1), prefetch=1)
    stream.prefetch_next()  # not ready: nothing happens
    extend(buffer, 9)
    before = stream.generator.get_state()
    stream.prefetch_next()
    assert torch.equal(stream.state(), before)
    stream.drop_prefetched()
    assert torch.equal(stream.generator.get_state(), before)
    fresh = list(zip(*(stream.next().index.stream.tolist(), stream.batch.index.position.tolist())))
    assert fresh == [(0, 0), (1, 0), (0, 4)]  # the queue is as before the dropped batch


def test_resumed_stream_draws_dropped_batch() -> None:
    buffer, twin = counter_buffer(0), counter_buffer(0)
    stream = BatchStream(buffer, SPEC, seeded(1), prefetch=1)
    extend(buffer, 30)
    extend(twin, 30)
    stream.next()
    stream.prefetch_next()
    stream.drop_prefetched()
    twin.set_state(buffer.get_state())
    generator = seeded()
    generator.set_state(stream.state())
    resumed = BatchStream(twin, SPEC, generator, prefetch=1)
    for _ in range(3):
        assert torch.equal(stream.next()["obs/count"], resumed.next()["obs/count"])
        stream.prefetch_next()
        resumed.prefetch_next()


def test_write_back_reaches_the_buffer() -> None:
    buffer = counter_buffer(4, num_streams=1)
    stream = BatchStream(buffer, SPEC, seeded())
    stream.write_back(stream.next().index, {"latent": torch.full((3, 4, 3), 9.0)}, offset=0)
    assert (buffer.read(0, 4)["latent"] == 9).all()
