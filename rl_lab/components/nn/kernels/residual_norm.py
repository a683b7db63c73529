"""x + dropout(y), and LayerNorm of it in the format of the product that follows: between two parts of a transformer.

Sums are float32. The backward pass computes the norm and dropout's mask again instead of storing them; it needs only the
sum, which the next residual keeps anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from rl_lab.components.nn.kernels.dropout import kept


def residual_norm_forward(
    x: torch.Tensor,  # (…, F)
    y: torch.Tensor | None,  # (…, F)
    weight: torch.Tensor,  # (F,)
    bias: torch.Tensor,  # (F,)
    eps: float,
    dtype: torch.dtype,
    rate: float = 0.0,
    word: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in x's dtype (x itself without y), and its norm in `dtype`. word: dropout's seed; None: no dropout."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import residual_norm_triton

        return residual_norm_triton.forward(x, y, weight, bias, eps, dtype, rate, word)
    if y is not None:
        y = y.float() if word is None else y.float() * kept(tuple(y.shape), rate, word)
        x = (x.float() + y).to(x.dtype)
    return x, F.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(dtype)


def residual_norm_backward(
    grad_sum: torch.Tensor | None,  # (…, F)
    grad: torch.Tensor,  # (…, F) of the norm
    total: torch.Tensor,  # (…, F) the sum
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float = 0.0,
    word: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x (x's dtype), of y (`dtype`), and float32 ones of weight and bias, (2, F)."""
    if total.is_cuda:
        from rl_lab.components.nn.kernels import residual_norm_triton

        return residual_norm_triton.backward(grad_sum, grad, total, weight, eps, dtype, rate, word)
    centered = total.float() - total.float().mean(-1, keepdim=True)
    r = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    n, g = centered * r, grad.float()
    gn = g * weight.float()
    gx = r * (gn - gn.mean(-1, keepdim=True) - n * (gn * n).mean(-1, keepdim=True))
    if grad_sum is not None:
        gx = gx + grad_sum.float()
    gy = gx if word is None else gx * kept(tuple(gx.shape), rate, word)
    parameters = torch.stack([(g * n).flatten(0, -2).sum(0), g.flatten(0, -2).sum(0)])
    return gx.to(total.dtype), gy.to(dtype), parameters


class ResidualNorm(torch.autograd.Function):
    """`residual_norm_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
        rate: float,
        word: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, normed = residual_norm_forward(x, y, weight, bias, eps, dtype, rate, word)
        ctx.save_for_backward(total, weight, word)
        ctx.settings = (eps, y.dtype, rate)
        ctx.set_materialize_grads(False)  # of the last sum nobody asks a gradient
        return total, normed

    @staticmethod
    def backward(
        ctx: Any, grad_sum: torch.Tensor | None, grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        total, weight, word = ctx.saved_tensors
        eps, dtype, rate = ctx.settings
        if grad is None:
            grad = torch.zeros_like(total)
        gx, gy, parameters = residual_norm_backward(grad_sum, grad, total, weight, eps, dtype, rate, word)
        gweight, gbias = parameters.to(weight.dtype)
        return gx, gy, gweight, gbias, None, None, None, None


def residual_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float = 0.0,
    word: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `residual_norm_forward`, differentiable."""
    total, normed = ResidualNorm.apply(x, y, weight, bias, eps, dtype, rate, word)
    return total, normed
