"""TD-MPC2's dynamics: the next latent from latent and action, on the simplices of SimNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.components.nn.normed_mlp import NormedMLP
from rl_lab.components.nn.simnorm import GROUP
from rl_lab.records import Spec


class LatentDynamics(nn.Module):
    """next = SimNorm(LayerNorm(MLP(latent, action))).

    context:  width of what stands beside the action (a task's embedding)
    out:      how the last layer ends; `plain` leaves the latent unbounded, as TD-MPC's first version does
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
        """latent: (…, L), control: (…, A + context) -> next latent (…, L); out: (R, L) where it is to be written."""
        return self.mlp(latent, control, out=out)
