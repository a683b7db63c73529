"""x + y + bias in one pass: the end of a residual block of convolutions."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, tl

BLOCK = 2048  # elements of a program


def add_bias_forward(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x, y: (M, C, H, W), channels last in memory; bias: (C,) -> the same, in x's dtype."""
    if x.is_cuda:
        return _add_bias_cuda(x, y, bias)
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


@jit
def _add_bias_kernel(x, y, bias, out, count, C, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < count
    total = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(y + offset, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(bias + offset % C, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=mask)


def _add_bias_cuda(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    x, y = (value.contiguous(memory_format=torch.channels_last) for value in (x, y))
    out = torch.empty_like(x)
    _add_bias_kernel[(cdiv(x.numel(), BLOCK),)](x, y, bias, out, x.numel(), x.shape[1], BLOCK=BLOCK)
    return out
