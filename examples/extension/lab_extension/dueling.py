"""A network that says apart how good a state is, and how much better each action is than the others."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.mlp import MLP


class DuelingNetwork(nn.Module):
    """Values of all actions: state value plus advantages, whose mean is 0 (Wang et al., 2016, equation 9)."""

    def __init__(self, inputs: int, actions: int, *, units: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.body = MLP(inputs, units, layers)
        self.value = nn.Linear(units, 1)
        self.advantage = nn.Linear(units, actions)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        """(…, inputs) -> (…, actions)"""
        hidden = self.body(observation)
        advantage = self.advantage(hidden)
        return self.value(hidden) + advantage - advantage.mean(-1, keepdim=True)
