"""x + y + bias in one pass: how a residual block of pictures ends."""

from __future__ import annotations

from typing import Any

import torch


def add_bias_forward(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x, y: (M, C, H, W) with the channels side by side in memory; bias: (C,) -> the same, in x's dtype."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import add_bias_triton

        return add_bias_triton.forward(x, y, bias)
    return (x.float() + y.float() + bias.float()[:, None, None]).to(x.dtype)


class AddBias(torch.autograd.Function):
    """`add_bias_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.dtypes = (x.dtype, y.dtype, bias.dtype)
        return add_bias_forward(x, y, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y, bias = ctx.dtypes
        return grad.to(x), grad.to(y), grad.sum((0, 2, 3), dtype=torch.float32).to(bias)


def add_bias(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """As `add_bias_forward`, differentiable."""
    result: torch.Tensor = AddBias.apply(x, y, bias)
    return result
