"""A small model of scale: predicts the steps per second of 1, 4, 16 workers, the update of 1, 2 ranks, and a cluster.

`--part workers`:

    steps/s of w workers = N / (N · s / c(w) + w · m)

    N  environments          s  seconds of one environment step on a free core
    c  how much faster w workers are than one on this machine, now (measured with environments that do a fixed amount of
       Python and NumPy work, for s with one worker)
    m  seconds that the trainer needs for the message to one worker (measured with an environment that does nothing)

`s` comes from half of the rounds with one worker; the other half, and the other numbers of workers, are predicted and
compared with what is measured. With `--task waits` an environment waits instead of computing, as for a simulator on
another machine; then c(w) is w, and the rest of the formula can be checked on a machine with few or busy cores.

`--part ranks`: R learners on the CPU, which average their gradients (gloo):

    seconds of an update = (u + k) · R / c(R) + n · l + b / v

    u  seconds of the update of one rank's share of the batch, in a process that averages nothing
    k  seconds that a process needs to copy its gradients to one tensor and back (measured with tensors of another size)
    n, b  exchanges of an update, and bytes that each rank sends in them: 2 (R - 1) / R of those of an all-reduce
    l, v  latency and bandwidth (measured with all-reduces of two other sizes)

Every round measures all of them once, the next one in the opposite order; medians are compared. `--part plan` computes
the traffic of a cluster instead, with the formulas below.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, ClassVar

import cloudpickle
import gymnasium
import numpy as np

from rl_lab.environments.make import make_env
from rl_lab.errors import LabError

GB = 1e9
PARTS = ("workers", "ranks", "plan")


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows: measured and predicted for each number of workers or ranks; or a plan."""
    parser = argparse.ArgumentParser(
        prog="rl-lab bench scale_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, default="workers")
    parser.add_argument("--task", default="dmc/walker_walk", help="a task, or waits")
    parser.add_argument("--wait-ms", type=float, default=10.0, help="of each step, with --task waits")
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument(
        "--words",
        nargs="+",
        default=["+experiment=dreamer_cartpole"],
        help="what the ranks train, with a hook called update",
    )
    parser.add_argument("--updates", type=int, default=30, help="of each measurement of ranks")
    parser.add_argument(
        "--plan", action="store_true", help="as --part plan: no measurement, traffic of 16 nodes with 8 GPUs"
    )
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--gpus", type=int, default=8, help="of each node")
    parser.add_argument("--envs", type=int, default=4000)
    parser.add_argument("--network", type=float, default=100.0, help="Gbit/s of each node")
    options = parser.parse_args(argv)
    if options.plan or options.part == "plan":
        cluster = Cluster(options.nodes, options.gpus, options.envs, options.network / 8)
        return [row for job in JOBS for row in plan(cluster, job)]
    return measure(options) if options.part == "workers" else measure_ranks(options)


# --- Workers, measured and predicted ---


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
    # Of a step of environments with a fixed amount of work.
    times: dict[int, list[float]] = {w: [] for w in workers}
    rates: dict[int, list[float]] = {w: [] for w in workers}
    messages: list[float] = []
    waits = options.task == "waits"
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # worker processes cannot import a benchmark
    task = partial(Waits, options.wait_ms / 1000) if waits else options.task
    tasks = {w: environment_of(task, options.num_envs, w) for w in workers}
    idle = {w: environment_of("dummy/count", options.num_envs, w) for w in (1, max(workers))}
    busy = {}
    try:
        if not waits:
            works = partial(Works, units_of(1.0 / speed(tasks[1], options.seconds / 3), options.num_envs))
            busy = {w: environment_of(works, options.num_envs, w) for w in workers}
        for number in range(options.rounds):
            for w in workers if number % 2 == 0 else workers[::-1]:
                rates[w].append(speed(tasks[w], options.seconds))
                if busy:
                    times[w].append(options.num_envs / speed(busy[w], options.seconds / 2))
            if len(idle) > 1:
                slow = {w: options.num_envs / speed(env, options.seconds / 3) for w, env in idle.items()}
                messages.append(max(0.0, (slow[max(workers)] - slow[1]) / (max(workers) - 1)))
    finally:
        for env in (*tasks.values(), *idle.values(), *busy.values()):
            env.close()
    message = statistics.median(messages) if messages else 0.0
    middle = {w: statistics.median(found) for w, found in times.items() if found}
    model = Model.fit(statistics.median(rates[1][::2]), options.num_envs, message)
    rows = [
        {"name": "scale/step_us", "value": 1e6 * model.step_s, "unit": "us"},
        {"name": "scale/message_us", "value": 1e6 * model.message_s, "unit": "us"},
    ]
    for w in options.workers:
        measured = statistics.median(rates[w][1::2] or rates[w]) if w == 1 else statistics.median(rates[w])
        capacity = capacity_of(w, middle, message) if middle else w
        predicted = model.rate(options.num_envs, w, capacity)
        rows += [
            {"name": f"scale/{w}_workers/capacity", "value": capacity, "unit": "cores"},
            {"name": f"scale/{w}_workers/measured", "value": measured, "unit": "steps/s", "each": rates[w]},
            {"name": f"scale/{w}_workers/predicted", "value": predicted, "unit": "steps/s"},
            {"name": f"scale/{w}_workers/error", "value": predicted / measured - 1.0, "unit": "share"},
        ]
    return rows


def capacity_of(workers: int, times: dict[int, float], message_s: float) -> float:
    """Return c: seconds of computing in a step of one worker, divided by those in a step of `workers`."""
    return (times[1] - message_s) / max(times[workers] - workers * message_s, 1e-9)


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


class Works(Waits):
    """Each step does the same work, `units` times: Python, and NumPy on arrays that the process's environments share.

    Workers that share a core do not find them (256 KiB) in its cache after a switch, and need longer for the same work.
    """

    parts: ClassVar = [np.ones(512) for _ in range(64)]

    def __init__(self, units: int, render_mode: str | None = None) -> None:
        super().__init__(0.0)
        self.units = units

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        for number in range(self.units):
            part = self.parts[number % len(self.parts)]
            part[:] = part * 0.5 + 0.5
        self.steps += 1
        return np.zeros(4, np.float32), 0.0, False, self.steps >= 1000, {}


def units_of(seconds: float, num_envs: int) -> int:
    """Return how many units of work need this long in one worker."""
    times = {}
    for units in (20, 60):
        with contextlib.closing(environment_of(partial(Works, units), num_envs, 1)) as env:
            times[units] = 1.0 / speed(env, 0.5)
    unit, rest = (times[60] - times[20]) / 40, (3 * times[20] - times[60]) / 2
    return max(1, round((seconds - rest) / max(unit, 1e-9)))


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


# --- Ranks, measured and predicted ---

SMALL, LARGE = 2**10, 2**20  # float32 numbers of the all-reduces that latency and bandwidth come from
PROCESS = Path(__file__).with_name("_rank_process.py")
MARK = "result: "  # of the lines with its answers


@dataclass(frozen=True)
class Exchange:
    """What exchanging costs. latency_s: l, bandwidth: v in bytes/s."""

    latency_s: float
    bandwidth: float

    @classmethod
    def fit(cls, sent: tuple[float, float], seconds: tuple[float, float]) -> Exchange:
        """Return the line through two measurements: bytes that each rank sends, and seconds."""
        slope = (seconds[1] - seconds[0]) / (sent[1] - sent[0]) if sent[1] > sent[0] else 0.0
        bandwidth = 1.0 / slope if slope > 0 else math.inf
        return cls(max(seconds[0] - sent[0] / bandwidth, 0.0), bandwidth)

    def seconds(self, calls: float, sent: float) -> float:
        return calls * self.latency_s + sent / self.bandwidth


def update_seconds(own_s: float, copy_s: float, ranks: int, capacity: float, exchange_s: float) -> float:
    """Return the seconds of a joint update. own_s: u, of this rank's share; capacity: c(ranks)."""
    return (own_s + copy_s) * ranks / capacity + exchange_s


def measure_ranks(options: argparse.Namespace) -> list[dict[str, Any]]:
    counts = sorted({1, *options.ranks})
    cases = [(1, "fixed"), *((count, kind) for count in counts[1:] for kind in ("fixed", "scaled"))]
    groups: dict[int, Group] = {}
    found: dict[Any, list[float]] = {}

    def note(key: Any, value: float) -> None:
        found.setdefault(key, []).append(value)

    def own(share: int) -> None:
        note(("own", share), groups[0].ask("update", str(share), options.updates)["seconds"])

    def capacity(count: int) -> None:
        note(("spin", count), spin(count, options.seconds / 3))

    def exchange(count: int) -> None:
        for floats in (SMALL, LARGE):
            note(
                ("exchange", count, floats), groups[count].ask("exchange", floats, options.updates)["seconds"]
            )

    def copy() -> None:
        note("copy", groups[1].ask("copy", LARGE, options.updates)["seconds"] / (4 * LARGE))

    def joint(count: int, kind: str) -> None:
        note((count, kind), groups[count].ask("update", kind, options.updates)["seconds"])

    try:
        groups[0] = Group(0, {str(share): [*options.words] for share in counts})
        for count in counts:
            kinds = ("fixed",) if count == 1 else ("fixed", "scaled")
            words = {kind: [*options.words, f"training.global_batch={kind}"] for kind in kinds}
            groups[count] = Group(count, words)
        traffic = {case: groups[case[0]].ask("traffic", case[1]) for case in cases}
        tasks: list[Callable[[], None]] = [partial(own, share) for share in counts]
        tasks += [partial(capacity, count) for count in counts]
        tasks += [partial(exchange, count) for count in counts]
        tasks += [copy, *(partial(joint, *case) for case in cases)]
        for number in range(options.rounds):
            for task in tasks if number % 2 == 0 else tasks[::-1]:
                task()
    finally:
        for group in groups.values():
            group.close()
    return rank_rows(counts, found, traffic)


def rank_rows(
    counts: Sequence[int], found: dict[Any, list[float]], traffic: dict[tuple[int, str], dict[str, float]]
) -> list[dict[str, Any]]:
    """Return what was measured beside what the other measurements predict.

    found: seconds, by ("own", share), "copy", ("exchange", ranks, floats) and (ranks, kind); loops/s by ("spin", ranks)
    traffic: of one update, by (ranks, kind)
    """
    middle = {key: statistics.median(values) for key, values in found.items()}
    rows = [
        {
            "name": f"scale/share_{share}/update_ms",
            "value": 1e3 * middle["own", share],
            "unit": "ms",
            "each": [1e3 * value for value in found["own", share]],
        }
        for share in counts
    ]
    for count in counts:
        line = exchange_of(count, middle)
        rows += [
            {"name": f"scale/{count}_ranks/capacity", "value": cores(count, middle), "unit": "cores"},
            {"name": f"scale/{count}_ranks/latency_us", "value": 1e6 * line.latency_s, "unit": "us"},
            {"name": f"scale/{count}_ranks/bandwidth", "value": line.bandwidth / GB, "unit": "GB/s"},
        ]
    one = middle[1, "fixed"]
    for (count, kind), made in traffic.items():
        sent = all_reduce_bytes(count, made["reduced"] / 4) + (count - 1) * made["gathered"]
        predicted = update_seconds(
            middle["own", count if kind == "fixed" else 1],
            middle["copy"] * made["largest"],
            count,
            cores(count, middle),
            exchange_of(count, middle).seconds(made["calls"], sent),
        )
        measured = middle[count, kind]
        name = f"scale/{count}_ranks/{kind}"
        share = one / measured / (count if kind == "fixed" else 1)
        rows += [
            {"name": f"{name}/exchanges", "value": made["calls"], "unit": "calls"},
            {"name": f"{name}/sent", "value": sent / 1e6, "unit": "MB"},
            {
                "name": f"{name}/measured",
                "value": 1e3 * measured,
                "unit": "ms",
                "each": [1e3 * value for value in found[count, kind]],
            },
            {"name": f"{name}/predicted", "value": 1e3 * predicted, "unit": "ms"},
            {"name": f"{name}/error", "value": predicted / measured - 1.0, "unit": "share"},
            {"name": f"{name}/efficiency", "value": share, "unit": "share"},
        ]
    return rows


def cores(count: int, middle: dict[Any, float]) -> float:
    return 1.0 if count == 1 else middle["spin", count] / middle["spin", 1]


def exchange_of(count: int, middle: dict[Any, float]) -> Exchange:
    sizes = (SMALL, LARGE)
    sent = tuple(all_reduce_bytes(count, floats) for floats in sizes)
    seconds = tuple(middle["exchange", count, floats] for floats in sizes)
    return Exchange.fit((sent[0], sent[1]), (seconds[0], seconds[1]))


class Group:
    """Processes of one number of ranks, which wait for orders; 0: one process that is no rank.

    words: of the learners that each process builds. Without ranks, a name is the number that the batch is divided by.
    """

    def __init__(self, count: int, words: dict[str, list[str]]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "bench"}
        size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        self.processes = []
        for rank in range(max(count, 1)):
            own = {**torchrun, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)} if count else {}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(PROCESS), json.dumps(words)],
                    env={**os.environ, "OMP_NUM_THREADS": "1", **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        self.count = count

    def ask(self, what: str, *words: Any) -> dict[str, float]:
        """Give all processes an order; return the answer of the first one when all have answered."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: its answer is missing
                process.stdin.write(json.dumps([what, *words]) + "\n")
                process.stdin.flush()
        answers = [self._answer(process) for process in self.processes]
        return answers[0]

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, float]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line.removeprefix(MARK))
                return found
        raise LabError(f"a process of {self.count} ranks ended with status {process.wait()}")

    def close(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


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


def all_reduce_bytes(ranks: int, parameters: float) -> float:
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
