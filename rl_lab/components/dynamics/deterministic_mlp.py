"""The simplest dynamics: the next latent is a function of this one and the action."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.mlp import MLP


class DeterministicMLP(nn.Module):
    """next = latent + MLP(latent, action), or the MLP alone with `residual=False`."""

    def __init__(
        self, latent_dim: int, action_dim: int, *, units: int = 256, layers: int = 2, residual: bool = True
    ) -> None:
        super().__init__()
        self.residual = residual
        self.mlp = MLP(latent_dim + action_dim, units, layers, outputs=latent_dim)

    def forward(self, latent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """latent: (…, L), action: (…, A) as numbers or one-hot -> next latent (…, L)."""
        change = self.mlp(torch.cat([latent, action.to(latent.dtype)], -1))
        return latent + change if self.residual else change

    def imagine(self, latent: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """A rollout: latent (B, L), actions (B, H, A) -> latents (B, H+1, L), the first being the given one."""
        latents = [latent]
        for action in actions.unbind(1):
            latents.append(self(latents[-1], action))
        return torch.stack(latents, 1)
