"""Normalization by the limits of the data, measured once and stored with the weights."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.records import Spec
from rl_lab.utils.ranks import extremes_over_ranks_

SMALLEST_RANGE = 1e-4  # real-stanford/diffusion_policy @ 5ba07ac, model/common/normalizer.py: range_eps


class LimitsNormalizer(nn.Module):
    """Maps each dimension from its smallest and largest value in the data to [-1, 1].

    A dimension that is constant in the data becomes 0 and keeps its scale.
    """

    low: torch.Tensor  # (D,); +inf before the first `measure`
    high: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("low", torch.full((size,), float("inf")))
        self.register_buffer("high", torch.full((size,), float("-inf")))

    @property
    def measured(self) -> bool:
        """Whether there was data; waits for the device."""
        return bool(torch.isfinite(self.low).all())

    @torch.no_grad()
    def measure(self, values: torch.Tensor) -> None:
        """Widen the limits to these values, (M, D)."""
        if len(values):
            self.low.copy_(torch.minimum(self.low, values.amin(0)))
            self.high.copy_(torch.maximum(self.high, values.amax(0)))

    def share(self) -> None:
        """Widen the limits to those that any rank has measured."""
        extremes_over_ranks_(self.low, self.high)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(…, D) -> (…, D)"""
        centre, half = self._frame()
        return (values - centre) / half

    def inverse(self, values: torch.Tensor) -> torch.Tensor:
        centre, half = self._frame()
        return values * half + centre

    def _frame(self) -> tuple[torch.Tensor, torch.Tensor]:
        half = (self.high - self.low) / 2
        return (self.high + self.low) / 2, torch.where(half * 2 < SMALLEST_RANGE, 1.0, half)


class ActionNormalizer(LimitsNormalizer):
    """Of the environment's continuous actions."""

    def __init__(self, *, spec: Spec) -> None:
        super().__init__(spec.action.size)
