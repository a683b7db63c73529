"""A network without gradient whose weights are cast once, not in front of every product."""

from __future__ import annotations

import torch

from rl_lab.components.nn.kernels.norm_silu import norm_silu_forward
from rl_lab.components.nn.linear import Linear
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.norm import RMSNorm


class FrozenMLP:
    """What an MLP computes now, in `dtype`, with fused norms: for dreams, which use the same weights many times."""

    def __init__(self, mlp: MLP, dtype: torch.dtype) -> None:
        self.layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]] = []
        for linear, norm in zip(mlp.linears, mlp.norms):
            assert isinstance(linear, Linear) and isinstance(norm, RMSNorm)
            weight = linear.weight.detach().to(dtype).t()
            self.layers.append((weight, linear.bias.detach(), norm.weight.detach(), norm.eps))
        self.out: tuple[torch.Tensor, torch.Tensor] | None = None
        if mlp.out is not None:
            last = torch.float32 if mlp.float_out else dtype
            self.out = (mlp.out.weight.detach().to(last).t(), mlp.out.bias.detach().to(last))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs) -> what the last layer sees, (N, units)."""
        for weight, bias, norm, eps in self.layers:
            x = norm_silu_forward(x @ weight, bias, norm, eps)
        return x

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs) -> (N, outputs)."""
        x = self.hidden(x)
        if self.out is None:
            return x
        weight, bias = self.out
        with torch.autocast(x.device.type, enabled=False):
            return torch.addmm(bias, x.to(bias.dtype), weight)
