"""A small model of how collecting scales: predicts steps per second with 1, 4 and 16 workers, and plans on paper.

    steps/s of w workers = N / (N · s / c(w) + w · m)

    N  environments          s  seconds of one environment step on a free core
    c  how much faster w busy processes are than one on this machine, now (measured without environments)
    m  seconds that the trainer needs for the message to one worker (measured with an environment that does nothing)

`s` comes from half of the rounds with one worker; the other half, and the other numbers of workers, are predicted and
compared with what is measured. With `--task waits` an environment waits instead of computing, as for a simulator on
another machine; then c(w) is w, and the rest of the formula can be checked on a machine with few or busy cores.
`--plan` computes the traffic of a cluster instead, with the formulas below.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter, sleep
from typing import Any

import cloudpickle
import gymnasium
import numpy as np

from rl_lab.environments.make import make_env

GB = 1e9


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows: measured and predicted steps/s for each number of workers; or, with --plan, a plan."""
    parser = argparse.ArgumentParser(
        prog="rl-lab bench scale_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--task", default="dmc/walker_walk", help="a task, or waits")
    parser.add_argument("--wait-ms", type=float, default=10.0, help="of each step, with --task waits")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--plan", action="store_true", help="no measurement: traffic of 16 nodes with 8 GPUs")
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--envs", type=int, default=4000)
    parser.add_argument("--network", type=float, default=100.0, help="Gbit/s of each node")
    options = parser.parse_args(argv)
    if options.plan:
        cluster = Cluster(options.nodes, options.gpus, options.envs, options.network / 8)
        return [row for job in JOBS for row in plan(cluster, job)]
    return measure(options)


# --- Measured and predicted ---


@dataclass(frozen=True)
class Model:
    """The two times of the formula. step_s: s, message_s: m."""

    step_s: float
    message_s: float

    @classmethod
    def fit(cls, rate: float, num_envs: int, message_s: float) -> Model:
        """Return the model that gives this rate with one worker, where c(1) is 1."""
        return cls(max(1.0 / rate - message_s / num_envs, 1e-9), message_s)

    def rate(self, num_envs: int, workers: int, capacity: float) -> float:
        """Return steps per second of `workers` processes."""
        return num_envs / (num_envs * self.step_s / capacity + workers * self.message_s)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    workers = sorted({1, *options.workers})
    capacities: dict[int, list[float]] = {w: [] for w in workers}
    rates: dict[int, list[float]] = {w: [] for w in workers}
    messages: list[float] = []
    waits = options.task == "waits"
    if waits:
        cloudpickle.register_pickle_by_value(
            sys.modules[__name__]
        )  # worker processes cannot import a benchmark
    task = partial(Waits, options.wait_ms / 1000) if waits else options.task
    tasks = {w: environment_of(task, options.num_envs, w) for w in workers}
    idle = {w: environment_of("dummy/count", options.num_envs, w) for w in (1, max(workers))}
    try:
        for number in range(options.rounds):
            order = workers if number % 2 == 0 else workers[::-1]
            one = 1.0 if waits else spin(1, options.seconds / 3)
            for w in order:
                busy = w if waits else 1.0 if w == 1 else spin(w, options.seconds / 3) / one
                capacities[w].append(busy)
                rates[w].append(speed(tasks[w], options.seconds))
            if len(idle) > 1:
                slow = {w: options.num_envs / speed(env, options.seconds / 3) for w, env in idle.items()}
                messages.append(max(0.0, (slow[max(workers)] - slow[1]) / (max(workers) - 1)))
    finally:
        for env in (*tasks.values(), *idle.values()):
            env.close()
    message = statistics.median(messages) if messages else 0.0
    model = Model.fit(statistics.median(rates[1][::2]), options.num_envs, message)
    rows = [
        {"name": "scale/step_us", "value": 1e6 * model.step_s, "unit": "us"},
        {"name": "scale/message_us", "value": 1e6 * model.message_s, "unit": "us"},
    ]
    for w in options.workers:
        measured = statistics.median(rates[w][1::2] or rates[w]) if w == 1 else statistics.median(rates[w])
        capacity = statistics.median(capacities[w])
        predicted = model.rate(options.num_envs, w, capacity)
        rows += [
            {"name": f"scale/{w}_workers/capacity", "value": capacity, "unit": "cores"},
            {"name": f"scale/{w}_workers/measured", "value": measured, "unit": "steps/s", "each": rates[w]},
            {"name": f"scale/{w}_workers/predicted", "value": predicted, "unit": "steps/s"},
            {"name": f"scale/{w}_workers/error", "value": predicted / measured - 1.0, "unit": "share"},
        ]
    return rows


class Waits(gymnasium.Env):
    """Each step waits, as for a simulator on another machine; an episode has 1000 steps."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, seconds: float, render_mode: str | None = None) -> None:
        self.seconds = seconds
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        sleep(self.seconds)
        self.steps += 1
        return np.zeros(4, np.float32), 0.0, False, self.steps >= 1000, {}


def environment_of(task: Any, num_envs: int, workers: int) -> Any:
    env = make_env(task, num_envs, workers=workers, seed=1, copy=False)
    env.reset()
    return env


def speed(env: Any, seconds: float) -> float:
    """Return steps per second, resets included: they take time, too."""
    actions = [env.action_space.sample() for _ in range(32)]
    begin, calls = perf_counter(), 0
    while calls < 2 or perf_counter() - begin < seconds:
        env.step_async(actions[calls % 32])
        env.step_wait()
        calls += 1
    return calls * env.num_envs / (perf_counter() - begin)


def spin(processes: int, seconds: float) -> float:
    """Return how many loops per second this number of busy processes makes in all."""
    context = multiprocessing.get_context("fork")  # no torch in these processes
    start, counts = context.Event(), context.SimpleQueue()
    children = [context.Process(target=_spin, args=(start, counts, seconds)) for _ in range(processes)]
    for child in children:
        child.start()
    sleep(0.1)
    start.set()
    total = sum(counts.get() for _ in children)
    for child in children:
        child.join()
    return total


def _spin(start: Any, counts: Any, seconds: float) -> None:
    start.wait()
    begin, loops, value = perf_counter(), 0, np.arange(64.0)
    while perf_counter() - begin < seconds:
        for _ in range(200):
            value = value * 1.0000001
        loops += 1
    counts.put(loops / (perf_counter() - begin))


# --- A plan on paper ---


@dataclass(frozen=True)
class Cluster:
    """network: GB/s of each node, in each direction; cores: of each GPU, for environments."""

    nodes: int
    gpus: int
    envs: int
    network: float
    cores: int = 16


@dataclass(frozen=True)
class Job:
    """One experiment. Times are measured: see docs/howto/scale.md.

    update_s: one update on one GPU; step_s: one environment step on one core; row_bytes: one stored row
    parameters: trained, in float32; batch: replayed steps of one update on one GPU
    """

    name: str
    update_s: float
    step_s: float
    row_bytes: int
    parameters: int
    batch: int
    train_ratio: float
    chunk: int = 32


JOBS = (
    # docs/results/dreamer_h200.json and docs/results/bench_env.json
    Job("atari_12m_ratio_256", 0.01331, 820e-6, 12302, 10_498_259, 1024, 256.0),
    Job("atari_200m_ratio_32", 0.05044, 820e-6, 12302, 165_965_075, 1024, 32.0),
    Job("dmc_1m_ratio_512", 0.00936, 392e-6, 126, 687_875, 1024, 512.0),
)


def all_reduce_bytes(ranks: int, parameters: int) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of float32 gradients: 2 (R - 1) / R of them."""
    return 2.0 * (ranks - 1) / ranks * 4.0 * parameters


def plan(cluster: Cluster, job: Job) -> list[dict[str, Any]]:
    """Return what a cluster does with a job: one learner on each GPU, environments beside them.

    Gradients are first averaged inside a node, whose own links are much faster, then between the nodes, which send
    them in turn with the update (nothing overlaps: the worst case).
    """
    gpus = cluster.nodes * cluster.gpus
    reduce_bytes = all_reduce_bytes(cluster.nodes, job.parameters)
    reduce_s = reduce_bytes / (cluster.network * GB)
    update_s = job.update_s + reduce_s
    learner = gpus * job.batch / job.train_ratio / update_s  # steps/s that the updates ask for
    cores = gpus * cluster.cores / job.step_s
    steps = min(learner, cores)
    updates = steps * job.train_ratio / (gpus * job.batch)
    rows = steps * job.row_bytes
    chunk_s = job.chunk * cluster.envs / steps  # between two versions of the weights
    weights = 4.0 * job.parameters * (cluster.nodes - 1) / chunk_s
    shares = {
        "gradients": reduce_bytes * updates / (cluster.network * GB),
        "weights": weights / (cluster.network * GB),  # sent by one node to all others
        "observations": rows / (cluster.network * GB),  # received by one node
        "environment_cores": steps / cores,
        "learners": updates * job.update_s,
    }
    values = {
        "env_steps_per_s": (steps, "steps/s"),
        "steps_per_env_per_s": (steps / cluster.envs, "steps/s"),
        "updates_per_s": (updates, "updates/s"),
        "efficiency": (job.update_s / update_s, "share"),
        "observations": (rows / 1e6, "MB/s"),
        "weights": (weights / 1e6, "MB/s"),
        "gradients_per_node": (reduce_bytes * updates / 1e6, "MB/s"),
        **{f"load/{name}": (share, "share") for name, share in shares.items()},
    }
    return [
        {"name": f"plan/{job.name}/{key}", "value": value, "unit": unit}
        for key, (value, unit) in values.items()
    ]


def saturates_first(rows: Sequence[dict[str, Any]]) -> str:
    """Return the part of a plan with the highest load."""
    loads = {row["name"].rsplit("/", 1)[1]: row["value"] for row in rows if "/load/" in row["name"]}
    return max(loads, key=lambda name: loads[name])
