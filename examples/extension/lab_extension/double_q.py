"""Double Q-learning, written the fast way: `act` for the Collector, and one pure hook that a CUDA graph can hold."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rl_lab.components.nn.training_step import NonFiniteGuard, optimizer_step
from rl_lab.records import ActMode, Batch, BatchSpec, Hook, UpdateResult
from rl_lab.workflows import read_settings
from rl_lab.workflows.base import PhaseConfig, PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext


@dataclass(frozen=True)
class DoubleQSettings:
    """The keys of `algorithm`."""

    batch_size: int
    batch_length: int
    discount: float
    target_rate: float
    least_epsilon: float


class DoubleQWorkflow(WorldModelWorkflow):
    """Component `q_network`: vector observations in, values of discrete actions out."""

    settings_type = DoubleQSettings

    def initialize(self, context: WorkflowContext) -> None:
        self.network = context.component("q_network", "forward")
        self.optimizer = context.optimizer("q_network")
        self.target = copy.deepcopy(self.network).requires_grad_(False)
        self.guard = NonFiniteGuard().to(context.device)
        self.settings = s = read_settings(DoubleQSettings, context.config.algorithm, "algorithm")
        # Two rows are one transition; within one episode, so that what follows really followed.
        self.batch = BatchSpec(s.batch_size, s.batch_length + 1, boundary="within")

    def hooks(self) -> dict[str, Hook]:
        return {"update": Hook(self.update, batch=self.batch)}

    def collect_mode(self, phase: PhaseConfig) -> ActMode:
        """From all random to nearly none over the first half of the phase."""
        return ActMode(epsilon=max(self.settings.least_epsilon, 1.0 - 2.0 * phase["progress"]))

    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        values = self.network(obs["vector"])  # (N, actions)
        best = values.argmax(-1)
        chance = torch.rand(2, *best.shape, device=best.device, generator=mode.generator)
        anything = (chance[0] * values.shape[-1]).long()
        return torch.where(chance[1] < mode.epsilon, anything, best), policy_state, {}

    def update(self, batch: Batch, scalars: Mapping[str, Any], noise: Mapping[str, Any]) -> UpdateResult:
        """A pure function of tensors with fixed shapes: no host reads, no branches on values."""
        step = batch.transitions()
        chosen = self.network(step["observations"]).gather(-1, step["actions"][..., None])[..., 0]
        with torch.no_grad():
            best = self.network(step["next_observations"]).argmax(-1, keepdim=True)
            following = self.target(step["next_observations"]).gather(-1, best)[..., 0]
            goal = step["rewards"] + self.settings.discount * following * ~step["terminated"]
        loss = F.smooth_l1_loss(chosen, goal)
        metrics, _ = optimizer_step(
            loss, [self.optimizer], {"q_network": list(self.network.parameters())}, guard=self.guard
        )
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.network.parameters()):
                slow.lerp_(fast, self.settings.target_rate)
        return UpdateResult({"loss": loss.detach(), "value": chosen.detach().mean(), **metrics})

    def get_state(self) -> dict[str, Any]:
        return {"target": self.target.state_dict(), "guard": self.guard.state_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.target.load_state_dict(state["target"])
        self.guard.load_state_dict(state["guard"])
