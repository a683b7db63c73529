"""Generations of `evolve` hooks: ask for candidates, evaluate them, tell their fitness.

The hook's step (`protocols.Evolvable`) proposes candidates and learns from their fitness. `evaluate_population`
runs them in the environment; a step with `dreams = True` evaluates them itself, in its world model. Only runs
with an evolve hook import this module.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError
from rl_lab.orchestration.collector import ActRunner
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import PhaseDefinition
from rl_lab.orchestration.updates import Done, Storage
from rl_lab.protocols import DreamEvolution, Evolvable, PhasedEvolution
from rl_lab.records import ActMode, Batch, EarlyStop, EvolveHook
from rl_lab.utils import ranks
from rl_lab.utils.metrics import MetricMeter
from rl_lab.utils.progress import clock_time
from rl_lab.utils.seeding import derive_seed

MIN_GROUPED_ENVS = 4  # fewer environments are not split into two groups


class EvolveRunner:
    """Runs an evolve hook: one call is one generation."""

    captures, graph_bytes = False, 0

    def __init__(
        self,
        name: str,
        hook: EvolveHook,
        generations: Generations,
        *,
        device: torch.device,
        storage: Storage | None = None,
    ) -> None:
        self.name = name
        self.hook = hook
        self.generations = generations
        self.device = device
        self.storage = storage
        self.meter = MetricMeter()

    def perform(
        self, phase: PhaseDefinition, scheduler: PhaseScheduler, should_stop: Callable[[], bool]
    ) -> Done | None:
        """Run one generation; return None if it was interrupted."""
        stream = self.storage.stream(self.name, phase) if self.storage is not None else None
        outcome = self.generations.run(
            self.name,
            self.hook.step,
            number=scheduler.hook_calls.get(self.name, 0),
            phase=scheduler.view(),
            done=scheduler.counts["updates"],
            total=phase.duration_updates or phase.duration_cycles,
            device=self.device,
            batch=stream.next() if stream is not None else None,
            should_stop=should_stop,
        )
        if outcome is None:
            return None
        metrics, steps = outcome
        self.meter.add(metrics)
        return Done(steps=steps)

    def close(self) -> None:
        self.generations.close()


class Generations:
    """Runs generations and holds the environments in which candidates are evaluated."""

    def __init__(
        self,
        make_environment: Callable[[int | None], Any] | None,  # number of environments -> VectorEnv
        *,
        seed: int,
        say: Callable[[str], None],
        capture: bool = True,  # on CUDA, replay acting as a CUDA graph
    ) -> None:
        self.make_environment = make_environment
        self.seed = seed
        self.say = say
        self.capture = capture
        self._environments: dict[int | None, list[Any]] = {}
        self._progress: dict[str, EvolutionProgress] = {}

    def run(
        self,
        name: str,
        evolution: Evolvable,
        *,
        number: int,  # generations of this hook so far, over all phases: determines the seeds
        phase: Mapping[str, Any],
        done: int,  # generations of this phase so far
        total: int | None,
        device: torch.device,
        batch: Batch | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[dict[str, float], int] | None:
        """Run one generation; return metrics and environment steps, or None if it was interrupted."""
        if isinstance(evolution, PhasedEvolution):
            evolution.begin(phase)
        progress = self._progress.setdefault(name, EvolutionProgress(self.say))
        seed = derive_seed(self.seed, name, number)
        candidates = evolution.ask()
        rollouts = len(candidates) * int(evolution.episodes_per_candidate)
        progress.begin(done + 1, total, rollouts)
        if isinstance(evolution, DreamEvolution) and evolution.dreams:
            if batch is None:
                raise ConfigError(f"hook '{name}' evolves in a world model: give its EvolveHook a batch")
            own = seed if ranks.is_first() else derive_seed(seed, "rank", ranks.rank())
            generator = torch.Generator(device).manual_seed(own)
            fitness, imagined_steps = evolution.evaluate(candidates, batch, generator)
            # Ranks dream from their own starts.
            fitness = (_over_ranks(fitness) / ranks.size()).to(fitness)
            imagined_steps, steps = int(ranks.host_sum([imagined_steps])[0]), 0
        else:
            environments = self._open(name, getattr(evolution, "num_envs", None))
            stopped = False
            try:
                fitness, steps = evaluate_population(
                    evolution,
                    candidates,
                    environments,
                    device=device,
                    seed=seed,
                    on_rollout=progress.rollout_finished,
                    should_stop=should_stop,
                    capture=self.capture,
                    share=(ranks.rank(), ranks.size()),
                )
            except Interrupted:
                stopped = True
            if ranks.any_rank(stopped):
                self.say(f"generation {done + 1} was interrupted and will be repeated on resume")
                return None
            fitness, steps = _over_ranks(fitness), int(ranks.host_sum([steps])[0])
            imagined_steps = 0
        metrics = evolution.tell(candidates, fitness)
        return {**progress.end(fitness, steps or imagined_steps), **metrics}, steps

    def _open(self, name: str, num_envs: int | None) -> list[Any]:
        """Return `num_envs` environments, in two groups if there are enough of them."""
        if num_envs not in self._environments:
            if self.make_environment is None:
                raise ConfigError(
                    f"hook '{name}' evolves in the environment, but this run was built without one"
                )
            sizes: list[int | None] = [num_envs]
            if num_envs is not None and num_envs >= MIN_GROUPED_ENVS:
                sizes = [num_envs - num_envs // 2, num_envs // 2]
            self._environments[num_envs] = [self.make_environment(size) for size in sizes]
        return self._environments[num_envs]

    def close(self) -> None:
        for environments in self._environments.values():
            for environment in environments:
                environment.close()
        self._environments.clear()


# ---------------------------------------------------------------- evaluating candidates in environments


@torch.no_grad()
def evaluate_population(
    evolution: Evolvable,
    candidates: torch.Tensor,  # (P, D)
    environments: Any,  # a VectorEnv, or several groups that alternate
    *,
    device: torch.device | str,
    seed: int,
    on_rollout: Callable[[FinishedRollout], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    capture: bool = True,  # on CUDA, replay acting as a CUDA graph
    share: tuple[int, int] = (0, 1),  # evaluate each n-th candidate, from this one on; the others get 0
) -> tuple[torch.Tensor, int]:
    """Return the mean return of each candidate over its episodes, (P,), and the environment steps.

    Every environment runs one candidate, and one forward pass acts for a group of environments. Groups
    alternate: while the workers of one group step, the policy acts for the next. Rollouts are assigned in
    lock step, each with its own seed, so that the result does not depend on timing. If `should_stop` returns
    True, no step is left in flight and Interrupted is raised.
    """
    vectors = [environments] if hasattr(environments, "num_envs") else list(environments)
    episodes = int(evolution.episodes_per_candidate)
    rollouts = make_rollouts(len(candidates), episodes, seed, getattr(evolution, "common_episodes", False))
    queue = deque(rollout for rollout in rollouts if rollout.candidate % share[1] == share[0])
    groups = [
        RolloutGroup(env, queue, getattr(evolution, "early_stop", None) or EarlyStop()) for env in vectors
    ]
    fitness = np.zeros(len(candidates))
    steps = 0
    actors = []
    for number, group in enumerate(groups):
        group.start(derive_seed(seed, "group", number))
        noise = derive_seed(seed, "evolve", number)
        actors.append(
            GroupActor(evolution, candidates, group, device=torch.device(device), seed=noise, capture=capture)
        )
    first = True
    while any(group.busy for group in groups):
        if should_stop is not None and should_stop():
            _wait_for_steps(groups, first)
            raise Interrupted
        for group, actor in zip(groups, actors):
            if not group.busy:
                continue
            obs, is_first, finished = group.receive(first)
            for item in finished:
                fitness[item.rollout.candidate] += item.episode_return
                steps += item.steps
                if on_rollout is not None:
                    on_rollout(item)
            if group.busy:
                actor.send(obs, is_first)
        first = False
    return torch.as_tensor(fitness / episodes, dtype=torch.float64), steps


def _over_ranks(fitness: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' fitness (P,); the tensor itself with one rank."""
    return (
        fitness if ranks.size() == 1 else torch.tensor(ranks.host_sum(fitness.tolist()), dtype=torch.float64)
    )


class Interrupted(Exception):
    """The generation was interrupted; its results are discarded."""


def make_rollouts(population: int, episodes: int, seed: int, common: bool) -> list[Rollout]:
    """Return all candidates for each episode in turn. common: all candidates share the seed of an episode."""
    return [
        Rollout(
            candidate, derive_seed(seed, "episode", episode, *([] if common else [candidate])) & 0x7FFFFFFF
        )
        for episode in range(episodes)
        for candidate in range(population)
    ]


def _wait_for_steps(groups: Sequence[RolloutGroup], first: bool) -> None:
    """Receive the steps in flight, so that the environments can be used again or closed."""
    for group in groups:
        if group.busy and (group.schedules or not first):
            group.environment.step_wait()


@dataclass(frozen=True)
class Rollout:
    """One episode of one candidate."""

    candidate: int
    seed: int


@dataclass
class FinishedRollout:
    """A rollout that has ended."""

    rollout: Rollout
    episode_return: float
    steps: int
    stopped: bool  # ended early, without progress


class RolloutGroup:
    """A VectorEnv and the rollouts that its environments run.

    With an environment that has `schedule(seeds)`, each rollout starts with its own seed, rollouts without
    progress are ended early, and environments without a rollout are not stepped. Any other environment runs
    its own sequence of episodes, each to its end.
    """

    def __init__(self, environment: Any, queue: deque[Rollout], early_stop: EarlyStop) -> None:
        self.environment = environment
        self.queue = queue  # shared by all groups
        self.early_stop = early_stop
        n = environment.num_envs
        self.schedules = hasattr(environment, "schedule")
        self.running: list[Rollout | None] = [None] * n
        self.candidates = np.zeros(n, np.int64)  # candidate of each environment
        self.changed = True  # candidates have changed since GroupActor last read them
        self._started = np.zeros(n, bool)  # the first row of the rollout was received
        self._returns = np.zeros(n)
        self._steps = np.zeros(n, np.int64)
        self._stale = np.zeros(n, np.int64)  # steps since the last reward above early_stop.reward_above
        self._stale_return = np.zeros(n)

    @property
    def busy(self) -> bool:
        return any(rollout is not None for rollout in self.running)

    def start(self, seed: int) -> None:
        """Assign the first rollouts and send the step that starts them."""
        environment = self.environment
        if not self.schedules or not environment.last_obs:
            environment.reset(seed=seed)
        self._assign(range(environment.num_envs))
        if not self.busy:
            return
        if self.schedules:
            environment.step_async(np.zeros(environment.action_space.shape, environment.action_space.dtype))
        else:
            self._started[:] = True

    def receive(self, first: bool) -> tuple[dict[str, np.ndarray], np.ndarray, list[FinishedRollout]]:
        """Return observations, `is_first` and the finished rollouts. first: the first call after `start`."""
        environment = self.environment
        if first and not self.schedules:
            return environment.last_obs, environment.is_first, []
        obs, reward, terminated, truncated, _ = environment.step_wait()
        is_first = np.array(environment.is_first)
        counted = self._started & ~is_first
        self._started |= is_first
        self._returns += np.where(counted, reward, 0.0)
        self._steps += counted
        progress = reward > self.early_stop.reward_above
        self._stale = np.where(progress | ~counted, 0, self._stale + 1)
        self._stale_return = np.where(progress | ~counted, 0.0, self._stale_return + reward)
        ended = np.asarray(terminated | truncated)
        stalled = np.zeros_like(ended)
        if self.schedules and self.early_stop.patience:
            stalled = ~ended & (self._stale >= self.early_stop.patience)
        over = [int(env) for env in np.flatnonzero((ended | stalled) & self._started) if self.running[env]]
        finished = [self._finish(env, bool(stalled[env])) for env in over]
        self._assign(over)
        return obs, is_first, finished

    def _finish(self, env: int, stopped: bool) -> FinishedRollout:
        rollout = self.running[env]
        assert rollout is not None
        total = float(self._returns[env])
        left = self.early_stop.horizon - int(self._steps[env])
        if stopped and left > 0:
            total += left * float(self._stale_return[env] / self._stale[env])
        return FinishedRollout(rollout, total, int(self._steps[env]), stopped)

    def _assign(self, envs: Sequence[int] | range) -> None:
        """Give these environments the next rollouts of the queue, or none."""
        seeds: dict[int, int | None] = {}
        for env in envs:
            rollout = self.queue.popleft() if self.queue else None
            self.running[env] = rollout
            self._started[env] = not self.schedules
            self._returns[env] = self._steps[env] = self._stale[env] = self._stale_return[env] = 0
            seeds[int(env)] = rollout.seed if rollout else None
            if rollout:
                self.candidates[env] = rollout.candidate
                self.changed = True
        if self.schedules and seeds:
            self.environment.schedule(seeds)


class PopulationPolicy:
    """The candidates of all environments of a group as one policy: one forward pass acts for all of them."""

    def __init__(self, evolution: Evolvable, candidates: torch.Tensor, num_envs: int) -> None:
        self.evolution = evolution
        self.candidates = candidates  # (P, D)
        self.parameters = candidates.new_zeros(num_envs, candidates.shape[1])  # (N, D), at a fixed address
        self.act_captures = bool(getattr(evolution, "act_captures", True))

    def assign(self, indices: np.ndarray) -> None:
        """Set the candidate of each environment. indices: (N,)."""
        self.parameters.copy_(self.candidates[torch.from_numpy(indices).to(self.candidates.device)])

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return self.evolution.initial_policy_state(num_envs)

    def act(
        self,
        obs: dict[str, torch.Tensor],
        policy_state: dict[str, torch.Tensor],
        is_first: torch.Tensor,
        mode: ActMode,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        action, policy_state = self.evolution.act(self.parameters, obs, policy_state, is_first, mode)
        return action, policy_state, {}


class GroupActor:
    """Acts for one group: holds its policy state and generator; on CUDA it replays a CUDA graph."""

    def __init__(
        self,
        evolution: Evolvable,
        candidates: torch.Tensor,
        group: RolloutGroup,
        *,
        device: torch.device,
        seed: int,
        capture: bool,
    ) -> None:
        self.group = group
        self.policy = PopulationPolicy(evolution, candidates, group.environment.num_envs)
        self._runner = ActRunner(self.policy, device=device, capture=capture)
        self._mode = ActMode(sample=True, generator=torch.Generator(device).manual_seed(seed))
        self._state: dict[str, torch.Tensor] | None = None

    def send(self, obs: dict[str, np.ndarray], is_first: np.ndarray) -> None:
        """Act on the received observations and send the actions to the group's workers."""
        if self.group.changed:
            self.policy.assign(self.group.candidates)
            self.group.changed = False
        action, self._state, _, _ = self._runner(obs, self._state, is_first, self._mode)
        self.group.environment.step_async(action)


# ---------------------------------------------------------------- progress


REPORT_SECONDS = 10.0  # at most one line in this time; longer generations also report their progress
RECENT = 20  # generations from which the remaining time is estimated


class EvolutionProgress:
    """Metrics and status lines of one hook's generations: best, mean, spread, evaluations per second, ETA."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.say = say
        self.clock = clock
        self._reported_at = clock()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._started_at = 0.0
        self._number = 0
        self._total: int | None = None
        self._rollouts = 0
        self._finished = 0
        self._stopped = 0

    def begin(self, number: int, total: int | None, rollouts: int) -> None:
        """Start a generation; `number` counts from 1."""
        if number <= self._number:  # another phase
            self._seconds.clear()
        self._number, self._total, self._rollouts = number, total, rollouts
        self._finished = self._stopped = 0
        self._started_at = self.clock()

    def rollout_finished(self, item: Any) -> None:
        self._finished += 1
        self._stopped += int(item.stopped)
        now = self.clock()
        if now - max(self._reported_at, self._started_at) >= REPORT_SECONDS:
            rate = self._finished / (now - self._started_at)
            left = (self._rollouts - self._finished) / rate
            self._report(
                f"{self._name()}: {self._finished} of {self._rollouts} rollouts · {rate:.2f} evaluations/s · "
                f"{clock_time(left)} left"
            )

    def end(self, fitness: torch.Tensor, steps: int) -> dict[str, float]:
        """End the generation; return its metrics. fitness: (P,); steps: real or imagined."""
        seconds = max(self.clock() - self._started_at, 1e-9)
        self._seconds.append(seconds)
        metrics = {
            "generation": float(self._number),
            "best": float(fitness.max()),
            "mean": float(fitness.mean()),
            "worst": float(fitness.min()),
            "spread": float(fitness.std(correction=0)),
            "evaluations_per_second": self._rollouts / seconds,
            "steps_per_second": steps / seconds,
            "steps_per_evaluation": steps / self._rollouts,
            "stopped_early": self._stopped / self._rollouts,
        }
        left = self.seconds_left()
        if left is not None:
            metrics["seconds_left"] = left
        if self.clock() - self._reported_at >= REPORT_SECONDS or self._number in (1, self._total):
            self._report(
                f"{self._name()}: best {metrics['best']:.1f} · mean {metrics['mean']:.1f} ± {metrics['spread']:.1f} · "
                f"{metrics['evaluations_per_second']:.2f} evaluations/s · {metrics['steps_per_second']:,.0f} steps/s"
                + ("" if left is None else f" · ETA {clock_time(left)}")
            )
        return metrics

    def seconds_left(self) -> float | None:
        """Return the estimated time until the last generation of the phase."""
        if self._total is None or not self._seconds:
            return None
        return max(0, self._total - self._number) * sum(self._seconds) / len(self._seconds)

    def _name(self) -> str:
        return f"generation {self._number}" + (f"/{self._total}" if self._total else "")

    def _report(self, line: str) -> None:
        self._reported_at = self.clock()
        self.say(line)
