"""A slowly moving copy of a network, for targets."""

from __future__ import annotations

import copy

import torch
from torch import nn


class SlowCopy(nn.Module):
    """The same network with averaged weights. They are buffers: saved and moved, never trained or frozen."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(source)
        for module in self.network.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    del module._parameters[name]
                    module.register_buffer(name, parameter.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)

    @torch.no_grad()
    def update(self, source: nn.Module, rate: float) -> None:
        """Move each weight towards the source's by `rate`; 1 copies."""
        named = dict(self.network.named_buffers())
        slow, fast = zip(*((named[name], parameter) for name, parameter in source.named_parameters()))
        torch._foreach_lerp_(slow, fast, rate)


# --------------------
# The scale of returns: a moving range between two percentiles (DreamerV3, "return normalisation").


class ReturnNormalizer(nn.Module):
    """Tracks the 5th and 95th percentile of returns; advantages are divided by their distance, at least `limit`.

    Dividing only when the range exceeds 1 keeps small returns small: noise of a sparse reward is not blown up.
    """

    low: torch.Tensor
    high: torch.Tensor
    percentiles: torch.Tensor

    def __init__(
        self, *, rate: float = 0.01, low: float = 0.05, high: float = 0.95, limit: float = 1.0
    ) -> None:
        super().__init__()
        self.rate = rate
        self.limit = limit
        self.register_buffer("low", torch.zeros(()))  # starts at 0 and is not debiased, as in the original
        self.register_buffer("high", torch.zeros(()))
        self.register_buffer("percentiles", torch.tensor([low, high]), persistent=False)

    @torch.no_grad()
    def update(self, returns: torch.Tensor) -> torch.Tensor:
        """Move towards the percentiles of these returns (any shape); gives the scale to divide by (0-d)."""
        low, high = torch.quantile(returns.float().flatten(), self.percentiles).unbind()
        finite = torch.isfinite(low) & torch.isfinite(high)  # a masked update must not poison the average
        self.low.copy_(torch.where(finite, self.low.lerp(low, self.rate), self.low))
        self.high.copy_(torch.where(finite, self.high.lerp(high, self.rate), self.high))
        return self.scale()

    def scale(self) -> torch.Tensor:
        return (self.high - self.low).clamp(min=self.limit)
