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
