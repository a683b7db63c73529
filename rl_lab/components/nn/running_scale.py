"""The scale of values in TD-MPC2: a moving average of the range between two percentiles."""

from __future__ import annotations

import torch
from torch import nn


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
