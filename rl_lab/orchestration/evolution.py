"""Ask, evaluate, tell: the generations of `evolve` hooks.

The workflow proposes candidates and learns from their fitness. Playing them in the environment is done here
(population.py); a workflow whose candidates only dream evaluates them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from rl_lab.errors import ConfigError
from rl_lab.orchestration.evolution_progress import EvolutionProgress
from rl_lab.orchestration.population import Interrupted, evaluate_population
from rl_lab.records import ActMode, Batch
from rl_lab.utils.seeding import derive_seed

__all__ = ["Evolution", "Generations", "evaluate_population"]

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
