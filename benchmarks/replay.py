"""Time of sampling a batch from replay, compared with one memcpy of the same bytes and with TorchRL.

16 sequences of 65 steps of 64×64×3 uint8 images (with action, reward and flags) from 200,000 stored steps.

There are two comparisons: with the memcpy and with TorchRL. In each, all contenders are called once per
round, in turn, so that each finds the caches as the others left them, and the medians over all rounds are
compared. (After a call of TorchRL sampling takes longer, because the caches hold other data:
`sample_after_torchrl_ms`.) The memcpy reads another block of the stored images each time (the blocks together
are as large as the replay, far larger than any cache) and, like sampling, writes to one fixed block. Sampling
includes drawing the indices and every column, not only images. TorchRL allocates its result, as in normal
use. On CUDA the rows are on the device, times are measured with CUDA events, and the memcpy is on the device.

    rl-lab bench replay [--steps 200000] [--rounds 100] [--device auto] [--no-torchrl] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec

BATCH, LENGTH, CONTEXT = 16, 64, 1
STREAMS = 16
EPISODE = 500  # rows
IMAGE = (3, 64, 64)

Row = dict[str, Any]


def run(argv: list[str]) -> list[Row]:
    """Return rows of name, value, unit."""
    parser = argparse.ArgumentParser(prog="rl-lab bench replay", description="time of sampling a batch")
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--no-torchrl", dest="torchrl", action="store_false")
    chosen = vars(parser.parse_args(argv))
    if chosen["device"] == "auto":
        chosen["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(chosen["device"])
    spec = BatchSpec(size=BATCH, length=LENGTH, context=CONTEXT)
    buffer = filled_buffer(chosen["steps"], IMAGE, device)
    out = buffer.make_batch(spec)
    generator = torch.Generator().manual_seed(0)
    batch_bytes = sum(value.nbytes for value in out.columns.values())
    rows = buffer.read(buffer.oldest_position, buffer.size // buffer.num_streams).columns

    contenders: dict[str, Callable[[int], Any]] = {
        "replay/memcpy_ms": memcpy(rows["obs/image"], batch_bytes),
        "replay/sample_ms": lambda _: buffer.sample(spec, generator=generator, out=out),
    }
    if device.type == "cuda":
        contenders["replay/memcpy_from_pinned_ms"] = memcpy_from_pinned(batch_bytes, device)
    milliseconds = race(contenders, int(chosen["rounds"]), device)
    if chosen["torchrl"]:
        again = {"replay/sample_after_torchrl_ms": contenders["replay/sample_ms"]}
        milliseconds |= race(torchrl_samplers(rows, spec) | again, int(chosen["rounds"]), device)

    results: list[Row] = [
        {"name": name, "value": value, "unit": "ms"} for name, value in milliseconds.items()
    ]
    ratio = milliseconds["replay/sample_ms"] / milliseconds["replay/memcpy_ms"]
    results.append({"name": "replay/sample_over_memcpy", "value": ratio, "unit": "x"})
    results.append({"name": "replay/bytes_per_step", "value": buffer.bytes_per_row, "unit": "bytes"})
    results.append({"name": "replay/bytes_per_batch", "value": batch_bytes, "unit": "bytes"})
    results.append({"name": "replay/stored_steps", "value": buffer.size, "unit": "steps"})
    results.append({"name": "replay/threads", "value": torch.get_num_threads(), "unit": "threads"})
    return results


def filled_buffer(steps: int, image: tuple[int, ...], device: torch.device) -> ReplayBuffer:
    """Return a full buffer: noise as images, episodes of 500 rows."""
    spec = Spec("bench", {"image": ArraySpec(image, "uint8")}, ActionSpec("discrete", (), choices=(17,)))
    buffer = ReplayBuffer(
        spec.row_columns(), capacity=steps, num_streams=STREAMS, device=device, storage="device"
    )
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (STREAMS, EPISODE, *image), dtype=np.uint8)
    lead = (STREAMS, EPISODE)
    while buffer.size < buffer.capacity:
        ends = np.zeros(lead, dtype=bool)
        ends[:, -1] = True
        buffer.add(
            {
                "obs/image": noise,
                "action": rng.integers(0, 17, lead),
                "reward": rng.random(lead, dtype=np.float32),
                "terminated": ends,
                "truncated": np.zeros(lead, dtype=bool),
                "is_first": np.roll(ends, 1, axis=1),
            }
        )
    return buffer


def memcpy(stored: torch.Tensor, size: int) -> Callable[[int], Any]:
    """Copy the bytes of a batch from changing blocks of the stored images to one fixed block."""
    blocks = stored.view(-1)[: stored.numel() // size * size].view(-1, size)
    target = torch.empty_like(blocks[0])
    return lambda turn: target.copy_(blocks[turn * 37 % len(blocks)])


def memcpy_from_pinned(size: int, device: torch.device) -> Callable[[int], Any]:
    """Time of a batch that is transferred from the host."""
    source = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    return lambda turn: target.copy_(source, non_blocking=True)


def torchrl_samplers(rows: Mapping[str, torch.Tensor], spec: BatchSpec) -> dict[str, Callable[[int], Any]]:
    """TorchRL's slices of the same rows, within episodes, with and without cached episode boundaries."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    streams, held = rows["reward"].shape
    storage = LazyTensorStorage(streams * held, device=rows["reward"].device)
    plain, cached = (
        TensorDictReplayBuffer(
            storage=storage,
            sampler=SliceSampler(slice_len=spec.rows, end_key="done", cache_values=cache),
            batch_size=spec.size * spec.rows,
        )
        for cache in (False, True)
    )
    for stream in range(streams):
        row = {name.removeprefix("obs/"): value[stream] for name, value in rows.items()}
        done = row["terminated"] | row["truncated"]
        done[-1] = True  # the next row of their flat storage belongs to another environment
        plain.extend(TensorDict({**row, "done": done[:, None]}, batch_size=[held]))
    return {
        "replay/torchrl_slice_ms": lambda _: plain.sample(),
        "replay/torchrl_slice_cached_ms": lambda _: cached.sample(),
    }


def race(
    contenders: Mapping[str, Callable[[int], Any]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Return the median milliseconds of each contender, called in turn."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 3):
        for name, call in contenders.items():
            spent = _cuda_time(call, turn) if device.type == "cuda" else _cpu_time(call, turn)
            if turn >= 3:  # the first rounds allocate and fill caches
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


def _cpu_time(call: Callable[[int], Any], turn: int) -> float:
    begin = time.perf_counter()
    call(turn)
    return 1e3 * (time.perf_counter() - begin)


def _cuda_time(call: Callable[[int], Any], turn: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call(turn)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
