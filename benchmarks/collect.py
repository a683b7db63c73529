"""Environment steps per second with 1, 4 and 16 worker processes, and the learner's updates while it collects.

For each task and number of workers, in alternating order over the rounds:

    env        the vector environment alone, with random actions: what the workers can do
    collect    with the policy's actions and the rows stored, without updates
    train      collecting and updating at the train ratio of the experiment: steps and updates per second
    updates    updates alone, on the same stored rows: what the learner can do

`train` beside `env` and `updates` says which side waits for the other: `…/update_share` is the share of the learner's
speed that is left while it collects.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from rl_lab.build import Run, build_run
from rl_lab.config.compose import compose_config, resolve_config, to_plain
from rl_lab.environments.make import env_config_options, make_env
from rl_lab.errors import LabError, closest
from rl_lab.run_environments import probe_environment

# Name -> words of its experiment
TASKS = {
    "atari": ["+experiment=dreamer_atari100k", "environment.task=pong"],
    "dmc": ["+experiment=dreamer_dmc_proprio", "environment.task=walker_walk"],
    "crafter": ["+experiment=dreamer_crafter"],
    "cartpole": ["+experiment=dreamer_cartpole"],
}
DEFAULT_TASKS = ("atari", "dmc", "crafter")
UNITS = {
    "env_steps_per_s": "steps/s",
    "collect_steps_per_s": "steps/s",
    "train_steps_per_s": "steps/s",
    "train_updates_per_s": "updates/s",
    "updates_alone_per_s": "updates/s",
    "update_share": "share",
}


class NoLogger:
    """Discards what the run logs."""

    run_dir = None

    def scalars(self, metrics: Any, **counters: int) -> None:
        pass


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows per task and number of workers: steps and updates per second."""
    parser = argparse.ArgumentParser(
        prog="rl-lab bench collect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each; the median is reported")
    parser.add_argument("--no-learner", action="store_true", help="only the environments")
    parser.add_argument("--words", nargs="+", default=[], metavar="key=value", help="of every run: size=12m")
    options = parser.parse_args(argv)
    for task in options.tasks:
        if task not in TASKS:
            raise LabError(f"--tasks: '{task}' is not one of them.{closest(task, TASKS)}")
    rows: list[dict[str, Any]] = []
    for task in options.tasks:
        for workers in options.workers:
            words = [
                *TASKS[task],
                *options.words,
                f"environment.num_envs={options.num_envs}",
                f"environment.workers={workers}",
            ]
            rows += measure(f"collect/{task}/{workers}_workers", words, options)
            print(f"{task} with {workers} workers is measured", flush=True)
    return rows


def measure(name: str, words: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}

    def add(key: str, value: float) -> None:
        found.setdefault(key, []).append(value)

    with tempfile.TemporaryDirectory(prefix="rl_lab_bench_") as folder:
        config = compose_config([*words, f"run_dir={folder}/run", "logging.progress=off"])
        spec, _ = probe_environment(config)
        resolve_config(config, spec)
        environment = make_env(**env_config_options(to_plain(config.environment)), seed=1, copy=False)
        learner = None if options.no_learner else Learner(config, spec)
        try:
            environment.reset()
            for _ in range(options.rounds):
                add("env_steps_per_s", env_speed(environment, options.seconds))
                if learner is not None:
                    add("collect_steps_per_s", learner.collect_speed(options.seconds))
                    steps, updates = learner.train_speed(options.seconds)
                    add("train_steps_per_s", steps)
                    add("train_updates_per_s", updates)
                    alone = learner.update_speed(options.seconds)
                    add("updates_alone_per_s", alone)
                    add("update_share", updates / alone)
        finally:
            environment.close()
            if learner is not None:
                learner.run.close()
    return [
        {
            "name": f"{name}/{key}",
            "value": statistics.median(values),
            "unit": UNITS[key],
            "low": min(values),
            "high": max(values),
        }
        for key, values in found.items()
    ]


def env_speed(environment: Any, seconds: float) -> float:
    """Return executed steps per second with random actions; resets are not counted."""
    space = environment.action_space
    actions = [space.sample() for _ in range(64)]
    counted, number = 0, 0

    def step() -> None:
        nonlocal counted, number
        environment.step_async(actions[number % 64])
        environment.step_wait()
        counted += int(np.count_nonzero(~environment.is_first))
        number += 1

    return repeated(step, seconds, lambda: counted)


def repeated(action: Callable[[], Any], seconds: float, count: Callable[[], float]) -> float:
    """Repeat an action for this time, at least twice; return how much `count` grew per second."""
    action()  # the first call may compile or allocate
    before, begin, calls = count(), perf_counter(), 0
    while calls < 2 or perf_counter() - begin < seconds:
        action()
        calls += 1
    return (count() - before) / (perf_counter() - begin)


class Learner:
    """A real run without files: its loop is driven here."""

    def __init__(self, config: Any, spec: Any) -> None:
        self.run: Run = build_run(config, spec, logger=NoLogger(), checkpoints=None, say=lambda text: None)
        self.loop = self.run.orchestrator
        self.totals = self.loop.scheduler.totals
        while not self.totals["updates"]:  # until the replay has enough rows
            self._action()

    def _action(self) -> str:
        action = self.loop.scheduler.next_action()
        phase = self.loop.scheduler.current_phase()
        if action is None or phase is None:
            raise LabError(
                "the experiment ended during the measurement: raise training.total_timesteps with --words"
            )
        self.loop.run_action(action, phase)
        return action

    def train_speed(self, seconds: float) -> tuple[float, float]:
        """Return environment steps and updates per second at the train ratio of the experiment."""
        steps, updates = self.totals["env_steps"], self.totals["updates"]
        begin, calls = perf_counter(), 0
        while calls < 4 or perf_counter() - begin < seconds:
            self._action()
            calls += 1
        passed = perf_counter() - begin
        return (self.totals["env_steps"] - steps) / passed, (self.totals["updates"] - updates) / passed

    def collect_speed(self, seconds: float) -> float:
        """Return steps per second of acting, stepping and storing, without updates."""
        phase = self.loop.scheduler.current_phase()
        counted = 0

        def step() -> None:
            nonlocal counted
            assert self.loop.collector is not None and self.loop.storage is not None and phase is not None
            mode = self.run.workflow.collect_mode(self.loop.scheduler.view())
            result = self.loop.collector.step(self.run.workflow, mode)
            self.loop.storage.store(phase, result.trajectory or {})
            counted += result.steps

        return repeated(step, seconds, lambda: counted)

    def update_speed(self, seconds: float) -> float:
        """Return updates per second of the phase's update hooks in turn, without collecting."""
        phase = self.loop.scheduler.current_phase()
        assert phase is not None
        names = [use.name for use in phase.hooks if use.kind == "update"]
        done = 0

        def update() -> None:
            nonlocal done
            self.loop.runners[names[done % len(names)]].perform(phase, self.loop.scheduler, lambda: False)
            done += 1

        rate = repeated(update, seconds, lambda: done)
        if self.run.context.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        return rate
