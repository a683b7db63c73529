"""Moving averages: target networks, and the scale of returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rl_lab.utils.ranks import rows_of_ranks


class SlowCopy(nn.Module):
    """Target network: a copy with averaged weights.

    They are buffers: saved and moved, but never trained or frozen.

    every: only the first of so many calls of `update` changes the weights. Calls are counted on the device, so that a
           captured CUDA graph counts them too
    """

    calls: torch.Tensor

    def __init__(self, source: nn.Module, *, every: int = 1) -> None:
        super().__init__()
        self.every = every
        if every > 1:
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
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
        """Weight += rate · (source weight − weight); rate 1 copies."""
        named = dict(self.network.named_buffers())
        slow, fast = zip(*((named[name], parameter) for name, parameter in source.named_parameters()))
        if self.every == 1:
            torch._foreach_lerp_(slow, fast, rate)
            return
        due = (self.calls % self.every == 0).float() * rate
        for target, value in zip(slow, fast):
            target.lerp_(value, due)
        self.calls.add_(1)


class Averaged(nn.Module):
    """A network `online`, and `slow`, a moving average of its weights that is saved with it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.online = network
        self.slow = SlowCopy(network)

    def forward(self, *inputs: torch.Tensor | None, slow: bool = False) -> torch.Tensor:
        return (self.slow.network if slow else self.online)(*inputs)

    def train(self, mode: bool = True) -> Averaged:
        """The average never trains: its dropout stays off."""
        super().train(mode)
        self.slow.eval()
        return self

    @torch.no_grad()
    def update_slow(self, rate: torch.Tensor) -> None:
        """Weight += rate · (online weight − weight). rate: 0-d, on the device of the weights"""
        named = dict(self.slow.network.named_buffers())
        slow, online = zip(*((named[name], p.detach()) for name, p in self.online.named_parameters()))
        change = torch._foreach_sub(online, slow)
        torch._foreach_mul_(change, rate)
        torch._foreach_add_(slow, change)


class ReturnNormalizer(nn.Module):
    """Return normalization of DreamerV3: moving averages of two percentiles of the returns (5th and 95th).

    Advantages are divided by the range between them, but at least by `limit`: this does not amplify the noise
    of sparse rewards.
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
        self._kept: list[torch.Tensor] | None = None
        self.register_buffer("low", torch.zeros(()))  # starts at 0 and is not debiased, as in the original
        self.register_buffer("high", torch.zeros(()))
        self.register_buffer("percentiles", torch.tensor([low, high]), persistent=False)

    @torch.no_grad()
    def update(self, returns: torch.Tensor) -> torch.Tensor:
        """Update the averages with these returns (any shape); returns the scale to divide by (0-d)."""
        if self._kept is not None:
            self._kept.append(returns.float().flatten())
            return self.scale()
        joint = rows_of_ranks(returns.float().flatten())
        low, high = torch.quantile(joint, self.percentiles).unbind()
        finite = torch.isfinite(low) & torch.isfinite(high)  # a masked update must not change the average
        self.low.copy_(torch.where(finite, self.low.lerp(low, self.rate), self.low))
        self.high.copy_(torch.where(finite, self.high.lerp(high, self.rate), self.high))
        return self.scale()

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Inside, `update` keeps the returns of parts of a batch; the averages are updated once, at the end."""
        self._kept = []
        try:
            yield
            kept = self._kept
        finally:
            self._kept = None
        if kept:
            self.update(torch.cat(kept))

    def scale(self) -> torch.Tensor:
        return (self.high - self.low).clamp(min=self.limit)
