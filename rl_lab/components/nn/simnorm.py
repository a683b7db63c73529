"""Simplicial normalisation: a latent vector as groups of probabilities (Lavoie et al. 2023; TD-MPC2, equation 5)."""

from __future__ import annotations

import torch
from torch import nn

GROUP = 8  # nicklashansen/tdmpc2 config.yaml: simnorm_dim


def simnorm(x: torch.Tensor, group: int = GROUP) -> torch.Tensor:
    """Softmax inside each group of neighbours: (…, L) -> (…, L), every group summing to 1."""
    return torch.softmax(x.unflatten(-1, (-1, group)), -1).flatten(-2)


class SimNorm(nn.Module):
    """`simnorm` as a module. It bounds the latent, so that a rollout of the dynamics cannot run away."""

    def __init__(self, group: int = GROUP) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, L), L divisible by the group -> (…, L)."""
        return simnorm(x, self.group)

    def extra_repr(self) -> str:
        return f"group={self.group}"
