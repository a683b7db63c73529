"""Losses of TD-MPC2 as pure functions (Hansen et al. 2024, equations 3 to 5; nicklashansen/tdmpc2 tdmpc2.py).

Time is the first dimension: H steps, B sequences. Step t leads from latent t to latent t+1 and has the reward
and termination that arrive with latent t+1. A sequence may be shorter than H steps: what is behind its end is
multiplied by 0 (`RealRows`), and the divisors stay H and B, so each real step has the same weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from rl_lab.records import Batch
from rl_lab.utils.ranks import rows_of_ranks

Losses = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RealRows:
    """Which steps and latents of padded sequences are trained: 1 or 0; the losses have fixed shapes."""

    steps: torch.Tensor  # (H, B): both rows of the step are real
    states: torch.Tensor  # (H + 1, B): a real row in which an action is taken, so not a terminal one

    @classmethod
    def of(cls, batch: Batch) -> RealRows | None:
        """None without padding: every row counts."""
        if batch.mask is None:
            return None
        mask = batch.mask.t()
        return cls(mask[1:].float(), (mask & ~batch.terminated.t()).float())


def mean_over(values: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Mean of the values whose `real` is 1, or of all: 0-d."""
    if real is None:
        return values.mean()
    return (values * real).sum() / real.expand_as(values).sum().clamp(min=1.0)


def td_target(
    reward: torch.Tensor,  # (H, B)
    terminated: torch.Tensor,  # (H, B) bool
    value: torch.Tensor,  # (H, B) of the next observation
    discount: torch.Tensor | float,  # 0-d, or (B,)
) -> torch.Tensor:
    """One-step TD target: reward + γ (1 − terminated) value. A truncated episode still bootstraps."""
    return reward + discount * value.masked_fill(terminated, 0.0)


def over_time(loss: torch.Tensor, weight: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
    """Σ_t weight_t loss_t: (H, B) and weights (H,) -> (B,). The weights are powers of ρ. real: (H, B)"""
    loss = loss if real is None else loss * real
    return (loss * weight.unsqueeze(1)).sum(0)


def total_loss(
    losses: Mapping[str, torch.Tensor],  # (B,) each
    scales: Mapping[str, float],
    *,
    limit: float = 0.0,
    weight: torch.Tensor | None = None,  # (B,)
) -> torch.Tensor:
    """Mean over the batch of Σ scale × loss. limit: maximum of each loss (0: none); weight: of replay."""
    parts = [(loss.clamp(max=limit) if limit else loss) * scales[name] for name, loss in losses.items()]
    joint = torch.stack(parts).sum(0)
    return joint.mean() if weight is None else (joint * weight).mean()


def policy_loss(
    value: torch.Tensor,  # (H + 1, B) Q of the policy's actions, divided by the value scale
    entropy: torch.Tensor,  # (H + 1, B)
    entropy_scale: torch.Tensor | float,
    weight: torch.Tensor,  # (H + 1,)
    real: torch.Tensor | None = None,  # (H + 1, B)
) -> torch.Tensor:
    """Policy objective: mean over time of weight_t × mean over the batch of −(Q + η entropy)."""
    objective = value + entropy_scale * entropy
    objective = objective if real is None else objective * real
    return -(objective.mean(1) * weight).mean()


class RunningScale(nn.Module):
    """Value scale: moving average of max(1, 95th − 5th percentile) (nicklashansen/tdmpc2 common/scale.py).

    It starts at 1. Dreamer's ReturnNormalizer averages the two percentiles and then clips their difference;
    here the clipped difference is averaged.
    """

    value: torch.Tensor
    percentiles: torch.Tensor

    def __init__(self, *, rate: float = 0.01, low: float = 0.05, high: float = 0.95) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("value", torch.ones(()))
        self.register_buffer("percentiles", torch.tensor([low, high]), persistent=False)

    @torch.no_grad()
    def update(self, values: torch.Tensor) -> torch.Tensor:
        """Update with values of any shape; returns the scale to divide by (0-d)."""
        joint = rows_of_ranks(values.float().flatten())
        low, high = torch.quantile(joint, self.percentiles).unbind()
        moved = self.value.lerp((high - low).clamp(min=1.0), self.rate)
        # Non-finite values of a masked update must not enter the average.
        self.value.copy_(torch.where(torch.isfinite(moved), moved, self.value))
        return self.value.clone()
