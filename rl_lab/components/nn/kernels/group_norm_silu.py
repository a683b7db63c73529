"""SiLU(GroupNorm(x + pre)), or the norm alone, on pictures whose channels lie side by side: before every convolution of IRIS' nets.

`pre` is the bias of the convolution before, which would cost a pass over memory of its own.

Pictures are (M, P, C): M of them, P places, C channels. Arithmetic is float32, results have x's dtype. Only mean and
inverse deviation of each group are kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

TILE = 4096  # numbers that a program of the kernels holds at once


def supports(channels: int, groups: int) -> bool:
    """Powers of two: what the kernels' tiles are made of."""
    return channels & (channels - 1) == 0 and groups & (groups - 1) == 0 and channels <= TILE


def group_norm_forward(
    x: torch.Tensor,  # (M, P, C)
    pre: torch.Tensor | None,  # (C,)
    weight: torch.Tensor,  # (C,)
    bias: torch.Tensor,  # (C,)
    groups: int,
    eps: float,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> (M, P, C), and mean and inverse deviation, (M, 2, groups)."""
    if x.is_cuda:
        from rl_lab.components.nn.kernels import group_norm_silu_triton

        return group_norm_silu_triton.forward(x, pre, weight, bias, groups, eps, silu)
    z = x.float() if pre is None else x.float() + pre
    parts = z.unflatten(2, (groups, -1))  # (M, P, G, C / G)
    mean = parts.mean((1, 3))
    r = torch.rsqrt((parts - mean[:, None, :, None]).square().mean((1, 3)) + eps)
    u = ((parts - mean[:, None, :, None]) * r[:, None, :, None]).flatten(2) * weight + bias
    return (u * torch.sigmoid(u) if silu else u).to(x.dtype), torch.stack([mean, r], 1)


def group_norm_backward(
    grad: torch.Tensor,  # (M, P, C)
    x: torch.Tensor,
    pre: torch.Tensor | None,
    moments: torch.Tensor,  # (M, 2, groups)
    weight: torch.Tensor,
    bias: torch.Tensor,
    silu: bool,
    beside: torch.Tensor | None = None,  # (M, P, C)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradient of x (M, P, C), float32 ones of weight and bias, (2, C), and of `pre`, (C,), where there is one.

    beside: a gradient that x has from elsewhere, added to x's, and to nothing else
    """
    if x.is_cuda:
        from rl_lab.components.nn.kernels import group_norm_silu_triton

        return group_norm_silu_triton.backward(grad, x, pre, moments, weight, bias, silu, beside)
    groups = moments.shape[2]
    mean, r = (part[:, None, :, None] for part in moments.unbind(1))
    z = x.float() if pre is None else x.float() + pre
    n = ((z.unflatten(2, (groups, -1)) - mean) * r).flatten(2)
    g = grad.float()
    if silu:
        u = n * weight + bias
        s = torch.sigmoid(u)
        g = g * s * (1.0 + u * (1.0 - s))
    parameters = torch.stack([(g * n).sum((0, 1)), g.sum((0, 1))])
    gn, n = (g * weight).unflatten(2, (groups, -1)), n.unflatten(2, (groups, -1))
    gx = r * (gn - gn.mean((1, 3), keepdim=True) - n * (gn * n).mean((1, 3), keepdim=True))
    gx = gx.flatten(2)
    of_pre = None if pre is None else gx.sum((0, 1))
    return (gx if beside is None else gx + beside.float()).to(x.dtype), parameters, of_pre


class GroupNormSiLU(torch.autograd.Function):
    """`group_norm_forward` with its gradient. It hands x on as well: whoever uses that one adds no pass for the sum
    of x's gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        pre: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        groups: int,
        eps: float,
        silu: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, moments = group_norm_forward(x, pre, weight, bias, groups, eps, silu)
        ctx.save_for_backward(x, pre, moments, weight, bias)
        ctx.silu = silu
        ctx.set_materialize_grads(False)
        return y, x

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, beside: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return beside, None, None, None, None, None, None
        x, pre, moments, weight, bias = ctx.saved_tensors
        beside = None if beside is None else beside.contiguous()
        gx, parameters, gpre = group_norm_backward(
            grad.contiguous(), x, pre, moments, weight, bias, ctx.silu, beside
        )
        return gx, gpre, parameters[0], parameters[1], None, None, None


def fused_group_norm(
    x: torch.Tensor,  # (M, C, H, W)
    weight: torch.Tensor,
    bias: torch.Tensor,
    groups: int,
    eps: float,
    silu: bool,
    pre: torch.Tensor | None = None,  # (C,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> the result, (M, C, H, W) with the channels side by side in memory, and x to go on with. Differentiable."""
    places = x.permute(0, 2, 3, 1)
    rows = places.reshape(x.shape[0], -1, x.shape[1])  # a view where the channels already lie side by side
    if not torch.is_grad_enabled():
        y = group_norm_forward(rows, pre, weight, bias, groups, eps, silu)[0]
        return y.view(places.shape).permute(0, 3, 1, 2), x
    both: tuple[torch.Tensor, torch.Tensor] = GroupNormSiLU.apply(rows, pre, weight, bias, groups, eps, silu)
    y, rows = (value.view(places.shape).permute(0, 3, 1, 2) for value in both)
    return y, rows
