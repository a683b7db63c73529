"""Time of one TD-MPC2 update and one plan: 223 observations, 38 actions (dog), batch 256, horizon 3.

    rl-lab bench tdmpc --size 5m

Each size is built as in training (config, parts, optimizers, replay, hook runner with capture); the rows are
random. A plan is acting as in training (ActRunner): transfer of observations, graph replay with new random
numbers, transfer of actions. Times are medians of single calls with a synchronization after each.
`first_step_s` is from the process start to the first update and the first plan for one environment that are
replayed from their graphs. `parity` compares captured with eager calls of a float32 copy: the largest
relative difference of a loss over eight updates, and the largest difference of an action.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import psutil
import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.build import assemble_workflow, build_buffers
from rl_lab.config.compose import compose_config, resolve_config
from rl_lab.orchestration.collector import EAGER_CALLS, ActRunner
from rl_lab.orchestration.diagnostics import print_kernels
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec
from rl_lab.utils.device import asks_for_tensor_float, resolve_device

ROWS = 2000
EPISODE = 500


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="rl-lab bench tdmpc", description="time of one TD-MPC2 update and plan"
    )
    parser.add_argument("--size", default="5m", help="one or several sizes, separated by commas")
    parser.add_argument("--observations", type=int, default=223)
    parser.add_argument("--actions", type=int, default=38)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--envs", default="1,16", help="numbers of environments to plan for")
    parser.add_argument("--updates", type=int, default=50, help="timed calls per measurement")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--plain", action="store_true", help="without fused kernels (training.fast_path=off)")
    parser.add_argument("--eager", action="store_true", help="without capture")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one update and one plan")
    parser.add_argument("--no-parity", action="store_true", help="skip the comparison with eager calls")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(options.size.split(",")):
        rows += measure(size, options, first=number == 0)
    return rows


def measure(size: str, options: argparse.Namespace, *, first: bool) -> list[dict[str, Any]]:
    """Build one size and time its updates and its plans."""
    device = resolve_device(options.device)
    name = f"tdmpc2/{size}"
    case = Case(size, options, device, capture=not options.eager)
    case.updates(case.runner.capture.eager_calls + 1)
    planners = [PlanRunner(case, n, capture=not options.eager) for n in map(int, options.envs.split(","))]
    ready = 0.0
    for planner in planners:
        planner.calls(EAGER_CALLS + 1)
        ready = ready or time.time() - psutil.Process().create_time()
    rows = [row(f"{name}/update_ms", statistics.median(case.updates(options.updates)), "ms")]
    for planner in planners:
        rows.append(
            row(f"{name}/plan_{planner.n}_ms", statistics.median(planner.calls(options.updates)), "ms")
        )
    if options.profile:
        print_kernels(lambda: case.updates(1))
        print_kernels(planners[0].call)
    rows.append(row(f"{name}/parameters", case.parameters, "parameters"))
    if first:
        rows.append(row(f"{name}/first_step_s", ready, "s"))
    if device.type == "cuda":
        rows.append(row(f"{name}/peak_gib", torch.cuda.max_memory_allocated() / 2**30, "GiB"))
        torch.cuda.reset_peak_memory_stats()
    if not options.no_parity:
        rows += parity(name, size, options, device)
    return rows


class Case:
    """One workflow with filled replay whose update runs through a hook runner."""

    def __init__(
        self,
        size: str,
        options: argparse.Namespace,
        device: torch.device,
        *,
        capture: bool,
        exact: bool = False,
    ) -> None:
        spec = Spec(
            "bench",
            {"vector": ArraySpec((options.observations,), "float32")},
            ActionSpec("continuous", (options.actions,)),
        )
        words = ["experiment=tdmpc2_dmc_state", f"size={size}", f"experiment.device={device}"]
        words += [f"algorithm.batch_size={options.batch}", f"algorithm.horizon={options.horizon}"]
        words += [f"algorithm.plan.samples={options.samples}"]
        words += [f"training.fast_path={'off' if options.plain else 'auto'}"]
        words += [f"algorithm.plan.elites={min(64, options.samples // 2)}"]
        words += [f"algorithm.plan.policy_samples={min(24, options.samples // 4)}"]
        words += [f"buffers.replay.capacity={ROWS}", "environment.num_envs=1"]
        words += [f"training.precision={'float32' if exact else options.precision}"]
        config = resolve_config(compose_config(words), spec)
        self.workflow = assemble_workflow(config, spec, device)
        self.device = device
        self.options = options
        buffer = build_buffers(config, spec, self.workflow.policy_columns(), device)["replay"]
        fill(buffer)
        hook = self.workflow.hooks()["update"]
        generator = torch.Generator(device).manual_seed(0)
        self.runner = HookRunner(
            "update",
            hook,
            device=device,
            generator=generator,
            capture=capture,
            tensor_float=asks_for_tensor_float(config.training.precision),
        )
        self.stream = BatchStream(buffer, hook.batch, torch.Generator().manual_seed(0), device=device)
        self.parameters = self.workflow.context.count_parameters()

    def updates(self, count: int) -> list[float]:
        """Return the milliseconds of each of `count` updates."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.runner.run(self.stream, {"progress": 0.0}, {"updates": 0}, key=None)
            wait(self.device)
            times.append((time.perf_counter() - begin) * 1000)
        return times


class PlanRunner:
    """Acting for n environments as in training: send observations, replay the graph, fetch actions."""

    def __init__(self, case: Case, n: int, *, capture: bool) -> None:
        self.n = n
        numbers = np.random.default_rng(n)
        self.obs = {"vector": numbers.standard_normal((n, case.options.observations), dtype=np.float32)}
        self.first = np.zeros(n, dtype=bool)
        self.state: Any = None
        self.mode = ActMode(generator=torch.Generator(case.device).manual_seed(0))
        self.runner = ActRunner(case.workflow, device=case.device, capture=capture)

    def call(self) -> np.ndarray:
        action, self.state, _, _ = self.runner(self.obs, self.state, self.first, self.mode)
        return action  # the runner has synchronized with the device

    def calls(self, count: int) -> list[float]:
        """Return the milliseconds of each of `count` plans."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.call()
            times.append((time.perf_counter() - begin) * 1000)
        return times


def parity(name: str, size: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Compare eight updates and plans, captured and eager, from the same state and random numbers."""
    losses, actions = [], []
    for capture in (True, False):
        case = Case(size, options, device, capture=capture, exact=True)
        seen = []
        for _ in range(8):
            case.updates(1)
            metrics = case.runner.meter.drain()
            seen.append([metrics["loss"], metrics["controller/loss"]])
        losses.append(torch.tensor(seen, dtype=torch.float64))
        planner = PlanRunner(case, 2, capture=capture)
        actions.append(np.stack([planner.call() for _ in range(8)]))
    difference = ((losses[0] - losses[1]).abs() / losses[1].abs().clamp(min=1e-6)).max()
    return [
        row(f"{name}/parity_loss", difference.item(), "relative"),
        row(f"{name}/parity_action", float(np.abs(actions[0] - actions[1]).max()), "of 2"),
    ]


def fill(buffer: Any) -> None:
    """Random rows; an episode starts every 500 rows."""
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, Any] = {}
    for name, spec in buffer.columns.items():
        shape = (1, ROWS, *spec.shape)
        if spec.dtype == "bool":
            rows[name] = torch.zeros(shape, dtype=torch.bool)
        else:
            rows[name] = torch.randn(shape, generator=generator).clamp(-1.0, 1.0)
    rows["is_first"][:, ::EPISODE] = True
    buffer.add(rows)


def row(name: str, value: float, unit: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
