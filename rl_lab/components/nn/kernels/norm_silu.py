"""SiLU(RMSNorm(x + bias)): after every linear and convolution layer.

Rows are (rows, features). Arithmetic is float32; results have x's dtype. The backward pass computes the norm again
instead of storing it: both directions read each row once.
"""

from __future__ import annotations

from typing import Any

import torch


def norm_silu_forward(
    x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """x: (R, F) with rows side by side; bias: (F,) or (R, F) or None; weight: (F,) -> (R, F)."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import norm_silu_triton

        return norm_silu_triton.forward(x, bias, weight, eps)
    z = x.float() if bias is None else x.float() + bias.float()
    n = z * torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) * weight
    return (n * torch.sigmoid(n)).to(x.dtype)


def norm_silu_backward(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x (R, F), of the weight (F,) and of a (F,) bias, from that of the result."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import norm_silu_triton

        return norm_silu_triton.backward(grad, x, bias, weight, eps)
    z = x.float() if bias is None else x.float() + bias.float()
    gz, gn_normed = norm_silu_gradient(grad.float(), z, weight, eps)
    return gz.to(x.dtype), gn_normed.sum(0), gz.sum(0)


def norm_silu_input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,  # (R, F) rows may lie apart
) -> torch.Tensor:
    """Only the gradient of x, written to `out`: inside a scan the parameters wait for the end."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import norm_silu_triton

        return norm_silu_triton.backward(grad, x, bias, weight, eps, out, parameters=False)[0]
    z = x.float() if bias is None else x.float() + bias.float()
    return out.copy_(norm_silu_gradient(grad.float(), z, weight, eps)[0])


def norm_silu_gradient(
    grad: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 gradients of z, and per row of the weight; the definition that the kernels are held to."""
    r = torch.rsqrt(z.square().mean(-1, keepdim=True) + eps)
    n = z * r * weight
    s = torch.sigmoid(n)
    gn = grad * s * (1.0 + n * (1.0 - s))
    gw = gn * weight
    gz = r * gw - z * (r * r * r) * (gw * z).mean(-1, keepdim=True)
    return gz, gn * z * r


class NormSiLU(torch.autograd.Function):
    """`norm_silu_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weight)
        ctx.eps = eps
        return norm_silu_forward(x, bias, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        gx, gweight, gbias = norm_silu_backward(grad.contiguous(), x, bias, weight, ctx.eps)
        return gx, None if bias is None else gbias, gweight, None


def norm_silu(
    x: torch.Tensor, weight: torch.Tensor, eps: float, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x: (…, F), bias: (F,) or None -> (…, F), differentiable."""
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    result: torch.Tensor = NormSiLU.apply(rows, bias, weight, eps)
    return result.view(shape)
