"""Random actions without learning: to collect data, and as the baseline that an algorithm must beat."""

from __future__ import annotations

import torch

from rl_lab.records import ActMode, Hook
from rl_lab.workflows.base import PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.settings import NoSettings


class RandomWorkflow(WorldModelWorkflow):
    """Needs one controller `policy`: RandomPolicyController or any other with `act(obs, mode)`."""

    settings_type = NoSettings

    def initialize(self, context: WorkflowContext) -> None:
        self.policy = context.controller("policy", "act")

    def hooks(self) -> dict[str, Hook]:
        return {}

    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        return self.policy.act(obs, mode), policy_state, {}
