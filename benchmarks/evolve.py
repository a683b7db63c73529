"""Candidates evaluated per second in an evolution: all in one batch, or one process per candidate.

Both run the same rollouts with the same code and networks on the same cores. Batched: one forward pass acts
for all running rollouts; slow environments run in worker processes, in two alternating groups. One process
per candidate: each process has its own copy of the networks and one environment and runs one rollout after
the other, as the original World Models; all of them share the cores. The processes are started before the
measurement.

    toy        the networks of og_wm_cartpole_pixels on random images without cost: the time of acting alone
    dream      the networks of og_wm_carracing, as published, in the dream of M
    carracing  the same in the environment, where one step takes several times as long as acting

torch has one thread everywhere, as in RL Lab's runs (--threads gives the batched pass more). In each world
the contenders alternate round by round, and medians are compared. No rollout ends early. On a busy machine
many processes get a larger share of the CPU than one: `cpu_ms` (CPU time per step, acting and environment,
without waiting) remains comparable.

    rl-lab bench evolve [--worlds toy dream carracing] [--candidates 16] [--episodes 2] [--steps 100] [--cores
    N] [--threads N]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

Row = dict[str, Any]


class RandomImages(gymnasium.Env):
    """Grey noise images, two actions, no end."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 255, (64, 64, 1), np.uint8)
        self.action_space = spaces.Discrete(2)
        self.frames = np.random.default_rng(0).integers(0, 256, (8, 64, 64, 1), dtype=np.uint8)
        self.elapsed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return self.frames[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.elapsed += 1
        return self.frames[self.elapsed % 8], 1.0, False, False, {}


@dataclass(frozen=True)
class World:
    """Experiment, task and settings of one measurement."""

    experiment: str
    task: Any
    options: dict[str, Any]
    dream: bool = False
    workers: bool = False  # environments in separate processes

    def make_env(self, num_envs: int, workers: int, steps: int) -> Any:
        from rl_lab.environments import make_env

        return make_env(self.task, num_envs, workers=workers, copy=False, time_limit=steps, **self.options)


TRACK = {"size": 64, "crop": True}
WORLDS = {
    "toy": World("og_wm_cartpole_pixels", RandomImages, {}),
    "dream": World("og_wm_carracing", "carracing/continuous", TRACK, dream=True),
    "carracing": World("og_wm_carracing", "carracing/continuous", TRACK, workers=True),
}


def run(argv: list[str]) -> list[Row]:
    """Return rows of name, value, unit."""
    parser = argparse.ArgumentParser(
        prog="rl-lab bench evolve", description="candidates evaluated per second"
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=["toy", "dream"])
    parser.add_argument("--candidates", type=int, default=16)
    parser.add_argument("--episodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps of every rollout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, help="cores to use (default: all)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the batched pass")
    chosen = parser.parse_args(argv)
    allowed = sorted(os.sched_getaffinity(0))
    cores = min(chosen.cores or len(allowed), len(allowed))
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, allowed[:cores])
    try:
        rows = [row for name in chosen.worlds for row in compare(name, WORLDS[name], chosen, cores)]
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
    rows += [{"name": "evolve/cores", "value": cores, "unit": "cores"}]
    return rows


def compare(name: str, world: World, chosen: argparse.Namespace, cores: int) -> list[Row]:
    """Return evaluations per second of both methods, and their ratio."""
    torch.set_num_threads(1)  # before any process is forked: no thread pool may be copied
    jobs = chosen.candidates * chosen.episodes
    alone = OneProcessEach(world, chosen)
    together = Batched(world, chosen, cores)
    seconds: dict[str, list[float]] = {"batched": [], "process_each": []}
    cpu: dict[str, list[float]] = {"batched": [], "process_each": []}
    try:
        for number in range(chosen.rounds + 1):
            for label, contender in (("batched", together), ("process_each", alone)):
                begin, used = time.perf_counter(), cpu_seconds(contender.pids)
                contender.play()
                if number:  # the first round warms up
                    seconds[label].append(time.perf_counter() - begin)
                    cpu[label].append(cpu_seconds(contender.pids) - used)
    finally:
        alone.close()
        together.close()
    rates = {label: jobs / statistics.median(values) for label, values in seconds.items()}
    rows: list[Row] = [
        {"name": f"evolve/{name}/{label}", "value": rate, "unit": "evaluations/s"}
        for label, rate in rates.items()
    ]
    rows.append(
        {
            "name": f"evolve/{name}/batched_steps",
            "value": rates["batched"] * chosen.steps,
            "unit": "steps/s",
        }
    )
    each = {label: 1e3 * statistics.median(values) / (jobs * chosen.steps) for label, values in cpu.items()}
    rows += [
        {"name": f"evolve/{name}/{label}_cpu_ms", "value": value, "unit": "ms/step"}
        for label, value in each.items()
    ]
    speedups = {
        "speedup": rates["batched"] / rates["process_each"],
        "cpu_speedup": each["process_each"] / each["batched"],
    }
    rows += [
        {"name": f"evolve/{name}/{label}", "value": value, "unit": "x"} for label, value in speedups.items()
    ]
    return rows


def cpu_seconds(pids: list[int]) -> float:
    """Return the CPU time of these processes so far."""
    import psutil

    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(item.user + item.system for item in times)


class Batched:
    """All candidates in one batch."""

    def __init__(self, world: World, chosen: argparse.Namespace, cores: int) -> None:
        self.world = world
        self.threads = 1 if world.workers else chosen.threads
        self.workflow = make_workflow(world, chosen)
        self.evolution = self.workflow.dream_evolution if world.dream else self.workflow.evolution
        self.candidates = candidates(self.workflow, chosen)
        self.environments = []
        if not world.dream:
            jobs = chosen.candidates * chosen.episodes
            sizes = [jobs - jobs // 2, jobs // 2] if world.workers else [jobs]
            workers = cores if world.workers else 0
            self.environments = [world.make_env(size, min(workers, size), chosen.steps) for size in sizes]
        self.pids = [os.getpid(), *(pid for env in self.environments for pid in env.worker_pids())]

    def play(self) -> None:
        from rl_lab.orchestration.evolution import evaluate_population

        torch.set_num_threads(self.threads)
        if self.world.dream:
            beginnings = start_rows(self.workflow, self.evolution.episodes_per_candidate)
            self.evolution.evaluate(self.candidates, beginnings, torch.Generator().manual_seed(0))
        else:
            evaluate_population(self.evolution, self.candidates, self.environments, device="cpu", seed=0)
        torch.set_num_threads(1)

    def close(self) -> None:
        for environment in self.environments:
            environment.close()


class OneProcessEach:
    """One process per candidate; each runs on request and reports when it is done."""

    def __init__(self, world: World, chosen: argparse.Namespace) -> None:
        context = multiprocessing.get_context("fork")
        self.start = context.Barrier(chosen.candidates + 1)
        self.end = context.Barrier(chosen.candidates + 1)
        self.processes = [
            context.Process(
                target=play_alone, args=(world, chosen, number, self.start, self.end), daemon=True
            )
            for number in range(chosen.candidates)
        ]
        for process in self.processes:
            process.start()
        self.end.wait()  # everything is built
        self.pids = [int(process.pid or 0) for process in self.processes]

    def play(self) -> None:
        self.start.wait()
        self.end.wait()

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


def play_alone(world: World, chosen: argparse.Namespace, number: int, start: Any, end: Any) -> None:
    """Body of a process: batch size 1, one rollout after the other."""
    from rl_lab.records import ActMode

    torch.set_num_threads(1)
    workflow = make_workflow(world, chosen)
    own = candidates(workflow, chosen)[number]
    workflow.controller.set_vector(own)
    environment = None if world.dream else world.make_env(1, 0, chosen.steps)
    end.wait()
    while True:
        start.wait()
        for episode in range(chosen.episodes):
            generator = torch.Generator().manual_seed(episode)
            if environment is None:
                workflow.dream_evolution.evaluate(own[None], start_rows(workflow, 1), generator)
                continue
            obs, _ = environment.reset(seed=episode)
            state, ended, mode = workflow.initial_policy_state(1), False, ActMode(generator=generator)
            while not ended:
                tensors = {key: torch.as_tensor(value) for key, value in obs.items()}
                action, state, _ = workflow.act(tensors, state, torch.as_tensor(environment.is_first), mode)
                obs, _, terminated, truncated, _ = environment.step(action.numpy())
                ended = bool((terminated | truncated).any())
        end.wait()


def make_workflow(world: World, chosen: argparse.Namespace) -> Any:
    """Return the experiment's networks, untrained."""
    from rl_lab.build import assemble_workflow
    from rl_lab.config.compose import compose_config, resolve_config
    from rl_lab.environments.make import probe_spec

    spec = probe_spec(world.task, **world.options)
    config = compose_config(
        [
            f"experiment={world.experiment}",
            "experiment.device=cpu",
            f"algorithm.evolution.population={chosen.candidates}",
            f"algorithm.evolution.episodes={chosen.episodes}",
            "algorithm.evolution.early_stop.patience=0",
            f"algorithm.imagination_horizon={chosen.steps}",
            # Every rollout has its full length: dreams do not terminate.
            "components.mdn_rnn.done_head=false",
        ]
    )
    resolve_config(config, spec)
    return assemble_workflow(config, spec, torch.device("cpu"), optimizers=False)


def candidates(workflow: Any, chosen: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 0.1 * torch.randn(chosen.candidates, workflow.controller.num_parameters, generator=generator)


def start_rows(workflow: Any, episodes: int) -> Any:
    """Return stored latents that dreams start from, (episodes, 1)."""
    from rl_lab.records import Batch

    zeros = torch.zeros(episodes, 1, workflow.vae.latent)
    flags = torch.zeros(episodes, 1, dtype=torch.bool)
    return Batch(
        {
            "mu": zeros,
            "logvar": zeros,
            "action": torch.zeros(episodes, 1, *workflow.spec.action.shape),
            "reward": torch.zeros(episodes, 1),
            "terminated": flags,
            "is_first": ~flags,
        }
    )
