"""Actions as a network sees them."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.kernels.normal_action import limit_action
from rl_lab.records import ActionSpec


class ActionEncoder(nn.Module):
    """Discrete choices become one-hot vectors side by side; continuous actions stay, limited to [-1, 1]."""

    variable: torch.Tensor
    choice: torch.Tensor

    def __init__(self, action: ActionSpec) -> None:
        super().__init__()
        self.kind = action.kind
        self.out_features = action.size
        # Output i of a discrete encoding asks: is variable[i] of the action equal to choice[i]?
        pairs = [(v, c) for v, count in enumerate(action.choices) for c in range(count)]
        self.register_buffer(
            "variable", torch.tensor([v for v, _ in pairs], dtype=torch.int64), persistent=False
        )
        self.register_buffer(
            "choice", torch.tensor([c for _, c in pairs], dtype=torch.int64), persistent=False
        )

    def forward(self, action: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """action: (…), (…, k) integers or (…, d) floats, as stored -> (…, size) of `dtype`."""
        if self.kind == "continuous":
            return limit_action(action, dtype)
        if self.kind == "discrete":
            return (action.unsqueeze(-1) == self.choice).to(dtype)
        return (action[..., self.variable] == self.choice).to(dtype)
