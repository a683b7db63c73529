"""The losses of TD-MPC as pure functions (Hansen et al. 2024, equations 3 to 5; nicklashansen/tdmpc2 tdmpc2.py).

Time first: H steps, B sequences. Step t goes from latent t to latent t+1; its reward and end are those that followed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

Losses = dict[str, torch.Tensor]


def td_target(
    reward: torch.Tensor,  # (H, B)
    terminated: torch.Tensor,  # (H, B) bool
    value: torch.Tensor,  # (H, B) of the following observation
    discount: torch.Tensor | float,  # one number, or (B,)
) -> torch.Tensor:
    """One step ahead: reward + γ (1 − terminated) value. Running out of time does not end what is to come."""
    return reward + discount * value.masked_fill(terminated, 0.0)


def over_time(loss: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(H, B) and weights (H,) -> (B,): Σ weight_t loss_t."""
    return (loss * weight.unsqueeze(1)).sum(0)


def total_loss(
    losses: Mapping[str, torch.Tensor],  # (B,) each
    scales: Mapping[str, float],
    *,
    limit: float = 0.0,
    weight: torch.Tensor | None = None,  # (B,)
) -> torch.Tensor:
    """Mean over the batch of Σ scale × loss; `limit` caps each loss of a sequence, `weight` is replay's."""
    parts = [(loss.clamp(max=limit) if limit else loss) * scales[name] for name, loss in losses.items()]
    joint = torch.stack(parts).sum(0)
    return joint.mean() if weight is None else (joint * weight).mean()


def policy_loss(
    value: torch.Tensor,  # (H + 1, B) of the policy's actions, in units of the value scale
    entropy: torch.Tensor,  # (H + 1, B)
    entropy_scale: torch.Tensor | float,
    weight: torch.Tensor,  # (H + 1,)
) -> torch.Tensor:
    """Mean over time of weight_t × mean over the batch of −(value + η entropy)."""
    return -((value + entropy_scale * entropy).mean(1) * weight).mean()


# --------------------
# The scale of values in TD-MPC2: a moving average of the range between two percentiles.


class RunningScale(nn.Module):
    """Starts at 1 and follows max(1, 95th − 5th percentile) (nicklashansen/tdmpc2 common/scale.py).

    ReturnNormalizer averages the two percentiles apart and limits their distance afterwards; here the limited
    distance itself is averaged.
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
        """Move towards the range of these values (any shape); gives the scale to divide by (0-d)."""
        low, high = torch.quantile(values.float().flatten(), self.percentiles).unbind()
        moved = self.value.lerp((high - low).clamp(min=1.0), self.rate)
        # A masked update must not poison the average.
        self.value.copy_(torch.where(torch.isfinite(moved), moved, self.value))
        return self.value.clone()
