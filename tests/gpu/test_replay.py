"""ReplayBuffer on a GPU: the same rows, draws and write-backs as on the CPU, without synchronization."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.mix import BufferMix
from rl_lab.buffers.prioritized import PrioritizedReplay
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.records import Batch, BatchSpec
from tests.buffers.buffer_helpers import COLUMNS, counter_buffer, counter_rows, extend, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SPECS = [
    BatchSpec(size=8, length=5, context=1, sampler="online"),
    BatchSpec(size=8, length=5, boundary="within"),
    BatchSpec(size=8, length=5, boundary="pad", pad="left"),
    BatchSpec(size=8, length=5, boundary="pad", pad="right"),
    BatchSpec(size=8, length=5, boundary="pad", pad="right", least=2),
]


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pair(rows: int, storage: str) -> tuple[ReplayBuffer, ReplayBuffer]:
    ours = counter_buffer(rows, episode=9)
    return ours, counter_buffer(rows, episode=9, device="cuda", storage=storage)


def same(left: Batch, right: Batch) -> bool:
    columns = all(torch.equal(left[name], right[name].cpu()) for name in left)
    masks = left.mask is None or torch.equal(left.mask, right.mask.cpu())
    return columns and masks and torch.equal(left.index.position, right.index.position.cpu())


@pytest.mark.parametrize("storage", ["device", "host", "disk"])
@pytest.mark.parametrize("spec", SPECS)
def test_gpu_matches_cpu(spec: BatchSpec, storage: str) -> None:
    cpu, gpu = pair(0, storage)
    mine, theirs = seeded(3), seeded(3)
    ours, out = cpu.make_batch(spec), gpu.make_batch(spec)
    assert out["reward"].is_cuda and gpu.storage_device.type == ("cuda" if storage == "device" else "cpu")
    for turn in range(30):
        for buffer in (cpu, gpu):
            extend(buffer, 3, episode=9)
        if not cpu.ready(spec):
            continue
        cpu.sample(spec, generator=mine, out=ours)
        gpu.sample(spec, generator=theirs, out=out)
        assert same(ours, out)
        # Equal values for equal rows, because the winner of overlapping sequences is undefined on a GPU.
        value = (ours["obs/count"][:, spec.context :, None] % 97 + turn).expand(-1, -1, 3).float()
        cpu.write_back(ours.index, {"latent": value}, offset=spec.context)
        gpu.write_back(out.index, {"latent": value.cuda()}, offset=spec.context)
        gpu.read(gpu.oldest_position, 1)  # read() waits for pending write-backs
    count = cpu.total_rows - cpu.oldest_position
    assert same(cpu.read(cpu.oldest_position, count), gpu.read(gpu.oldest_position, count))


def test_sample_and_write_back_without_sync() -> None:
    _, gpu = pair(50, "device")
    generator = seeded()
    for spec in SPECS:
        out = gpu.make_batch(spec)
        latent = torch.rand(8, 5, 3, device="cuda")
        gpu.sample(spec, generator=generator, out=out)
        with no_host_sync():
            gpu.sample(spec, generator=generator, out=out)
            gpu.write_back(out.index, {"latent": latent}, offset=spec.context)
            gpu.add(counter_rows(2, gpu.total_rows))


def test_prioritized_padding_without_sync() -> None:
    gpu = PrioritizedReplay(COLUMNS, capacity=64, num_streams=2, device="cuda", storage="device")
    spec = BatchSpec(size=8, length=5, boundary="pad", sampler="prioritized", least=2)
    out = gpu.make_batch(spec)
    extend(gpu, 50, episode=9)
    generator = seeded()
    gpu.sample(spec, generator=generator, out=out)
    with no_host_sync():
        gpu.sample(spec, generator=generator, out=out)
    stream, position = out.index.stream.cpu().numpy(), out.index.position.cpu().numpy()
    expected = gpu.ring.episode_mask(stream, position, spec.rows, 0)
    assert torch.equal(out.mask.cpu(), torch.from_numpy(expected)) and not expected.all()


def test_write_back_skips_overwritten_rows() -> None:
    _, gpu = pair(40, "device")
    spec = BatchSpec(size=64, length=6)
    batch = gpu.sample(spec, generator=seeded())
    extend(gpu, 32)
    before = gpu.read(40, 32)["latent"].clone()
    gpu.write_back(batch.index, {"latent": torch.full((64, 6, 3), 500.0, device="cuda")}, offset=0)
    assert torch.equal(gpu.read(40, 32)["latent"], before)


@pytest.mark.parametrize("mixed", [False, True])
def test_prefetch_matches_direct(mixed: bool) -> None:
    cpu, gpu = pair(40, "host")
    spec = BatchSpec(size=8, length=5)
    source, reference = gpu, cpu
    if mixed:
        other, twin = pair(30, "host")
        source, reference = (
            BufferMix({"a": (gpu, 1), "b": (twin, 1)}),
            BufferMix({"a": (cpu, 1), "b": (other, 1)}),
        )
    stream = BatchStream(source, spec, seeded(5), prefetch=1)
    direct = BatchStream(reference, spec, seeded(5))
    addresses = [value.data_ptr() for value in stream.batch.columns.values()]
    for _ in range(20):
        expected = direct.next()
        served = stream.next()
        torch.cuda._sleep(1_000_000)  # the consumer is still busy with this batch …
        total = served["obs/count"].sum()
        stream.prefetch_next()  # … while the next one arrives
        assert same(expected, served) and int(total) == int(expected["obs/count"].sum())
    assert [value.data_ptr() for value in stream.batch.columns.values()] == addresses


@pytest.mark.parametrize("storage", ["device", "host"])
def test_gpu_checkpoint_restores_on_cpu(tmp_path: Path, storage: str) -> None:
    cpu, gpu = pair(75, storage)
    fresh, _ = pair(0, storage)
    fresh.restore(tmp_path, gpu.checkpoint(tmp_path))
    assert same(cpu.read(43, 32), fresh.read(43, 32))


def test_auto_storage_uses_host() -> None:
    small = counter_buffer(0, device="cuda")
    assert small.storage_device.type == "cuda"
    free, _ = torch.cuda.mem_get_info()
    rows = int(0.6 * free / small.bytes_per_row)
    large = counter_buffer(0, device="cuda", per_stream=rows // 2)
    assert large.on_host and "pinned" in large.describe()
