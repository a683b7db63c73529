"""Ask, evaluate, tell: the generations of `evolve` hooks.

The workflow proposes candidates and learns from their fitness. Playing them in the environment is done here
(population.py); a workflow whose candidates only dream evaluates them itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.errors import ConfigError
from rl_lab.orchestration.collector import ActRunner
from rl_lab.records import ActMode, Batch, EarlyStop
from rl_lab.utils.progress import clock_time
from rl_lab.utils.seeding import derive_seed

# --------------------
# Candidates at play: every environment carries one candidate's parameters, and one forward pass acts for all of them.
#
# The environments come in groups that take turns: while one group's workers step, the policy acts for the next (on CUDA
# as one recorded graph, and the host waits for nothing but the actions). What is played does not depend on how quick
# anything is: rollouts are dealt out in lock step, each with a seed of its own.


@dataclass(frozen=True)
class Rollout:
    """One episode of one candidate."""

    candidate: int
    seed: int


@dataclass
class Played:
    """A rollout that has ended."""

    rollout: Rollout
    episode_return: float
    steps: int
    stopped: bool  # ended early, as hopeless


class Group:
    """Some environments (a VectorEnv) and the rollouts that they play.

    An environment that offers `schedule(seeds)` begins each rollout with its own seed, ends hopeless ones, and rests
    when nothing is left to play. One that does not plays the episodes it comes to, to their end.
    """

    def __init__(self, environment: Any, waiting: deque[Rollout], early_stop: EarlyStop) -> None:
        self.environment = environment
        self.waiting = waiting
        self.early_stop = early_stop
        n = environment.num_envs
        self.schedules = hasattr(environment, "schedule")
        self.playing: list[Rollout | None] = [None] * n
        self.candidates = np.zeros(n, np.int64)  # that each environment carries
        self.changed = True  # the candidates, since they were last looked at
        self._begun = np.zeros(n, bool)  # its rollout's first row has arrived
        self._returns = np.zeros(n)
        self._steps = np.zeros(n, np.int64)
        self._stale = np.zeros(n, np.int64)  # steps since the last reward that counts
        self._stale_return = np.zeros(n)

    @property
    def busy(self) -> bool:
        return any(rollout is not None for rollout in self.playing)

    def start(self, seed: int) -> None:
        """Deal out the first rollouts; the step that begins them is on its way afterwards."""
        environment = self.environment
        if not self.schedules or not environment.last_obs:
            environment.reset(seed=seed)
        self._deal(range(environment.num_envs))
        if not self.busy:
            return
        if self.schedules:
            environment.step_async(np.zeros(environment.action_space.shape, environment.action_space.dtype))
        else:
            self._begun[:] = True

    def receive(self, first: bool) -> tuple[dict[str, np.ndarray], np.ndarray, list[Played]]:
        """Observations and `is_first` to act on, and the rollouts that ended. first: right after `start`."""
        environment = self.environment
        if first and not self.schedules:
            return environment.last_obs, environment.is_first, []
        obs, reward, terminated, truncated, _ = environment.step_wait()
        is_first = np.array(environment.is_first)
        counted = self._begun & ~is_first
        self._begun |= is_first
        self._returns += np.where(counted, reward, 0.0)
        self._steps += counted
        progress = reward > self.early_stop.reward_above
        self._stale = np.where(progress | ~counted, 0, self._stale + 1)
        self._stale_return = np.where(progress | ~counted, 0.0, self._stale_return + reward)
        ended = np.asarray(terminated | truncated)
        hopeless = np.zeros_like(ended)
        if self.schedules and self.early_stop.patience:
            hopeless = ~ended & (self._stale >= self.early_stop.patience)
        over = [int(env) for env in np.flatnonzero((ended | hopeless) & self._begun) if self.playing[env]]
        played = [self._finish(env, bool(hopeless[env])) for env in over]
        self._deal(over)
        return obs, is_first, played

    def _finish(self, env: int, stopped: bool) -> Played:
        rollout = self.playing[env]
        assert rollout is not None
        total = float(self._returns[env])
        left = self.early_stop.horizon - int(self._steps[env])
        if stopped and left > 0:
            total += left * float(self._stale_return[env] / self._stale[env])
        return Played(rollout, total, int(self._steps[env]), stopped)

    def _deal(self, envs: Sequence[int] | range) -> None:
        """The next rollouts for these environments, or rest."""
        seeds: dict[int, int | None] = {}
        for env in envs:
            rollout = self.waiting.popleft() if self.waiting else None
            self.playing[env] = rollout
            self._begun[env] = not self.schedules
            self._returns[env] = self._steps[env] = self._stale[env] = self._stale_return[env] = 0
            seeds[int(env)] = rollout.seed if rollout else None
            if rollout:
                self.candidates[env] = rollout.candidate
                self.changed = True
        if self.schedules and seeds:
            self.environment.schedule(seeds)


class Crowd:
    """The candidates that a group's environments carry, as the one policy that acts for all of them."""

    def __init__(self, evolution: Any, candidates: torch.Tensor, num_envs: int) -> None:
        self.evolution = evolution
        self.candidates = candidates  # (P, D)
        self.carried = candidates.new_zeros(num_envs, candidates.shape[1])  # at an address that stays
        self.act_captures = bool(getattr(evolution, "act_captures", True))

    def carry(self, which: np.ndarray) -> None:
        """which: (N,), the candidate of each environment."""
        self.carried.copy_(self.candidates[torch.from_numpy(which).to(self.candidates.device)])

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.evolution.initial_policy_state(num_envs)
        return state

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: ActMode) -> tuple[Any, Any, Any]:
        action, policy_state = self.evolution.act(self.carried, obs, policy_state, is_first, mode)
        return action, policy_state, {}


class Actor:
    """A group's crowd at work: its memory, its random numbers, and its step as a recorded graph where there is CUDA."""

    def __init__(
        self,
        evolution: Any,
        candidates: torch.Tensor,
        group: Group,
        *,
        device: torch.device,
        seed: int,
        capture: bool,
    ) -> None:
        self.group = group
        self.crowd = Crowd(evolution, candidates, group.environment.num_envs)
        self._runner = ActRunner(self.crowd, device=device, capture=capture)
        self._mode = ActMode(sample=True, generator=torch.Generator(device).manual_seed(seed))
        self._state: dict[str, torch.Tensor] | None = None

    def send(self, obs: dict[str, np.ndarray], is_first: np.ndarray) -> None:
        """Act on what was received; the group's workers step."""
        if self.group.changed:
            self.crowd.carry(self.group.candidates)
            self.group.changed = False
        action, self._state, _, _ = self._runner(obs, self._state, is_first, self._mode)
        self.group.environment.step_async(action)


@torch.no_grad()
def evaluate_population(
    evolution: Any,  # see evolution.py
    candidates: torch.Tensor,  # (P, D)
    environments: Any,  # a VectorEnv, or several that take turns
    *,
    device: torch.device | str,
    seed: int,
    on_rollout: Callable[[Played], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    capture: bool = True,  # replay acting as a CUDA graph, where there is CUDA
) -> tuple[torch.Tensor, int]:
    """Mean return of each candidate over its episodes, (P,), and the environment steps it took.

    Asked to stop, it raises Interrupted as soon as nothing is in flight.
    """
    vectors = [environments] if hasattr(environments, "num_envs") else list(environments)
    episodes = int(evolution.episodes_per_candidate)
    waiting = deque(
        make_rollouts(len(candidates), episodes, seed, getattr(evolution, "common_episodes", False))
    )
    groups = [Group(env, waiting, getattr(evolution, "early_stop", None) or EarlyStop()) for env in vectors]
    fitness = np.zeros(len(candidates))
    steps = 0
    actors = []
    for number, group in enumerate(groups):
        group.start(derive_seed(seed, "group", number))
        noise = derive_seed(seed, "evolve", number)
        actors.append(
            Actor(evolution, candidates, group, device=torch.device(device), seed=noise, capture=capture)
        )
    first = True
    while any(group.busy for group in groups):
        if should_stop is not None and should_stop():
            _settle(groups, first)
            raise Interrupted
        for group, actor in zip(groups, actors):
            if not group.busy:
                continue
            obs, is_first, played = group.receive(first)
            for item in played:
                fitness[item.rollout.candidate] += item.episode_return
                steps += item.steps
                if on_rollout is not None:
                    on_rollout(item)
            if group.busy:
                actor.send(obs, is_first)
        first = False
    return torch.as_tensor(fitness / episodes, dtype=torch.float64), steps


class Interrupted(Exception):
    """The generation was broken off; nothing of it is kept."""


def make_rollouts(population: int, episodes: int, seed: int, common: bool) -> list[Rollout]:
    """Episode by episode, all candidates. common: in each episode every candidate meets the same seed."""
    return [
        Rollout(
            candidate, derive_seed(seed, "episode", episode, *([] if common else [candidate])) & 0x7FFFFFFF
        )
        for episode in range(episodes)
        for candidate in range(population)
    ]


def _settle(groups: Sequence[Group], first: bool) -> None:
    """Take what is in flight, so that the environments can be used or closed."""
    for group in groups:
        if group.busy and (group.schedules or not first):
            group.environment.step_wait()


# --------------------
# How an evolution is going: generation, best, mean, spread, evaluations per second, time left.


SAY_SECONDS = 10.0  # at most one line in that time, and one about a generation that takes longer
RECENT = 20  # generations that the time left is reckoned from


class EvolutionProgress:
    """Counts one hook's generations; `say` gets a line about each, unless they are quicker than lines can be read."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.say = say
        self.clock = clock
        self._said = clock()
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._began = 0.0
        self._number = 0
        self._total: int | None = None
        self._rollouts = 0
        self._played = 0
        self._stopped = 0

    def begin(self, number: int, total: int | None, rollouts: int) -> None:
        """A generation begins; `number` counts from 1."""
        if number <= self._number:  # another phase
            self._seconds.clear()
        self._number, self._total, self._rollouts = number, total, rollouts
        self._played = self._stopped = 0
        self._began = self.clock()

    def played(self, item: Any) -> None:
        """One rollout has ended."""
        self._played += 1
        self._stopped += int(item.stopped)
        now = self.clock()
        if now - max(self._said, self._began) >= SAY_SECONDS:
            rate = self._played / (now - self._began)
            left = (self._rollouts - self._played) / rate
            self._say(
                f"{self._name()}: {self._played} of {self._rollouts} rollouts · {rate:.2f} evaluations/s · "
                f"{clock_time(left)} left of it"
            )

    def end(self, fitness: torch.Tensor, steps: int) -> dict[str, float]:
        """The generation is through; returns its metrics. fitness: (P,); steps: played or dreamed."""
        seconds = max(self.clock() - self._began, 1e-9)
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
        if self.clock() - self._said >= SAY_SECONDS or self._number in (1, self._total):
            self._say(
                f"{self._name()}: best {metrics['best']:.1f} · mean {metrics['mean']:.1f} ± {metrics['spread']:.1f} · "
                f"{metrics['evaluations_per_second']:.2f} evaluations/s · {metrics['steps_per_second']:,.0f} steps/s"
                + ("" if left is None else f" · ETA {clock_time(left)}")
            )
        return metrics

    def seconds_left(self) -> float | None:
        """Until the phase's last generation, at the recent pace."""
        if self._total is None or not self._seconds:
            return None
        return max(0, self._total - self._number) * sum(self._seconds) / len(self._seconds)

    def _name(self) -> str:
        return f"generation {self._number}" + (f"/{self._total}" if self._total else "")

    def _say(self, line: str) -> None:
        self._said = self.clock()
        self.say(line)


GROUPED_FROM = 4  # environments; fewer are not worth two groups that take turns


class Evolution(Protocol):
    """The `step` of a hook of kind "evolve".

    It may also have
        begin(phase)                        called before every generation, with the running phase
        num_envs: int                       environments to play in (else as many as training has)
        common_episodes: bool               in each episode all candidates meet the same seed
        early_stop: EarlyStop               when a rollout is hopeless (see records.py)
        act_captures = False                `act` cannot be recorded as a CUDA graph
        dreams = True, evaluate(candidates, batch, generator) -> (fitness (P,), dreamed steps)
                                            no environment is played; `batch` is what the hook's BatchSpec asks for
    """

    episodes_per_candidate: int

    def ask(self) -> torch.Tensor:
        """Candidates of this generation, (P, D). Asked again before `tell`, they are the same."""
        ...

    def act(
        self, candidates: torch.Tensor, obs: Any, policy_state: Any, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, Any]:
        """Actions for N environments, each with its own candidate: candidates (N, D)."""
        ...

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]: ...

    def tell(self, candidates: torch.Tensor, fitness: torch.Tensor) -> Mapping[str, float]:
        """Learn from the fitness (P,), higher is better; returns metrics."""
        ...


class Generations:
    """Runs the generations of a run, and keeps the environments that they are played in."""

    def __init__(
        self,
        make_environment: Callable[[int | None], Any] | None,  # number of environments -> VectorEnv
        *,
        seed: int,
        say: Callable[[str], None],
        capture: bool = True,  # of acting, where there is CUDA
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
        evolution: Any,
        *,
        number: int,  # of this hook's generations in the whole run: decides the seeds
        phase: Mapping[str, Any],
        done: int,  # generations of this phase
        total: int | None,
        device: torch.device,
        batch: Batch | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> tuple[dict[str, float], int] | None:
        """One generation: metrics and environment steps; None when it was broken off, and nothing of it counts."""
        if hasattr(evolution, "begin"):
            evolution.begin(phase)
        progress = self._progress.setdefault(name, EvolutionProgress(self.say))
        seed = derive_seed(self.seed, name, number)
        candidates = evolution.ask()
        rollouts = len(candidates) * int(evolution.episodes_per_candidate)
        progress.begin(done + 1, total, rollouts)
        if getattr(evolution, "dreams", False):
            generator = torch.Generator(device).manual_seed(seed)
            fitness, dreamed = evolution.evaluate(candidates, batch, generator)
            steps = 0
        else:
            environments = self._open(name, getattr(evolution, "num_envs", None))
            try:
                fitness, steps = evaluate_population(
                    evolution,
                    candidates,
                    environments,
                    device=device,
                    seed=seed,
                    on_rollout=progress.played,
                    should_stop=should_stop,
                    capture=self.capture,
                )
            except Interrupted:
                self.say(f"generation {done + 1} was broken off; it will be played again")
                return None
            dreamed = 0
        told = evolution.tell(candidates, fitness)
        return {**progress.end(fitness, steps or dreamed), **told}, steps

    def _open(self, name: str, num_envs: int | None) -> list[Any]:
        """Environments of that number, in two groups where there are enough."""
        if num_envs not in self._environments:
            if self.make_environment is None:
                raise ConfigError(f"hook '{name}' evolves in the environment, and there is none")
            sizes: list[int | None] = [num_envs]
            if num_envs is not None and num_envs >= GROUPED_FROM:
                sizes = [num_envs - num_envs // 2, num_envs // 2]
            self._environments[num_envs] = [self.make_environment(size) for size in sizes]
        return self._environments[num_envs]

    def close(self) -> None:
        for environments in self._environments.values():
            for environment in environments:
                environment.close()
        self._environments.clear()
