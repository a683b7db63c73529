"""Watches for numbers that are not finite, on the device."""

from __future__ import annotations

import torch
from torch import nn


class NonFiniteGuard(nn.Module):
    """Counts updates, and remembers those that had to be masked.

    All state is 0-d tensors, so that a hook can write it without a host read; `report` is for the host, at log time.
    """

    updates: torch.Tensor  # updates tried
    masked: torch.Tensor  # updates masked
    first_masked: torch.Tensor  # number of the first masked update, -1: none
    last_masked: torch.Tensor  # number of the latest masked update, -1: none

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("updates", 0), ("masked", 0), ("first_masked", -1), ("last_masked", -1)):
            self.register_buffer(name, torch.full((), value, dtype=torch.int64))

    @torch.no_grad()
    def check(self, *values: torch.Tensor) -> torch.Tensor:
        """Count one update; gives 0-d float 1 where any of the values is not finite, else 0."""
        bad = ~torch.isfinite(torch.stack([value.detach().float() for value in values])).all()
        self.masked.add_(bad)
        self.last_masked.copy_(torch.where(bad, self.updates, self.last_masked))
        self.first_masked.copy_(torch.where(bad & (self.first_masked < 0), self.updates, self.first_masked))
        self.updates.add_(1)
        return bad.float()

    def report(self) -> dict[str, int]:
        """The four numbers, read by the host."""
        return {name: int(buffer) for name, buffer in self.named_buffers()}
