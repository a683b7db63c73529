"""Time of one Dreamer update: 16×64 steps of 64×64×3 images, 17 actions, including replay and write-back.

    rl-lab bench dreamer --size 1m,12m,50m,200m
    rl-lab bench dreamer --version v1,v2,2023,2024,today       # each at about 12 million parameters, ratio to today's

Each size is built as in training (config, parts, optimizer, replay, hook runner with capture); the rows are
random. Times are medians of single updates with a synchronization after each. `first_update_s` is from
building the parts to the end of the first update, `captured_s` to the end of the first replayed graph.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.build import assemble_workflow, build_buffers
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.errors import require_choice
from rl_lab.orchestration.collector import ActRunner
from rl_lab.orchestration.diagnostics import print_kernels
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec
from rl_lab.utils.device import resolve_device

ROWS_PER_STREAM = 600
STREAMS = 16
ACTIONS = 17  # as in the measurements of other implementations


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="rl-lab bench dreamer", description="time of one Dreamer update")
    parser.add_argument("--size", default="12m", help="one or several sizes, separated by commas")
    parser.add_argument("--version", help=f"versions at equal size, by commas: {', '.join(VERSIONS)}")
    parser.add_argument(
        "--tiny", action="store_true", help="smallest networks in place of --size, as a smoke test"
    )
    parser.add_argument("--precision", default="auto", help="training.precision, for all versions")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--batch", default="16x64", help="sequences x steps")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--eager", action="store_true", help="without capture")
    parser.add_argument("--plain", action="store_true", help="without fused kernels (training.fast_path=off)")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    if options.version:
        return measure_versions(options.version.split(","), options)
    for size in ["tiny"] if options.tiny else options.size.split(","):
        rows += measure(size, [f"size={size}"], options)
    return rows


# At about 12 million parameters, with the same batch: V1 and V2 have widths between theirs and those of 2023.
SIZE_2023 = "{deter: 512, hidden: 352, stoch: 32, classes: 32, blocks: 1, depth: 20, units: 352, bins: 255, layers: 2}"
SIZE_V2 = "{deter: 400, hidden: 400, stoch: 32, classes: 32, blocks: 1, depth: 32, units: 400, bins: 0}"
SIZE_V1 = "{deter: 600, hidden: 600, stoch: 64, classes: 1, blocks: 1, depth: 36, units: 400, bins: 0}"
VERSIONS: dict[str, tuple[str, list[str]]] = {  # the word for the size, and the others
    "v1": (f"algorithm.size={SIZE_V1}", ["algorithm=dreamer_v1", "controllers.actor.gradient=dynamics"]),
    "v2": (f"algorithm.size={SIZE_V2}", ["algorithm=dreamer_v2"]),
    "2023": (f"algorithm.size={SIZE_2023}", ["algorithm=dreamer_2023"]),
    "2024": ("size=12m", ["algorithm=dreamer_2024"]),
    "today": ("size=12m", ["algorithm=dreamer"]),
}


def measure_versions(names: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every version, and its time relative to today's."""
    for name in names:
        require_choice("--version", name, VERSIONS)
    rows: list[dict[str, Any]] = []
    times: dict[str, float] = {}
    for name in dict.fromkeys([*names, "today"]):
        size, words = VERSIONS[name]
        optimizer = [] if name in ("2024", "today") else ["~optimizers.model.warmup"]
        found = measure(name, [*words, "size=tiny" if options.tiny else size, *optimizer], options)
        times[name] = found[0]["value"]
        rows += found
    return rows + [
        {"name": f"dreamer/{name}/times_today", "value": times[name] / times["today"], "unit": "x"}
        for name in times
    ]


def measure(label: str, words: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Build one size or version and time its updates and its acting."""
    start = time.perf_counter()
    device = resolve_device(options.device)
    spec = Spec("bench", {"image": ArraySpec((3, 64, 64), "uint8")}, ActionSpec("discrete", (), (ACTIONS,)))
    batch_size, batch_length = options.batch.split("x")
    words = [
        *words,
        f"training.precision={options.precision}",
        f"experiment.device={device}",
        f"environment.num_envs={STREAMS}",
    ]
    words += [f"algorithm.batch_size={batch_size}", f"algorithm.batch_length={batch_length}"]
    words += ["algorithm.imagination_horizon=15", "algorithm.imagination_last=0"]
    words += [f"training.fast_path={'off' if options.plain else 'auto'}"]
    rows_per_stream = 60 if options.tiny else ROWS_PER_STREAM
    words += [f"buffers.replay.capacity={STREAMS * rows_per_stream}"]
    config = resolve_config(compose_config(words), spec)
    workflow = assemble_workflow(config, spec, device)
    buffer = build_buffers(config, spec, workflow.policy_columns(), device)["replay"]
    fill(buffer, rows_per_stream)
    hook = workflow.hooks()["update"]
    generator = torch.Generator(device).manual_seed(0)
    runner = HookRunner("update", hook, device=device, generator=generator, capture=not options.eager)
    stream = BatchStream(buffer, hook.batch, torch.Generator().manual_seed(0), device=device)

    def update() -> float:
        begin = time.perf_counter()
        runner.run(stream, {"progress": 0.0}, {"updates": 0}, key=None)
        wait(device)
        return (time.perf_counter() - begin) * 1000

    update()
    first = time.perf_counter() - start
    for _ in range(runner.capture.eager_calls):
        update()
    captured = time.perf_counter() - start
    times = [update() for _ in range(options.updates)]
    if options.profile:
        print_kernels(update)
    name = f"dreamer/{label}"
    rows = [
        {"name": f"{name}/update_ms", "value": statistics.median(times), "unit": "ms"},
        {"name": f"{name}/first_update_s", "value": first, "unit": "s"},
        {"name": f"{name}/captured_s", "value": captured, "unit": "s"},
        {
            "name": f"{name}/act_16_ms",
            "value": act_time(workflow, device, options.updates, capture=not options.eager),
            "unit": "ms",
        },
        {"name": f"{name}/parameters", "value": workflow.context.count_parameters(), "unit": "parameters"},
    ]
    if device.type == "cuda":
        rows.append(
            {"name": f"{name}/peak_gib", "value": torch.cuda.max_memory_allocated() / 2**30, "unit": "GiB"}
        )
        torch.cuda.reset_peak_memory_stats()
    return rows


def fill(buffer: Any, rows_per_stream: int) -> None:
    """Random rows; an episode starts every 200 rows."""
    generator = torch.Generator().manual_seed(0)
    for step in range(rows_per_stream):
        row: dict[str, Any] = {}
        for name, spec in buffer.columns.items():
            shape = (STREAMS, *spec.shape)
            if name == "obs/image":
                row[name] = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
            elif name == "action":
                row[name] = torch.randint(ACTIONS, shape, generator=generator)
            elif name == "is_first":
                row[name] = torch.full(shape, step % 200 == 0)
            else:
                row[name] = torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        buffer.add(row)


def act_time(workflow: Any, device: torch.device, repeats: int, *, capture: bool) -> float:
    """Time acting for 16 environments, including the transfers of observations and actions."""
    runner = ActRunner(workflow, device=device, capture=capture)
    mode = ActMode(generator=torch.Generator(device).manual_seed(0))
    obs = {"image": np.random.default_rng(0).integers(0, 256, (STREAMS, 3, 64, 64), dtype=np.uint8)}
    first = np.zeros(STREAMS, dtype=bool)
    state, times = None, []
    for _ in range(repeats + 6):
        begin = time.perf_counter()
        _, state, _, _ = runner(obs, state, first, mode)
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times[6:])


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
