"""Overhead of the training loop: time of one action when collecting and updating do nothing.

Scheduler, orchestrator, hook runner, the eager path of capture, meters and log lines are real; environment,
algorithm, buffer and files are stubs that return immediately.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from time import perf_counter
from typing import Any

import torch

from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import Cadences, Every, HookInfo, parse_phases
from rl_lab.orchestration.run_log import RunLog
from rl_lab.orchestration.run_state import RunState
from rl_lab.orchestration.updates import HookRunner
from rl_lab.records import CollectResult, Hook, UpdateResult
from rl_lab.utils.metrics import Stopwatch

ENVS = 8  # steps of one collect
ROWS: dict[str, Any] = {"reward": None}
METRICS = {f"metric_{number}": torch.zeros(()) for number in range(16)}  # metrics of one update

# Two hooks per cycle, one scheduled by a ratio, one rare: all ways to schedule a hook are covered.
PHASES = [
    {
        "name": "joint",
        "buffer": "replay",
        "workflow_hooks": [
            "collect",
            "update_world_model",
            {"update_controller": {"updates_per_env_step": 1 / ENVS}},
            {"update_rarely": {"every_env_steps": 4000}},
        ],
    }
]
HOOKS = ("update_world_model", "update_controller", "update_rarely")


class IdleWorkflow:
    """Stub: collects nothing."""

    def __init__(self) -> None:
        self.result = CollectResult(steps=ENVS, trajectory=ROWS)

    def collect_step(self, step: int, *, phase: Mapping[str, Any]) -> CollectResult:
        return self.result

    def finished_episodes(self) -> list[Any]:
        return []

    def get_state(self) -> dict[str, Any]:
        return {}


class IdleStorage:
    """Stub: discards rows and has no batches."""

    buffers: Mapping[str, Any] = {}

    def store(self, phase: Any, trajectory: Mapping[str, Any]) -> None:
        pass

    def stream(self, hook_name: str, phase: Any) -> None:
        return None

    def ready(self, hook_name: str, phase: Any) -> bool:
        return True

    def shortage(self, hook_name: str, phase: Any) -> str:
        return ""


class IdleLogger:
    """Stub: discards its input."""

    def scalars(self, metrics: Mapping[str, float], **counters: int) -> None:
        pass


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows: overhead per action of the complete loop, of the scheduler alone, and of its parts."""
    parser = argparse.ArgumentParser(prog="rl-lab bench loop", description=__doc__)
    parser.add_argument("--actions", type=int, default=20_000, help="per measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measurements; the median is reported")
    options = parser.parse_args(argv)
    loops = [_measure_loop(options.actions) for _ in range(options.repeats)]
    overhead = statistics.median(seconds / actions for seconds, actions, _ in loops)
    schedulers = [_measure_scheduler(options.actions) for _ in range(options.repeats)]
    rows = [
        {"name": "loop/overhead_ms_per_action", "value": 1e3 * overhead, "unit": "ms"},
        {"name": "loop/scheduler_us_per_action", "value": 1e6 * statistics.median(schedulers), "unit": "us"},
    ]
    for part in loops[0][2]:
        value = statistics.median(parts[part] for _, _, parts in loops)
        rows.append({"name": f"loop/{part}_us_per_call", "value": 1e6 * value, "unit": "us"})
    rows.append({"name": "loop/actions", "value": loops[0][1], "unit": "actions"})
    return rows


def make_loop(env_steps: int) -> Orchestrator:
    """Build a real orchestrator over stubs, with cadences that are due from time to time."""
    workflow, storage, stopwatch = IdleWorkflow(), IdleStorage(), Stopwatch()
    scheduler = _make_scheduler(env_steps, storage)
    generator = torch.Generator().manual_seed(0)
    device = torch.device("cpu")
    runners = {
        name: HookRunner(
            name,
            Hook(_no_update, scalars=_scalars),
            device=device,
            generator=generator,
            stopwatch=stopwatch,
        )
        for name in HOOKS
    }
    return Orchestrator(
        workflow=workflow,
        scheduler=scheduler,
        storage=storage,
        runners=runners,
        log=RunLog(IdleLogger(), stopwatch=stopwatch, total_steps=env_steps),
        run_state=RunState(workflow=workflow, scheduler=scheduler),
        own_collect_step=workflow.collect_step,
        cadences=Cadences(
            log=Every({"env_steps": 10_000}),
            report=Every({"env_steps": 50_000}),
            checkpoint=Every({"env_steps": 50_000}),
        ),
        say=lambda text: None,
    )


def _make_scheduler(env_steps: int, storage: IdleStorage) -> PhaseScheduler:
    phases = parse_phases(PHASES, {name: HookInfo() for name in HOOKS}, ["replay"])
    return PhaseScheduler(phases, total_timesteps=env_steps, is_ready=storage.ready)


def _no_update(batch: Any, scalars: Mapping[str, Any], noise: Mapping[str, Any]) -> UpdateResult:
    return UpdateResult(metrics=METRICS)


def _scalars(phase: Mapping[str, Any], counters: Mapping[str, int]) -> dict[str, float]:
    return {"progress": phase["progress"]}


def _env_steps(actions: int) -> int:
    """A cycle is one collect and (nearly) two updates."""
    return max(1, actions // 3) * ENVS


def _measure_loop(actions: int) -> tuple[float, int, dict[str, float]]:
    """Return the seconds of a complete run, its actions, and seconds per call of the parts."""
    loop = make_loop(_env_steps(actions))
    begin = perf_counter()
    loop.run()
    seconds = perf_counter() - begin
    done = sum(loop.scheduler.hook_calls.values())
    return seconds, done, _measure_parts(max(100, done // 10))


def _measure_scheduler(actions: int) -> float:
    """Return the seconds per action of the scheduler's next and advance alone."""
    scheduler = _make_scheduler(_env_steps(actions), IdleStorage())
    done = 0
    begin = perf_counter()
    while (action := scheduler.next_action()) is not None:
        scheduler.advance(action, steps=ENVS if action == "collect" else 0)
        done += 1
    return (perf_counter() - begin) / done


def _measure_parts(calls: int) -> dict[str, float]:
    """Return the seconds per call of the parts of an action."""
    loop = make_loop(_env_steps(3))
    runner = loop.runners["update_world_model"]
    view, totals = loop.scheduler.view(), loop.scheduler.totals
    pieces = {
        "hook_runner": lambda: runner.run(None, view, totals, key=0),
        "metric_meter": lambda: runner.meter.add(METRICS),
        "cadences": loop._run_due_cadences,
    }
    seconds = {}
    for name, piece in pieces.items():
        begin = perf_counter()
        for _ in range(calls):
            piece()
        seconds[name] = (perf_counter() - begin) / calls
    return seconds
