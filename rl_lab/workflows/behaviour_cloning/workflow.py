"""Behaviour cloning: actions of demonstrations by regression, or as a mixture of Gaussians. The baseline beside
Diffusion Policy, with the same data, observations and execution (imitation.py).
"""

from __future__ import annotations

import torch

from rl_lab.records import ActMode
from rl_lab.workflows.behaviour_cloning.settings import BehaviourCloningSettings
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.imitation import ImitationWorkflow, Tensors, Windows


class BehaviourCloningWorkflow(ImitationWorkflow):
    """Controller `policy`: MLPPolicy, MixturePolicy, or another with their `loss` and `act`."""

    settings_type: type[BehaviourCloningSettings] = BehaviourCloningSettings

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        context.controller("policy", "loss", "act", "update_slow")

    def _loss(self, windows: Windows, features: torch.Tensor, noise: Tensors) -> torch.Tensor:
        loss: torch.Tensor = self.policy.loss(features, windows.action)
        return loss

    def _plan(self, features: torch.Tensor, mode: ActMode, needed: torch.Tensor) -> torch.Tensor:
        action: torch.Tensor = self.policy.act(features, mode.generator, mode.sample)
        return action
