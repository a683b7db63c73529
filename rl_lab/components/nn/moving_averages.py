"""Moving averages: target networks, and the scale of returns, values and advantages."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rl_lab.errors import require_choice
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


NORMALIZERS = ("none", "meanstd", "perc")


class RunningNormalizer(nn.Module):
    """Moving averages of two statistics of the data, from which a subclass gets an offset and a scale.

    The averages start at 0. debias: divide them by the weights that were given so far, as Adam does
    """

    given: torch.Tensor
    buffer_names: tuple[str, str]  # of the two averages

    def __init__(self, *, rate: float, limit: float, debias: bool) -> None:
        super().__init__()
        self.rate, self.limit, self.debias = rate, limit, debias
        self._kept: list[torch.Tensor] | None = None
        for name in self.buffer_names:
            self.register_buffer(name, torch.zeros(()))
        if debias:
            self.register_buffer("given", torch.zeros(()))

    def measure(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two statistics (0-d each) of values (M,)."""
        raise NotImplementedError

    @torch.no_grad()
    def update(self, values: torch.Tensor) -> torch.Tensor:
        """Update the averages with these values (any shape); returns the scale to divide by (0-d)."""
        if self._kept is not None:
            self._kept.append(values.float().flatten())
            return self.scale()
        joint = rows_of_ranks(values.float().flatten())
        found = self.measure(joint)
        # A masked update must not change the averages.
        finite = torch.isfinite(found[0]) & torch.isfinite(found[1])
        for average, value in zip(self._averages(), found):
            average.copy_(torch.where(finite, average.lerp(value, self.rate), average))
        if self.debias:
            self.given.copy_(
                torch.where(finite, self.given.lerp(torch.ones_like(self.given), self.rate), self.given)
            )
        return self.scale()

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Inside, `update` keeps the values of parts of a batch; the averages are updated once, at the end."""
        self._kept = []
        try:
            yield
            kept = self._kept
        finally:
            self._kept = None
        if kept:
            self.update(torch.cat(kept))

    def scale(self) -> torch.Tensor:
        """What values are divided by (0-d)."""
        raise NotImplementedError

    def offset(self) -> torch.Tensor:
        """What is subtracted before (0-d)."""
        return self._debiased()[0]

    def normalize(self, values: torch.Tensor) -> torch.Tensor:
        return (values - self.offset()) / self.scale()

    def restore(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale() + self.offset()

    def _averages(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (getattr(self, name) for name in self.buffer_names)
        return first, second

    def _debiased(self) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self._averages()
        if not self.debias:
            return first, second
        weight = self.given.clamp(min=self.rate)
        return first / weight, second / weight


class ReturnNormalizer(RunningNormalizer):
    """Return normalization of DreamerV3: moving averages of two percentiles of the returns (5th and 95th).

    Advantages are divided by the range between them, but at least by `limit`: this does not amplify the noise
    of sparse rewards. The averages start at 0 and are not debiased, as in the original (`retnorm.debias`).
    """

    low: torch.Tensor
    high: torch.Tensor
    percentiles: torch.Tensor
    buffer_names = ("low", "high")

    def __init__(
        self,
        *,
        rate: float = 0.01,
        low: float = 0.05,
        high: float = 0.95,
        limit: float = 1.0,
        debias: bool = False,
    ) -> None:
        super().__init__(rate=rate, limit=limit, debias=debias)
        self.register_buffer("percentiles", torch.tensor([low, high]), persistent=False)

    def measure(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = torch.quantile(values, self.percentiles).unbind()
        return low, high

    def scale(self) -> torch.Tensor:
        low, high = self._debiased()
        return (high - low).clamp(min=self.limit)


class MomentNormalizer(RunningNormalizer):
    """Mean and standard deviation from moving averages of the values and of their squares."""

    mean: torch.Tensor
    squares: torch.Tensor
    buffer_names = ("mean", "squares")

    def measure(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return values.mean(), values.square().mean()

    def scale(self) -> torch.Tensor:
        mean, squares = self._debiased()
        return (squares - mean.square()).clamp(min=0.0).sqrt().clamp(min=self.limit)


def make_normalizer(key: str, kind: str) -> RunningNormalizer | None:
    """The normalizer of values or advantages that a config key names; None for `none`.

    Rate and limit: danijar/dreamerv3 configs.yaml @ e3f0224, valnorm, advnorm.
    """
    require_choice(key, kind, NORMALIZERS)
    if kind == "none":
        return None
    make = MomentNormalizer if kind == "meanstd" else ReturnNormalizer
    return make(rate=0.01, limit=1e-8, debias=True)
