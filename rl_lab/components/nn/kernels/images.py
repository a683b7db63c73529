"""What follows a convolution of an image, in one pass: pooling or unfolding, bias, RMSNorm over channels, SiLU.

Images are (N, H, W, C). A *folded* image (N, H/2, W/2, 4C) holds each 2×2 patch side by side, the patch's rows first, and
channels last: see nn/folded_conv.py.

    pool:    2×2 max-pool → norm → SiLU    a plain or folded image in, half the size out, plain or folded
    unfold:  norm → SiLU → plain image     a folded image in, (N, 2H, 2W, C) out
"""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.nn.kernels.norm_silu import norm_silu_backward, norm_silu_forward


def fold(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) -> (N, H/2, W/2, 4C)."""
    n, h, w, c = x.shape
    return x.view(n, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(n, h // 2, w // 2, 4 * c)


def unfold(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, 4C) -> (N, 2H, 2W, C)."""
    n, h, w, c = x.shape
    return x.view(n, h, w, 2, 2, c // 4).transpose(2, 3).reshape(n, 2 * h, 2 * w, c // 4)


def _kernels():  # type: ignore[no-untyped-def]
    from rl_lab.components.nn.kernels import images_triton

    return images_triton


class PoolNormSiLU(torch.autograd.Function):
    """x: (N, h, w, 4C) folded or (N, 2h, 2w, C) plain -> (N, h, w, C), or folded (N, h/2, w/2, 4C)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        folded_in: bool,
        folded_out: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weight)
        ctx.options = (eps, folded_in, folded_out)
        if x.is_cuda:
            result: torch.Tensor = _kernels().pool(x, bias, weight, eps, folded_in, folded_out)
            return result
        pooled, _ = _pool(x, folded_in)
        y = norm_silu_forward(pooled.flatten(0, -2), bias, weight, eps).view(pooled.shape)
        return fold(y) if folded_out else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        eps, folded_in, folded_out = ctx.options
        grad = grad.contiguous()
        if x.is_cuda:
            gx, gweight, gbias = _kernels().pool_backward(grad, x, bias, weight, eps, folded_in, folded_out)
            return gx, gbias, gweight, None, None, None
        pooled, index = _pool(x, folded_in)
        rows = (unfold(grad) if folded_out else grad).reshape(-1, pooled.shape[-1])
        gz, gweight, gbias = norm_silu_backward(rows, pooled.flatten(0, -2), bias, weight, eps)
        patches = torch.zeros((*pooled.shape[:3], 4, pooled.shape[3]), dtype=x.dtype)
        patches.scatter_(3, index.unsqueeze(3), gz.view(pooled.shape).unsqueeze(3))
        folded = patches.flatten(-2)
        return folded if folded_in else unfold(folded), gbias, gweight, None, None, None


def _pool(x: torch.Tensor, folded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of each patch (N, h, w, C), and which: of equal ones the first, as torch's max-pool has it."""
    x = x if folded else fold(x)
    patches = x.unflatten(-1, (4, -1))
    best, index = patches[..., 0, :], torch.zeros_like(patches[..., 0, :], dtype=torch.int64)
    for i in range(1, 4):
        larger = patches[..., i, :] > best
        best, index = torch.where(larger, patches[..., i, :], best), torch.where(larger, i, index)
    return best, index


class UnfoldNormSiLU(torch.autograd.Function):
    """x: folded (N, h, w, 4C) -> plain (N, 2h, 2w, C); the norm is over each pixel's C channels."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, bias, weight)
        ctx.eps = eps
        if x.is_cuda:
            result: torch.Tensor = _kernels().unfold(x, bias, weight, eps)
            return result
        return unfold(norm_silu_forward(x.reshape(-1, len(weight)), bias, weight, eps).view(x.shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if x.is_cuda:
            gx, gweight, gbias = _kernels().unfold_backward(grad, x, bias, weight, ctx.eps)
        else:
            rows = fold(grad).reshape(-1, len(weight))
            gx, gweight, gbias = norm_silu_backward(rows, x.reshape(-1, len(weight)), bias, weight, ctx.eps)
            gx = gx.view(x.shape)
        return gx, gbias, gweight, None
