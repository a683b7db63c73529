"""Activation(LayerNorm(x + bias) · scale + shift): after every layer of TD-MPC's networks.

Rows are (members, rows, features): an ensemble has a bias, scale and shift for each member, a single network is an
ensemble of one. Activations: `mish`, or `simnorm` (softmax in groups of neighbours). Arithmetic is float32; the backward
pass computes the norm again instead of storing it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

FUSED = ("mish", "simnorm")


def norm_activate_forward(
    x: torch.Tensor,  # (E, R, F)
    bias: torch.Tensor | None,  # (E, F)
    scale: torch.Tensor,  # (E, F), or (1, F) for all
    shift: torch.Tensor,  # as scale
    eps: float,
    activation: str,
    group: int,
    out: torch.Tensor | None = None,  # (E, R, F), may be x; rows may lie apart, equally far
) -> torch.Tensor:
    """-> (E, R, F) in x's dtype."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import norm_activate_triton

        return norm_activate_triton.forward(x, bias, scale, shift, eps, activation, group, out)
    z = x.float() if bias is None else x.float() + bias.float().unsqueeze(1)
    normed = F.layer_norm(z, z.shape[-1:], None, None, eps)
    u = torch.addcmul(shift.float().unsqueeze(1), normed, scale.float().unsqueeze(1))
    y = F.mish(u) if activation == "mish" else torch.softmax(u.unflatten(-1, (-1, group)), -1).flatten(-2)
    return y.to(x.dtype) if out is None else out.copy_(y)


def norm_activate_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    activation: str,
    group: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of x (E, R, F), and float32 ones of bias, scale and shift, (E, 3, F)."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import norm_activate_triton

        return norm_activate_triton.backward(grad, x, bias, scale, shift, eps, activation, group)
    z = x.float() if bias is None else x.float() + bias.float().unsqueeze(1)
    centered = z - z.mean(-1, keepdim=True)
    r = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    n, g = centered * r, grad.float()
    u = torch.addcmul(shift.float().unsqueeze(1), n, scale.float().unsqueeze(1))
    if activation == "mish":
        t = torch.tanh(F.softplus(u))
        gu = g * (t + u * (1.0 - t * t) * torch.sigmoid(u))
    else:
        y, gy = torch.softmax(u.unflatten(-1, (-1, group)), -1), g.unflatten(-1, (-1, group))
        gu = (y * (gy - (gy * y).sum(-1, keepdim=True))).flatten(-2)
    gn = gu * scale.float().unsqueeze(1)
    gz = r * (gn - gn.mean(-1, keepdim=True) - n * (gn * n).mean(-1, keepdim=True))
    return gz.to(x.dtype), torch.stack([gz.sum(1), (gu * n).sum(1), gu.sum(1)], 1)


class NormActivate(torch.autograd.Function):
    """`norm_activate_forward` with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        scale: torch.Tensor,
        shift: torch.Tensor,
        eps: float,
        activation: str,
        group: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, scale, shift)
        ctx.settings = (eps, activation, group)
        return norm_activate_forward(x, bias, scale, shift, eps, activation, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, scale, shift = ctx.saved_tensors
        gx, parameters = norm_activate_backward(grad.contiguous(), x, bias, scale, shift, *ctx.settings)
        gbias, gscale, gshift = parameters.unbind(1)
        return gx, None if bias is None else gbias, gscale, gshift, None, None, None


def fused_norm_activate(
    x: torch.Tensor,  # (E, R, F)
    bias: torch.Tensor | None,  # (E, F)
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    activation: str,
    group: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Differentiable, unless the result is to go to `out`. -> (E, R, F)."""
    if torch.is_grad_enabled():
        assert out is None, "a result that is written elsewhere has no gradient"
        result: torch.Tensor = NormActivate.apply(x, bias, scale, shift, eps, activation, group)
        return result
    return norm_activate_forward(x, bias, scale, shift, eps, activation, group, out)
