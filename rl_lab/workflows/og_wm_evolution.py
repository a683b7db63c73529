"""Evolving the controller: what CMA-ES proposes, played in the environment or inside M's dream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rl_lab.records import ActMode, Batch
from rl_lab.utils.seeding import derive_seed
from rl_lab.workflows.base import PhaseConfig, PolicyState

if TYPE_CHECKING:
    from rl_lab.workflows.og_wm import OriginalWorldModelsWorkflow

ALIVE_CHECK = 32  # dreamed steps between looks whether any dream goes on


class ControllerEvolution:
    """The `step` of the hook `evolve` (see orchestration/evolution.py). Its strategy is shared by both hooks.

    When another phase begins to evolve (or the same one in the next round of a group), V and M may have changed: the
    strategy starts anew around the controller as it is.
    """

    dreams = False

    def __init__(self, workflow: OriginalWorldModelsWorkflow, seed: int) -> None:
        self.workflow = workflow
        self.seed = seed
        settings = workflow.settings.evolution
        self.episodes_per_candidate = settings.episodes
        self.num_envs = settings.num_envs
        self.common_episodes = settings.common_episodes
        self.early_stop = settings.early_stop

    # ---------------------------------------------------------------- ask, act, tell

    def begin(self, phase: PhaseConfig) -> None:
        """Before every generation."""
        workflow = self.workflow
        workflow.temperature = workflow.phase_value(phase, "algorithm.temperature")
        stage = f"{phase['name']}/{phase['iteration']}"
        if stage != workflow.evolving:
            workflow.evolving = stage
            workflow.cma_es.start(workflow.controller.get_vector(), derive_seed(self.seed, stage))

    def ask(self) -> torch.Tensor:
        candidates: torch.Tensor = self.workflow.cma_es.ask()
        return candidates.to(self.workflow.device)

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return self.workflow.initial_policy_state(num_envs)

    def act(
        self,
        candidates: torch.Tensor,  # (N, D), one for each environment
        obs: dict[str, torch.Tensor],
        policy_state: PolicyState,
        is_first: torch.Tensor,
        mode: ActMode,
    ) -> tuple[torch.Tensor, PolicyState]:
        """One pass of V and M for all, and all controllers as one batched product."""
        workflow = self.workflow
        z = workflow.see(obs, workflow._latent_noise(len(is_first), mode))["z"]
        memory = workflow.recall(policy_state, is_first)
        action = workflow.controller.act_population(candidates, workflow.features(z, memory))
        return action, {**memory, "z": z, "action": action}

    def tell(self, candidates: torch.Tensor, fitness: torch.Tensor) -> dict[str, float]:
        """The strategy learns, and the controller becomes the centre of its distribution."""
        strategy, controller = self.workflow.cma_es, self.workflow.controller
        strategy.tell(fitness)
        controller.set_vector(strategy.mean)
        return {"step_size": strategy.step_size, "weight_norm": float(controller.get_vector().norm())}

    # ---------------------------------------------------------------- checkpoint

    def get_state(self) -> dict[str, Any]:
        workflow = self.workflow
        strategy = workflow.cma_es.get_state() if workflow.evolving else {}
        return {"stage": workflow.evolving, "strategy": strategy}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.workflow.evolving = str(state["stage"])
        if self.workflow.evolving:
            self.workflow.cma_es.set_state(state["strategy"])


class DreamEvolution(ControllerEvolution):
    """The `step` of `evolve_in_dream`: nothing but M is played; every candidate dreams from the same beginnings."""

    dreams = True

    @torch.no_grad()
    def evaluate(
        self, candidates: torch.Tensor, batch: Batch, generator: torch.Generator
    ) -> tuple[torch.Tensor, int]:
        """candidates: (P, D); batch: (E, T) rows to begin after -> mean dreamed return (P,), and dreamed steps.

        A dream ends where the end is more likely than not. Beginnings and noise are common to all candidates.
        """
        workflow = self.workflow
        count = len(candidates)
        start = workflow.dream_start(batch, generator=generator)
        episodes = len(start["z"])
        state = {
            key: value.repeat(count, 1) for key, value in start.items()
        }  # (P·E, …), candidate by candidate
        # One that begins where an episode ended brings nothing, to any candidate.
        alive = (~batch.terminated[:, -1]).float().repeat(count)
        returns = torch.zeros_like(alive)
        steps = torch.zeros((), device=workflow.device)
        for step in range(workflow.settings.imagination_horizon):
            features = workflow.features(state["z"], state).unflatten(0, (count, episodes))
            action = workflow.controller.act_population(candidates, features).flatten(0, 1)
            uniform, normal = workflow.dream_noise(episodes, generator)
            noise = (uniform.repeat(count, 1), normal.repeat(count, 1))
            state, reward, done = workflow.dream_latent(state, action, noise)
            steps += alive.sum()
            returns += reward * alive
            alive = alive * (done <= 0).float()
            if step % ALIVE_CHECK == ALIVE_CHECK - 1 and not bool(alive.any()):
                break
        return returns.view(count, episodes).mean(1), int(steps)
