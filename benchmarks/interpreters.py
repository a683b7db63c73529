"""Environments in another interpreter: speed beside workers, and one run over two suites that cannot share a venv.

throughput   the same task in worker processes and with `environment.python` set to this interpreter, with the
same number of workers, in alternating rounds: same seeds, same actions. Ratios are medians of the
rounds' ratios. Both have as many processes beside the trainer's, so the ratio is the cost of the protocol.
run          makes the interpreters `metaworld` (mujoco 3.3.0) and `dmc` (mujoco 3.17.0) if they are missing,
trains TD-MPC2 on a task of each, kills a far process once, and compares a resumed state with the
uninterrupted one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from time import perf_counter, sleep
from typing import Any

import numpy as np

from rl_lab.environments import make_env

TASKS = ("dmc/walker_walk", "atari100k/pong", "crafter/reward", "carracing/continuous")
RUN_TASKS = [
    {
        "task": "metaworld:Meta-World/MT1",
        "python": "metaworld",
        "env_name": "reach-v3",
        "seed_argument": "seed",  # its reset ignores the seed
    },
    {"task": "dmc/cartpole_swingup", "python": "dmc"},
]
ACTIONS = 256


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(
        prog="rl-lab bench interpreters",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=("throughput", "run"), help="default: both")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement")
    options = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    if options.part != "run":
        for task in options.tasks:
            rows += throughput(task, options.num_envs, options.workers, options.rounds, options.seconds)
    if options.part != "throughput":
        rows += one_run()
    return rows


# --- Throughput ------------------------------------------------------------------------------------------


def throughput(task: str, num_envs: int, workers: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    load = os.getloadavg()[0]
    envs = {
        "workers": make_env(task, num_envs, workers=workers, copy=False),
        "far": make_env(task, num_envs, workers=workers, copy=False, python=sys.executable),
    }
    speeds: dict[str, list[float]] = {name: [] for name in envs}
    cpu: dict[str, list[float]] = {name: [] for name in envs}  # microseconds per step, over all processes
    try:
        space = envs["workers"].action_space
        space.seed(0)
        actions = [space.sample() for _ in range(ACTIONS)]
        for env in envs.values():
            env.reset(seed=0)
            play(env, actions, 5)
        steps = max(10, int(seconds / play(envs["workers"], actions, 20) * 20))
        for env in envs.values():
            env.reset(seed=0)
        for number in range(rounds):
            for name in list(envs) if number % 2 == 0 else reversed(envs):
                sleep(0.2)
                before = cpu_seconds()
                speeds[name].append(steps * num_envs / play(envs[name], actions, steps))
                cpu[name].append(1e6 * (cpu_seconds() - before) / (steps * num_envs))
        same = all(
            np.array_equal(envs["workers"].last_obs[name], envs["far"].last_obs[name])
            for name in envs["far"].last_obs
        )
    finally:
        for env in envs.values():
            env.close()
    print(f"{task}: load average {load:.1f} before, {os.getloadavg()[0]:.1f} after", flush=True)
    ratios = [far / ours for far, ours in zip(speeds["far"], speeds["workers"], strict=True)]
    name = f"interpreters/{task}"
    return [
        row(f"{name}/workers_steps_per_s", speeds["workers"], "steps/s"),
        row(f"{name}/far_steps_per_s", speeds["far"], "steps/s"),
        row(f"{name}/far_over_workers", ratios, "x"),
        row(f"{name}/workers_cpu_us_per_step", cpu["workers"], "us"),
        row(f"{name}/far_cpu_us_per_step", cpu["far"], "us"),
        {"name": f"{name}/same_last_observation", "value": int(same), "unit": "1 = yes"},
    ]


def play(env: Any, actions: list[np.ndarray], steps: int) -> float:
    begin = perf_counter()
    for number in range(steps):
        env.step(actions[number % len(actions)])
    return perf_counter() - begin


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all that it started; only one contender steps at a time."""
    import psutil

    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [me, *me.children(recursive=True)])


def row(name: str, values: list[float], unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": statistics.median(values),
        "unit": unit,
        "low": min(values),
        "high": max(values),
        "values": values,
    }


# --- One run ---------------------------------------------------------------------------------------------


def one_run() -> list[dict[str, Any]]:
    """Train on two suites whose packages collide, with one far process killed, and try the resume."""
    import tempfile

    import rl_lab
    from rl_lab.environments.interpreters import places

    begin = perf_counter()
    for name in ("metaworld", "dmc"):
        places.create(name)
    created = perf_counter() - begin
    same, restarts, restarts_after = resume_and_kill()
    with tempfile.TemporaryDirectory() as folder:
        begin = perf_counter()
        result = rl_lab.train(
            "tdmpc2_multitask",
            [
                "debug=tiny",
                "environment.tasks=[" + ",".join(_words(task) for task in RUN_TASKS) + "]",
                "environment.num_envs=2",
                "environment.action_repeat=2",
                "environment.workers=2",
                f"output_root={folder}",
                "logging.progress=off",
            ],
        )
        seconds = perf_counter() - begin
        steps = result.counters["env_steps"]
    return [
        {"name": "interpreters/run/create_s", "value": created, "unit": "s"},
        {"name": "interpreters/run/train_s", "value": seconds, "unit": "s"},
        {"name": "interpreters/run/env_steps", "value": steps, "unit": "steps"},
        {"name": "interpreters/run/resume_is_exact", "value": int(same), "unit": "1 = yes"},
        {"name": "interpreters/run/restarts_after_kill", "value": restarts, "unit": "restarts"},
        {"name": "interpreters/run/steps_after_kill", "value": restarts_after, "unit": "steps"},
    ]


def _words(task: dict[str, Any]) -> str:
    return (
        "{"
        + ",".join(
            f"{key}:'{value}'" if isinstance(value, str) else f"{key}:{value}" for key, value in task.items()
        )
        + "}"
    )


def resume_and_kill() -> tuple[bool, int, int]:
    """Return whether a restored state continues bit for bit, the restarts after `kill -9`, and the steps made then."""
    options: dict[str, Any] = {"tasks": RUN_TASKS, "seed": 1, "workers": 0, "action_repeat": 2}
    with (
        make_env("multitask/several", 2, **options) as env,
        make_env("multitask/several", 2, **options) as other,
    ):
        rng = np.random.default_rng(0)
        env.reset()
        for _ in range(50):
            env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
        diverged = other.set_state(env.get_state())
        same = not diverged
        for _ in range(200):
            actions = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
            for one, two in zip(env.step(actions)[:4], other.step(actions)[:4], strict=True):
                pairs = [(one[key], two[key]) for key in one] if isinstance(one, dict) else [(one, two)]
                same = same and all(a.tobytes() == b.tobytes() for a, b in pairs)
        from rl_lab.environments.interpreters import peer

        env.listen(print)
        for victim in list(peer._peers.values()):
            os.kill(victim.pid, signal.SIGKILL)
        steps = 0
        for _ in range(200):
            env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
            steps += 2
        return same, env.restarts, steps
