"""Time of one update of each part of IRIS and Δ-IRIS with the originals' batch shapes.

    rl-lab bench iris --case delta_crafter,delta_atari,iris

Each case is built as in training (config, parts, optimizers, hook runner with capture); the rows are random.
Times are medians of single calls with a synchronization after each. IRIS' tokenizer is timed with the
perceptual loss on VGG16 features with random weights, as the original's time includes it. `first_step_s` is
from the start of the process to the first update of every part that is replayed from its graph. `parity`
compares captured with eager calls of a float32
copy: the largest relative difference of a loss over five updates.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import psutil
import torch

from rl_lab.build import assemble_workflow
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.orchestration.diagnostics import print_kernels
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActionSpec, ArraySpec, Batch, BatchSpec, Spec
from rl_lab.utils.device import asks_for_tensor_float, resolve_device

PARTS = ("tokenizer", "world_model", "actor_critic")
PERCEPTUAL = "+components/reconstruction_loss@components.tokenizer.losses.perceptual=perceptual"
# experiment, actions, more words
CASES: dict[str, tuple[str, int, list[str]]] = {
    "delta_crafter": ("delta_iris_crafter", 17, []),
    "delta_atari": ("delta_iris_atari100k", 4, []),
    "iris": ("iris_atari100k", 4, [PERCEPTUAL]),
}


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="rl-lab bench iris", description="time of one update of each part")
    parser.add_argument("--case", default=",".join(CASES), help="one or several cases, separated by commas")
    parser.add_argument("--updates", type=int, default=30, help="timed calls per part")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--tiny", action="store_true", help="smallest networks and batches, as a smoke test")
    parser.add_argument("--eager", action="store_true", help="without capture")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update of each part")
    parser.add_argument("--no-parity", action="store_true", help="skip the comparison with eager calls")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(options.case.split(",")):
        if name not in CASES:
            parser.error(f"--case {name}: there is no such case; choose from {', '.join(CASES)}")
        rows += measure(name, options, first=number == 0)
    return rows


def measure(name: str, options: argparse.Namespace, *, first: bool) -> list[dict[str, Any]]:
    """Build one case and time an update of each of its parts."""
    device = resolve_device(options.device)
    case = Case(name, options, device, capture=not options.eager)
    for part in PARTS:
        case.updates(part, case.runners[part].capture.eager_calls + 1)
    ready = time.time() - psutil.Process().create_time()
    rows = []
    for part in PARTS:
        rows.append(
            row(f"iris/{name}/{part}_ms", statistics.median(case.updates(part, options.updates)), "ms")
        )
        if options.profile:
            print(f"{name}, {part}:")
            print_kernels(partial(case.updates, part, 1), most=25)
        rows.append(row(f"iris/{name}/{part}_parameters", case.parameters[part], "parameters"))
    if first:
        rows.append(row("iris/first_step_s", ready, "s"))
    if device.type == "cuda":
        rows.append(row(f"iris/{name}/peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB"))
        torch.cuda.reset_peak_memory_stats()
    return rows if options.no_parity else rows + parity(name, options, device)


class Case:
    """One workflow whose updates run through hook runners with a fixed batch."""

    def __init__(
        self,
        name: str,
        options: argparse.Namespace,
        device: torch.device,
        *,
        capture: bool,
        exact: bool = False,
    ) -> None:
        experiment, actions, more = CASES[name]
        observations = {"image": ArraySpec((3, 64, 64), "uint8")}
        spec = Spec("bench", observations, ActionSpec("discrete", (), (actions,)))
        words = [f"experiment={experiment}", f"experiment.device={device}", *more]
        words += ["debug=tiny"] if options.tiny else []
        words += ["components.tokenizer.losses.perceptual.width=2"] if options.tiny and more else []
        words += [f"training.precision={'float32' if exact else options.precision}"]
        config = resolve_config(compose_config(words), spec)
        workflow = assemble_workflow(config, spec, device)
        self.device = device
        hooks = workflow.hooks()
        self.runners, self.streams = {}, {}
        for part in PARTS:
            hook = hooks[f"update_{part}"]
            generator = torch.Generator(device).manual_seed(0)
            self.runners[part] = HookRunner(
                part,
                hook,
                device=device,
                generator=generator,
                capture=capture,
                tensor_float=asks_for_tensor_float(config.training.precision),
            )
            self.streams[part] = SameBatch(random_rows(hook.batch, actions, device))
        self.parameters = {
            part: sum(p.numel() for p in getattr(workflow, part).parameters() if p.requires_grad)
            for part in PARTS
        }

    def updates(self, part: str, count: int) -> list[float]:
        """Return the milliseconds of each of `count` updates."""
        times = []
        phase: dict[str, Any] = {"progress": 0.0, "set": {}}
        for _ in range(count):
            begin = time.perf_counter()
            self.runners[part].run(self.streams[part], phase, {"updates": 0}, key=None)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append((time.perf_counter() - begin) * 1000)
        return times


class SameBatch:
    """Replaces a stream from replay with a fixed batch."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def next(self) -> Batch:
        return self.batch

    def prefetch_next(self) -> None:
        """Do nothing: the batch is fixed."""


def random_rows(spec: BatchSpec, actions: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (spec.size, spec.rows)
    no = torch.zeros(shape, dtype=torch.bool)
    columns = {
        "obs/image": torch.randint(0, 256, (*shape, 3, 64, 64), generator=generator).to(torch.uint8),
        "action": torch.randint(actions, shape, generator=generator),
        "reward": torch.randint(-1, 2, shape, generator=generator).float(),
        "terminated": no,
        "is_first": no.clone(),
    }
    mask = None if spec.boundary == "within" else (~no).to(device)
    return Batch({name: value.to(device) for name, value in columns.items()}, mask=mask)


def parity(name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Compare five updates of each part, captured and eager, from the same state and random numbers."""
    found: list[dict[str, list[float]]] = []
    for capture in (True, False):
        case = Case(name, options, device, capture=capture, exact=True)
        losses: dict[str, list[float]] = {}
        for part in PARTS:
            losses[part] = []
            for _ in range(5):
                case.updates(part, 1)
                losses[part].append(case.runners[part].meter.drain()["loss"])
        found.append(losses)
    rows = []
    for part in PARTS:
        pairs = zip(found[0][part], found[1][part])
        rows.append(
            row(
                f"iris/{name}/{part}_parity",
                max(abs(a - b) / max(abs(b), 1e-6) for a, b in pairs),
                "relative",
            )
        )
    return rows


def row(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}
