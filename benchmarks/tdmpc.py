"""What one TD-MPC2 update and one plan cost: 223 observations, 38 actions (dog), batch 256, horizon 3.

    rl-lab bench tdmpc --size 5m

Each size is built as training builds it (config, parts, optimizers, replay, hook runner with capture); the rows are random.
A plan is `workflow.act_step`, captured as the update is, with its random numbers drawn, the observation sent and the action
fetched. Times are medians of single calls, each waited for. `first_step_s` is from the start of the process to the
first update and the first plan for one environment that are replayed from their graphs. `parity` compares captured
with eager calls of a float32 copy: the largest relative difference of a loss over eight updates, and the largest
difference of an action.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import psutil
import torch

from rl_lab.buffers.stream import BatchStream
from rl_lab.build import build_buffers, build_optimizers, build_parts, build_workflow
from rl_lab.compose import compose_config, resolve_config
from rl_lab.launch.runtime import resolve_device
from rl_lab.orchestration.capture import Capture
from rl_lab.orchestration.hook_runner import HookRunner
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec
from rl_lab.workflows.context import WorkflowContext

ROWS = 2000
EPISODE = 500


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="rl-lab bench tdmpc", description="time of one TD-MPC2 update and plan"
    )
    parser.add_argument("--size", default="5m", help="one or several of the sizes, by commas")
    parser.add_argument("--observations", type=int, default=223)
    parser.add_argument("--actions", type=int, default=38)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--horizon", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--envs", default="1,16", help="numbers of environments to plan for")
    parser.add_argument("--updates", type=int, default=50, help="timed calls of each")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--compile", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--eager", action="store_true", help="without capture")
    parser.add_argument("--no-parity", action="store_true", help="leave out the comparison with eager calls")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for number, size in enumerate(options.size.split(",")):
        rows += measure(size, options, first=number == 0)
    return rows


def measure(size: str, options: argparse.Namespace, *, first: bool) -> list[dict[str, Any]]:
    """Build one size, time its updates and its plans."""
    device = resolve_device(options.device)
    name = f"tdmpc2/{size}"
    case = Case(size, options, device, capture=not options.eager)
    case.updates(case.runner.capture.eager_calls + 1)
    planners = [PlanRunner(case, n, capture=not options.eager) for n in map(int, options.envs.split(","))]
    ready = 0.0
    for planner in planners:
        planner.calls(planner.capture.eager_calls + 1)
        ready = ready or time.time() - psutil.Process().create_time()
    rows = [row(f"{name}/update_ms", statistics.median(case.updates(options.updates)), "ms")]
    for planner in planners:
        rows.append(
            row(f"{name}/plan_{planner.n}_ms", statistics.median(planner.calls(options.updates)), "ms")
        )
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
    """One workflow with filled replay, its update behind a hook runner."""

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
        words = ["experiment=tdmpc2_dmc_state", f"tdmpc_size={size}", f"experiment.device={device}"]
        words += [f"algorithm.batch_size={options.batch}", f"algorithm.horizon={options.horizon}"]
        words += [f"algorithm.plan.samples={options.samples}", f"algorithm.compile={options.compile}"]
        words += [f"algorithm.plan.elites={min(64, options.samples // 2)}"]
        words += [f"algorithm.plan.policy_samples={min(24, options.samples // 4)}"]
        words += [f"buffers.replay.capacity={ROWS}", "environment.num_envs=1"]
        words += [f"training.precision={'float32' if exact else options.precision}"]
        config = resolve_config(compose_config(words), spec)
        components, controllers = build_parts(config, spec, device)
        context = WorkflowContext(
            config=config,
            device=device,
            spec=spec,
            components=components,
            controller_manager=controllers,
            optimizers=build_optimizers(config, components, controllers),
        )
        self.workflow = build_workflow(config)
        self.workflow.attach(context)
        self.workflow.initialize(context)
        self.device = device
        self.options = options
        buffer = build_buffers(config, spec, self.workflow.policy_columns(), device)["replay"]
        fill(buffer)
        hook = self.workflow.hooks()["update"]
        generator = torch.Generator(device).manual_seed(0)
        self.runner = HookRunner("update", hook, device=device, generator=generator, capture=capture)
        self.stream = BatchStream(buffer, hook.batch, torch.Generator().manual_seed(0), device=device)
        modules = [components, *(module for _, module in controllers.modules())]
        self.parameters = sum(p.numel() for module in modules for p in module.parameters())

    def updates(self, count: int) -> list[float]:
        """Milliseconds of each of `count` updates."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.runner.run(self.stream, {"progress": 0.0}, {"updates": 0}, key=None)
            wait(self.device)
            times.append((time.perf_counter() - begin) * 1000)
        return times


class PlanRunner:
    """`act_step` for n environments, at fixed addresses, captured."""

    def __init__(self, case: Case, n: int, *, capture: bool) -> None:
        workflow, device = case.workflow, case.device
        self.n, self.device, self.workflow = n, device, workflow
        host = torch.randn(n, case.options.observations, generator=torch.Generator().manual_seed(n))
        self.host = host.pin_memory() if device.type == "cuda" else host
        self.obs = {"vector": host.to(device)}
        self.state = workflow.initial_policy_state(n)
        self.is_first = torch.zeros(n, dtype=torch.bool, device=device)
        self.specs = workflow.act_noise(n)
        self.noise = {name: torch.empty(spec.shape, device=device) for name, spec in self.specs.items()}
        numbers = workflow.act_scalars(ActMode())
        self.scalars = {name: torch.tensor(value, device=device) for name, value in numbers.items()}
        self.generator = torch.Generator(device).manual_seed(0)
        self.capture = Capture(self._step, device=device, enabled=capture)

    def _step(self, obs: Any, state: Any, is_first: Any, noise: Any, scalars: Any) -> torch.Tensor:
        action, after, _ = self.workflow.act_step(obs, state, is_first, noise, scalars)
        for name, value in after.items():
            state[name].copy_(value)
        return action

    @torch.no_grad()
    def call(self) -> torch.Tensor:
        self.obs["vector"].copy_(self.host, non_blocking=True)
        for name, spec in self.specs.items():
            draw = self.noise[name].normal_ if spec.kind == "normal" else self.noise[name].uniform_
            draw(generator=self.generator)
        action: torch.Tensor = self.capture(self.obs, self.state, self.is_first, self.noise, self.scalars)
        return action.cpu()  # waits for the device

    def calls(self, count: int) -> list[float]:
        """Milliseconds of each of `count` plans."""
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            self.call()
            times.append((time.perf_counter() - begin) * 1000)
        return times


def parity(name: str, size: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Eight updates and eight plans, captured and eager, from the same start with the same random numbers."""
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
        actions.append(torch.stack([planner.call() for _ in range(8)]))
    difference = ((losses[0] - losses[1]).abs() / losses[1].abs().clamp(min=1e-6)).max()
    return [
        row(f"{name}/parity_loss", difference.item(), "relative"),
        row(f"{name}/parity_action", (actions[0] - actions[1]).abs().max().item(), "of 2"),
    ]


def fill(buffer: Any) -> None:
    """Random rows; an episode begins every 500."""
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
