"""Deterministic dynamics: the next latent is a function of the latent and the action."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.normed_mlp import GROUP, NormedMLP
from rl_lab.records import Spec


class DeterministicMLP(nn.Module):
    """next = latent + MLP(latent, action), or MLP(latent, action) with `residual=False`."""

    def __init__(
        self, latent_dim: int, action_dim: int, *, units: int = 256, layers: int = 2, residual: bool = True
    ) -> None:
        super().__init__()
        self.residual = residual
        self.mlp = MLP(latent_dim + action_dim, units, layers, outputs=latent_dim)

    def forward(self, latent: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """latent: (…, L), action: (…, A) continuous or one-hot -> next latent (…, L)."""
        change = self.mlp(torch.cat([latent, action.to(latent.dtype)], -1))
        return latent + change if self.residual else change

    def imagine(self, latent: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """Rollout: latent (B, L), actions (B, H, A) -> latents (B, H+1, L), starting with the given one."""
        latents = [latent]
        for action in actions.unbind(1):
            latents.append(self(latents[-1], action))
        return torch.stack(latents, 1)


class LatentDynamics(nn.Module):
    """Dynamics of TD-MPC2: next = SimNorm(LayerNorm(MLP(latent, action))).

    context:  width of the task embedding that is concatenated to the action
    out:      kind of the last layer; `plain` leaves the latent unbounded, as in the first TD-MPC
    """

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        out: str = "norm+simnorm",
        init: str = "normal",
        group: int = GROUP,
    ) -> None:
        super().__init__()
        inputs = [latent, spec.action.size + context]
        self.mlp = NormedMLP(inputs, units, latent, hidden=hidden, out=out, init=init, group=group)

    def forward(
        self, latent: torch.Tensor, control: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """latent: (…, L), control: (…, A + context) -> next latent (…, L), also in `out` (R, L) if given."""
        return self.mlp(latent, control, out=out)
