"""Candidates at play: every environment carries one candidate's parameters, and one forward pass acts for all of them.

The environments come in groups that take turns: while one group's workers step, the policy acts for the next (on CUDA
as one recorded graph, and the host waits for nothing but the actions). What is played does not depend on how quick
anything is: rollouts are dealt out in lock step, each with a seed of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_lab.orchestration.act_runner import ActRunner
from rl_lab.records import ActMode, EarlyStop
from rl_lab.utils.seeding import derive_seed


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
