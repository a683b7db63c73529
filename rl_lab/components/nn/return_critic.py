"""A critic on a tokenizer's codes, which makes the tokenizer value-aware."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.losses import masked_mean


class ReturnCritic(nn.Module):
    """Predicts the discounted return of the next rewards from the codes of a frame.

    Its gradient reaches the encoder through the codes, so that these keep what rewards depend on, even if it
    is a few pixels. It needs sequences: row t of a batch has the target
    r[t+1] + discount · r[t+2] + … + discount^(horizon-1) · r[t+horizon]. Nothing follows a termination; rows
    whose next `horizon` rows are not all known have no target.

    features: width of all codes of a frame; the tokenizer sets it
    """

    def __init__(
        self,
        features: int,
        *,
        weight: float = 1.0,
        horizon: int = 5,
        discount: float = 0.95,
        units: int = 128,
    ) -> None:
        super().__init__()
        self.weight, self.horizon, self.discount = weight, horizon, discount
        self.net = nn.Sequential(
            nn.Linear(features, units), nn.SiLU(), nn.Linear(units, units), nn.SiLU(), nn.Linear(units, 1)
        )

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """(…, features) -> predicted returns (…)."""
        return self.net(codes).squeeze(-1).float()

    def targets(
        self,
        reward: torch.Tensor,  # (B, T)
        terminated: torch.Tensor,  # (B, T) bool
        mask: torch.Tensor | None = None,  # (B, T) bool: rows that are real
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (B, T - horizon) of the first rows, and a mask of those that are known."""
        rows = reward.shape[1] - self.horizon
        real = torch.ones_like(terminated) if mask is None else mask
        known = real[:, :rows]
        alive = known & ~terminated[:, :rows]
        total = torch.zeros_like(reward[:, :rows])
        for step in range(1, self.horizon + 1):
            here = slice(step, step + rows)
            total = total + self.discount ** (step - 1) * reward[:, here] * (alive & real[:, here])
            known = known & (real[:, here] | ~alive)  # after the end there need not be a row
            alive = alive & ~terminated[:, here]
        return total, known

    def loss(
        self,
        codes: torch.Tensor,  # (B, T, features)
        reward: torch.Tensor,  # (B, T)
        terminated: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Weighted squared error, 0-d."""
        target, known = self.targets(reward, terminated, mask)
        error = (self(codes[:, : target.shape[1]]) - target).square()
        return self.weight * masked_mean(error, known)
