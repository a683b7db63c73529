"""PrioritizedReplay and EpisodeBuffer with a GPU: the same draws as on the CPU, without synchronization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.records import BatchSpec
from tests.buffers.buffer_helpers import counter_rows
from tests.buffers.episodes.reference import add_episodes, episode_buffer, seeded
from tests.buffers.test_prioritized import extend, prioritized
from tests.gpu.test_replay import no_host_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("storage", ["device", "host"])
@pytest.mark.parametrize("boundary", ["cross", "within"])
def test_priorities_match_cpu(storage: str, boundary: str) -> None:
    spec = BatchSpec(size=16, length=4, context=1, boundary=boundary, sampler="prioritized")
    cpu, gpu = prioritized(0), prioritized(0, device="cuda", storage=storage)
    mine, its = seeded(1), seeded(1)
    for buffer in (cpu, gpu):
        buffer.make_batch(spec)
    for turn in range(40):
        for buffer in (cpu, gpu):
            extend(buffer, 2, episode=9)
        if not cpu.ready(spec):
            continue
        ours, theirs = cpu.sample(spec, generator=mine), gpu.sample(spec, generator=its)
        assert theirs["weight"].is_cuda
        assert torch.equal(ours.index.position, theirs.index.position.cpu())
        assert torch.equal(ours.index.stream, theirs.index.stream.cpu())
        assert torch.equal(ours["obs/count"], theirs["obs/count"].cpu())
        assert torch.allclose(ours["weight"], theirs["weight"].cpu(), atol=1e-5)
        value = (ours["obs/count"][:, 1:2] * 7 % 13 + turn).float()
        cpu.write_back(ours.index, {"priority": value}, offset=1)
        gpu.write_back(theirs.index, {"priority": value.cuda()}, offset=1)
        gpu.read(gpu.oldest_position, 1)  # read() waits for pending write-backs


def test_priorities_without_sync() -> None:
    buffer = prioritized(50, device="cuda", storage="device")
    spec = BatchSpec(size=8, length=5, boundary="within", sampler="prioritized")
    out, generator = buffer.make_batch(spec), seeded()
    priority = torch.rand(8, 1, device="cuda")
    buffer.sample(spec, generator=generator, out=out)
    buffer.add(counter_rows(2, buffer.total_rows, 9))
    with no_host_sync():
        for _ in range(3):
            buffer.sample(spec, generator=generator, out=out)
            buffer.write_back(out.index, {"priority": priority}, offset=0)
            buffer.add(counter_rows(2, buffer.total_rows, 9))


def test_episode_batches_on_device(tmp_path: Path) -> None:
    spec = BatchSpec(size=8, length=5, context=1, boundary="pad", pad="both", sampler="episodes")
    host = episode_buffer(tmp_path / "host", num_streams=1)
    device = episode_buffer(tmp_path / "device", num_streams=1, device="cuda")
    for buffer in (host, device):
        add_episodes(buffer, [20, 7, 31, 12])
    direct, ahead = BatchStream(host, spec, seeded(5)), BatchStream(device, spec, seeded(5), prefetch=1)
    addresses = [value.data_ptr() for value in ahead.batch.columns.values()]
    for turn in range(20):
        ours, theirs = direct.next(), ahead.next()
        assert theirs.reward.is_cuda and torch.equal(ours["obs/count"], theirs["obs/count"].cpu())
        assert torch.equal(ours.mask, theirs.mask.cpu())
        assert [value.data_ptr() for value in theirs.columns.values()] == addresses
        if turn % 5 == 4:  # only without prefetch: latents of a prefetched batch are one write-back old
            latent = torch.full((8, 5, 3), float(turn))
            direct.write_back(ours.index, {"latent": latent}, offset=1)
            ahead.write_back(theirs.index, {"latent": latent.cuda()}, offset=1)
            device._deferred.flush()
        ahead.prefetch_next()
    last = [stream.next()["latent"].cpu() for stream in (direct, ahead)]
    assert torch.equal(*last)
