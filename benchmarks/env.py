"""How many steps a second each suite gives, with 1 and N workers, beside Gymnasium's AsyncVectorEnv.

Every contender is built first; then they step in turn, a share of a second each, round after round, and the medians
over the rounds are compared. Ours makes what training gets (dict of channels-first arrays, actions in the lab's form,
views without a copy, as the collector takes them). Gymnasium's steps the suite's plain environment, one process for
each environment, shared memory, with copies, as it does unless told otherwise. `chosen` is ours with the number of
workers that it picks by itself. Actions are random; resets are part of it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments import make as make_module
from rl_lab.environments import make_env
from rl_lab.errors import LabError
from rl_lab.records import Spec

# Task -> options. Sizes are the suites' own, so that both sides make the same pictures.
TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "minigrid/Empty-8x8": {},
    "popgym/RepeatPreviousEasy": {},
    "Pendulum-v1": {},
    "dmc/walker_walk": {},
    "dmc/cartpole_swingup": {"observe": "vision"},
    "atari100k/pong": {},
    "atari/breakout": {},
    "crafter/reward": {},
    "carracing/continuous": {},
}


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Rows per task: steps/s of ours (1 worker, N workers, chosen) and of Gymnasium's, their ratio, bytes a step."""
    parser = argparse.ArgumentParser(prog="rl-lab bench env", description=__doc__)
    parser.add_argument(
        "--tasks", nargs="+", default=list(TASKS), help="suite/task; default: one or two a suite"
    )
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="N; default: one for each core"
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each; the median is reported")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one measurement")
    options = parser.parse_args(argv)
    rows = []
    for task in options.tasks:
        try:
            rows += measure(task, options.num_envs, options.workers, options.rounds, options.seconds)
        except LabError as error:
            print(f"{task}: not measured: {str(error).splitlines()[0]}")
    return rows


def measure(task: str, num_envs: int, workers: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of one task."""
    settings = TASKS.get(task, {})
    contenders: dict[str, Any] = {}
    try:
        # First: its processes are forks of this one, and must not hold the ends of our workers' pipes.
        contenders["gymnasium"] = gymnasium.vector.AsyncVectorEnv([plain_environment(task)] * num_envs)
        for name, count in (("1_worker", 1), (f"{workers}_workers", workers), ("chosen", None)):
            contenders[name] = make_env(task, num_envs, workers=count, copy=False, **settings)
        spec = contenders["chosen"].spec
        actions = {name: _actions(env) for name, env in contenders.items()}
        for env in contenders.values():
            env.reset(seed=0)
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, env in contenders.items():
                speeds[name].append(num_envs * _steps_per_second(env, actions[name], seconds))
        chosen_workers = contenders["chosen"].num_workers
    finally:
        for env in contenders.values():
            env.close()
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    rows = [
        {"name": f"env/{task}/{name}_steps_per_s", "value": value, "unit": "steps/s"}
        for name, value in medians.items()
    ]
    best = medians["chosen"] / medians["gymnasium"]
    rows += [
        {"name": f"env/{task}/chosen_workers", "value": chosen_workers, "unit": "processes"},
        {"name": f"env/{task}/chosen_over_gymnasium", "value": best, "unit": "x"},
        {"name": f"env/{task}/bytes_copied_per_step", "value": bytes_per_step(spec), "unit": "bytes"},
    ]
    return rows


def bytes_per_step(spec: Spec) -> int:
    """Bytes that one step of one environment writes to shared memory: observations, reward, flags, action.

    There is no other copy on the way: the collector reads views of that memory.
    """
    observations = sum(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in spec.observations.values())
    action = int(np.prod(spec.action.shape)) * (4 if spec.action.kind == "continuous" else 8)
    return observations + action + 4 + 2


def plain_environment(task: str) -> Callable[[], gymnasium.Env]:
    """What makes the suite's environment without the lab's wrappers."""
    name, module, rest = make_module._split(task)
    adapter = importlib.import_module(module)
    resolved = adapter.resolve(rest) if hasattr(adapter, "resolve") else rest
    handled = dict.fromkeys(getattr(adapter, "HANDLES", ()))
    options = TASKS.get(name, {})
    return lambda: adapter.make(resolved, render=False, **handled, **options)


def _actions(env: Any) -> list[Any]:
    env.action_space.seed(0)
    return [env.action_space.sample() for _ in range(64)]


def _steps_per_second(env: Any, actions: list[Any], seconds: float) -> float:
    """Vector steps a second."""
    done = 0
    begin = perf_counter()
    while perf_counter() - begin < seconds:
        env.step(actions[done % len(actions)])
        done += 1
    return done / (perf_counter() - begin)
