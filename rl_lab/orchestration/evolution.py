"""Ask, evaluate, tell: one generation of an `evolve` hook.

The workflow proposes candidates and learns from their fitness; playing them is done here, all candidates at
once: each environment carries one candidate's parameters, and one forward pass acts for all of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.records import ActMode
from rl_lab.utils.seeding import derive_seed


class Evolution(Protocol):
    """The `step` of a hook of kind "evolve"."""

    episodes_per_candidate: int

    def ask(self) -> torch.Tensor:
        """Candidates of this generation, (P, D)."""
        ...

    def act(
        self, candidates: torch.Tensor, obs: Any, policy_state: Any, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, Any]:
        """Actions for N environments, each with its own candidate: candidates (N, D)."""
        ...

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]: ...

    def tell(self, candidates: torch.Tensor, fitness: torch.Tensor) -> dict[str, float]:
        """Learn from the fitness (P,), higher is better; returns metrics. Dreams may ignore `fitness`."""
        ...


@torch.no_grad()
def evaluate_population(
    evolution: Evolution,
    candidates: torch.Tensor,
    environment: Any,  # VectorEnv
    *,
    device: torch.device | str,
    seed: int,
) -> tuple[torch.Tensor, int]:
    """Mean return of each candidate over its episodes, (P,), and the environment steps it took.

    Environment i plays jobs i, i+n, … of the list (candidate, episode): a fixed order, so that the result
    does not depend on which environment is quicker.
    """
    n, population = environment.num_envs, candidates.shape[0]
    jobs = [index % population for index in range(population * evolution.episodes_per_candidate)]
    queue = [jobs[env::n] for env in range(n)]
    returns = np.zeros(n)
    fitness = np.zeros(population)
    mode = ActMode(sample=True, generator=torch.Generator(device).manual_seed(derive_seed(seed, "evolve")))
    obs, _ = environment.reset(seed=seed)
    is_first = np.ones(n, dtype=bool)
    state = evolution.initial_policy_state(n)
    steps = 0
    while any(queue):
        current = [waiting[0] if waiting else 0 for waiting in queue]
        tensors = {key: torch.as_tensor(value).to(device) for key, value in obs.items()}
        flags = torch.as_tensor(is_first).to(device)
        action, state = evolution.act(candidates[current], tensors, state, flags, mode)
        obs, reward, terminated, truncated, _ = environment.step(action.cpu().numpy())
        is_first = environment.is_first
        returns += reward
        steps += int(sum(1 for env in range(n) if queue[env] and not is_first[env]))
        for env in np.flatnonzero(terminated | truncated):
            if queue[env]:
                fitness[queue[env].pop(0)] += returns[env]
            returns[env] = 0.0
    mean = fitness / evolution.episodes_per_candidate
    return torch.as_tensor(mean, dtype=torch.float32), steps
