"""Environment steps per second of each suite with 1 and N workers, compared with Gymnasium's AsyncVectorEnv.

For each task all contenders are built first; then they are measured in turns, in alternating order. In a
round each makes the same number of vector steps of the same episodes: same seeds, same actions (drawn in RL
Lab's format, converted for Gymnasium). Speeds are medians over the rounds; a ratio is the median of the
rounds' ratios, so that a temporary load slows both sides of it. `low` and `high` in the JSON are the
extremes, and the load average is printed.

RL Lab's environment returns what training uses (dict of channels-first arrays, views without a copy, a new
seed for every episode). AsyncVectorEnv steps the suite's plain environment with its defaults: one process per
environment, shared memory, copies.

    gymnasium, 1_worker, N_workers, chosen    `--num-envs` environments; `chosen`: default number of workers
    single, gymnasium_single                  one environment in one process on both sides

`--batched` measures environments of tensors (suite `tensor`) with `--batched-envs` copies on `--device`: vector steps
with random actions, alone and through the Collector into replay, and on a GPU the copies between device and host.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pickle
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

import gymnasium
import numpy as np

from rl_lab.environments import make_env
from rl_lab.environments.env_runner import episode_seed
from rl_lab.environments.spec import action_mapping
from rl_lab.environments.task_names import split
from rl_lab.errors import LabError
from rl_lab.records import Spec

# Task -> options. Image sizes are the suites' defaults, so that both sides render the same images.
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
    "pinpad/six": {},
    "loconav/ant_maze_m": {},
    "dmc/manip_reach_site": {},
    "dmc/rodent_run_gaps": {},
    "bsuite/catch": {},
    "vizdoom/take_cover": {},
    "metaworld/reach": {},
    "procgen/coinrun": {},
}
BATCHED = {"tensor/cartpole": {}, "tensor/catch": {}}
ACTIONS = 256  # different vector actions, used cyclically
PAUSE_S = 0.2


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return rows per task: steps/s of each contender, ratios, CPU time and bytes per step."""
    parser = argparse.ArgumentParser(
        prog="rl-lab bench env", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks", nargs="*", default=list(TASKS), help="suite/task (default: one or two per suite)"
    )
    parser.add_argument("--batched", nargs="*", default=[], help=f"of {', '.join(BATCHED)}")
    parser.add_argument("--batched-envs", type=int, default=1024)
    parser.add_argument("--device", default="cpu", help="of --batched")
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="N (default: the number of cores)"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements of each contender; the median is reported"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds of Gymnasium's environment for one measurement"
    )
    parser.add_argument("--backend", help="environment.backend of RL Lab's side, such as envpool")
    options = parser.parse_args(argv)
    rows = []
    backend = {} if options.backend is None else {"backend": options.backend}
    for task in options.tasks:
        try:
            rows += measure(task, options.num_envs, options.workers, options.rounds, options.seconds, backend)
        except LabError as error:
            print(f"{task}: not measured: {str(error).splitlines()[0]}")
    for task in options.batched:
        rows += measure_batched(task, options.batched_envs, options.device, options.rounds, options.seconds)
    return rows


def measure_batched(
    task: str, num_envs: int, device: str, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """Return the rows of one task of tensors: its own steps, those into replay, and copies per vector step."""
    import torch

    from rl_lab.buffers.replay import ReplayBuffer
    from rl_lab.orchestration.collector import Collector
    from rl_lab.records import ActMode

    class RandomActions:
        act_captures = False

        def initial_policy_state(self, count: int) -> dict[str, Any]:
            return {}

        def act(self, obs: Any, state: Any, is_first: Any, mode: Any) -> Any:
            return torch.randint(env.spec.num_actions, is_first.shape, device=is_first.device), state, {}

    env = make_env(task, num_envs, batched=True, device=device, **BATCHED.get(task, {}))
    collector = Collector(env, device=device, generator=torch.Generator(device).manual_seed(0))
    collector.reset()
    columns = env.spec.row_columns()
    buffer = ReplayBuffer(columns, capacity=64 * num_envs, num_streams=num_envs, device=device)
    policy = RandomActions()

    def alone() -> None:
        env.step(torch.randint(env.spec.num_actions, (num_envs,), device=env.device))

    def stored() -> None:
        buffer.add(collector.step(policy, ActMode()).trajectory or {})

    def wait() -> None:
        if env.device.type == "cuda":
            torch.cuda.synchronize()

    speeds: dict[str, list[float]] = {"batched": [], "batched_into_replay": []}
    for _ in range(rounds):
        for name, call in (("batched", alone), ("batched_into_replay", stored)):
            if name == "batched":
                collector.receive()  # its step in flight
            call()
            wait()
            begin, steps = perf_counter(), 0
            while perf_counter() - begin < seconds:
                call()
                steps += 1
            wait()
            speeds[name].append(steps * num_envs / (perf_counter() - begin))
    rows = [
        _row(f"env/{task}/{name}_{num_envs}_steps_per_s", each, "steps/s") for name, each in speeds.items()
    ]
    if env.device.type == "cuda":
        with torch.profiler.profile() as profile:
            for _ in range(10):
                stored()
            wait()
        names = [event.name for event in profile.events()]
        for kind in ("DtoH", "HtoD"):
            count = sum(f"Memcpy {kind}" in name for name in names) / 10
            rows.append(
                {"name": f"env/{task}/copies_{kind}_per_vector_step", "value": count, "unit": "copies"}
            )
    return rows


@dataclass
class Contender:
    """A vector environment, its actions, and its measured speeds."""

    env: Any
    actions: list[np.ndarray]  # each (N, …), in its own format
    steps: int = 0  # vector steps of a round
    played: int = 0
    speeds: list[float] = field(default_factory=list)  # environment steps per second
    cpu: list[float] = field(default_factory=list)  # CPU seconds per environment step, over all its processes

    @property
    def pids(self) -> list[int]:
        ours = self.env.worker_pids() if hasattr(self.env, "worker_pids") else None
        return [os.getpid(), *(ours if ours is not None else [process.pid for process in self.env.processes])]

    def begin(self, seed: int = 0) -> None:
        """Start the first episodes of the seed, the same on both sides."""
        if hasattr(self.env, "worker_pids"):
            self.env.reset(seed=seed)
        else:
            self.env.reset(seed=[episode_seed(seed, index, 0) for index in range(self.env.num_envs)])
        self.played = 0

    def play(self, steps: int) -> float:
        """Make `count` vector steps; returns seconds."""
        begin = perf_counter()
        for number in range(self.played, self.played + steps):
            self.env.step(self.actions[number % ACTIONS])
        self.played += steps
        return perf_counter() - begin

    def measure(self) -> None:
        sleep(PAUSE_S)  # on a busy machine a process that has just used the CPU waits longer for it
        cpu = _cpu_seconds(self.pids)
        seconds = self.play(self.steps)
        number = self.steps * self.env.num_envs
        self.speeds.append(number / seconds)
        self.cpu.append((_cpu_seconds(self.pids) - cpu) / number)


def measure(
    task: str, num_envs: int, workers: int, rounds: int, seconds: float, ours: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the rows of one task. ours: further options of RL Lab's side."""
    load = os.getloadavg()[0]
    contenders: dict[str, Contender] = {}
    try:
        # Gymnasium first: its processes are forks of this one and must not inherit our workers' pipes.
        for name, count in (("gymnasium", num_envs), ("gymnasium_single", 1)):
            contenders[name] = Contender(
                gymnasium.vector.AsyncVectorEnv([plain_environment(task)] * count), []
            )
        for name, count, processes in (
            ("1_worker", num_envs, 1),
            (f"{workers}_workers", num_envs, workers),
            ("chosen", num_envs, None),
            ("single", 1, 1),
        ):
            options = {**TASKS.get(task, {}), **(ours or {})}
            env = make_env(task, count, workers=processes, copy=False, **options)
            contenders[name] = Contender(env, [])
        spec, chosen_workers = contenders["chosen"].env.spec, contenders["chosen"].env.num_workers
        _deal_actions(contenders.values(), contenders["chosen"].env)
        _agree_on_steps(contenders, seconds)
        for number in range(rounds):
            # Contenders to be compared are adjacent; the one that runs in this process comes last.
            order = ["gymnasium_single", "single", "gymnasium", f"{workers}_workers", "1_worker", "chosen"]
            for name in order if number % 2 == 0 else reversed(order):
                contenders[name].measure()
    finally:
        for contender in contenders.values():
            contender.env.close()
    print(f"{task}: load average {load:.1f} before, {os.getloadavg()[0]:.1f} after", flush=True)
    rows = []
    for name, contender in contenders.items():
        rows.append(_row(f"env/{task}/{name}_steps_per_s", contender.speeds, "steps/s"))
        if any(contender.cpu):
            rows.append(
                _row(f"env/{task}/{name}_cpu_us_per_step", [1e6 * each for each in contender.cpu], "us")
            )
    for name in ("1_worker", f"{workers}_workers", "chosen", "single"):
        peer = contenders["gymnasium_single" if name == "single" else "gymnasium"]
        pairs = zip(contenders[name].speeds, peer.speeds, strict=True)
        ratios = [our_speed / their_speed for our_speed, their_speed in pairs]
        rows.append(_row(f"env/{task}/{name}_over_gymnasium", ratios, "x"))
    rows += [
        {"name": f"env/{task}/chosen_workers", "value": chosen_workers, "unit": "processes"},
        {"name": f"env/{task}/bytes_copied_per_step", "value": bytes_per_step(spec), "unit": "bytes"},
        {
            "name": f"env/{task}/gymnasium_bytes_copied_per_step",
            "value": gymnasium_bytes_per_step(plain_environment(task)),
            "unit": "bytes",
        },
    ]
    return rows


def bytes_per_step(spec: Spec) -> int:
    """Return the bytes that one step of one environment writes to shared memory.

    `step` returns views of that memory, so there is no other copy.
    """
    observations = sum(int(np.prod(s.shape)) * np.dtype(s.dtype).itemsize for s in spec.observations.values())
    action = int(np.prod(spec.action.shape)) * (4 if spec.action.kind == "continuous" else 8)
    return observations + action + 4 + 2


def gymnasium_bytes_per_step(make: Callable[[], gymnasium.Env]) -> int:
    """Return the same for AsyncVectorEnv: observations in shared memory, the rest pickled through a pipe."""
    env = make()
    try:
        env.reset(seed=0)
        action = env.action_space.sample()
        obs, *rest = env.step(action)
        size = sum(np.asarray(leaf).nbytes for leaf in _leaves(obs))
        return 2 * size + len(pickle.dumps(("step", action))) + len(pickle.dumps(((None, *rest), True)))
    finally:
        env.close()


def plain_environment(task: str) -> Callable[[], gymnasium.Env]:
    """Return the factory of the suite's environment without RL Lab's wrappers."""
    name, module, rest = split(task)
    adapter = importlib.import_module(module)
    resolved = adapter.resolve(rest) if hasattr(adapter, "resolve") else rest
    handled = dict.fromkeys(getattr(adapter, "HANDLES", ()))
    options = TASKS.get(name, {})
    return lambda: adapter.make(resolved, render=False, **handled, **options)


def _deal_actions(contenders: Iterable[Contender], ours: Any) -> None:
    """Set the same actions for all contenders, each in its own format.

    Single environments use those of environment 0.
    """
    ours.action_space.seed(0)
    actions = [ours.action_space.sample() for _ in range(ACTIONS)]
    for contender in contenders:
        env = contender.env
        convert = None if hasattr(env, "worker_pids") else action_mapping(env.single_action_space)[1]
        for action in actions:
            share = action[: env.num_envs]
            contender.actions.append(
                share if convert is None else np.stack([convert(each) for each in share])
            )


def _agree_on_steps(contenders: dict[str, Contender], seconds: float) -> None:
    """Set the vector steps per round to what Gymnasium's environment makes in `seconds`; then reset all."""
    for name, contender in contenders.items():
        if name.startswith("gymnasium"):
            contender.begin()
            done, spent = 0, 0.0
            while spent < seconds:
                spent += contender.play(1)
                done += 1
            contender.steps = done
    for name, contender in contenders.items():
        contender.steps = contenders["gymnasium_single" if "single" in name else "gymnasium"].steps
        contender.begin()


def _row(name: str, values: list[float], unit: str) -> dict[str, Any]:
    return {
        "name": name,
        "value": statistics.median(values),
        "unit": unit,
        "low": min(values),
        "high": max(values),
    }


def _leaves(obs: Any) -> list[Any]:
    if isinstance(obs, dict):
        return [leaf for value in obs.values() for leaf in _leaves(value)]
    return [leaf for value in obs for leaf in _leaves(value)] if isinstance(obs, tuple) else [obs]


def _cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes so far; 0 if the system does not report it."""
    total = 0.0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                numbers = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        total += (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
    return total
