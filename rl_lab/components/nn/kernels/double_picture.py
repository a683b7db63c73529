"""A picture of twice the height and width: each place becomes 2×2 alike ones. In the numbers' own format."""

from __future__ import annotations

from typing import Any

import torch


def double_forward(x: torch.Tensor) -> torch.Tensor:
    """(M, H, W, C) -> (M, 2·H, 2·W, C)."""
    if x.is_cuda and _kernel_fits(x):
        from rl_lab.components.nn.kernels import double_picture_triton

        return double_picture_triton.forward(x)
    m, h, w, c = x.shape
    return x[:, :, None, :, None].expand(m, h, 2, w, 2, c).reshape(m, 2 * h, 2 * w, c)


def double_backward(grad: torch.Tensor) -> torch.Tensor:
    """(M, 2·H, 2·W, C) -> (M, H, W, C): sums of each 2×2 places, added in float32."""
    if grad.is_cuda and _kernel_fits(grad):
        from rl_lab.components.nn.kernels import double_picture_triton

        return double_picture_triton.backward(grad)
    m, h, w, c = grad.shape
    return grad.view(m, h // 2, 2, w // 2, 2, c).float().sum((2, 4)).to(grad.dtype)


def _kernel_fits(x: torch.Tensor) -> bool:
    channels = x.shape[3]
    return channels & (channels - 1) == 0 and channels <= 4096


class DoublePicture(torch.autograd.Function):
    """`double_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return double_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return double_backward(grad.contiguous())


def double_picture(x: torch.Tensor) -> torch.Tensor:
    """(M, C, H, W) -> (M, C, 2·H, 2·W), with the channels side by side in memory. Differentiable."""
    result: torch.Tensor = DoublePicture.apply(x.permute(0, 2, 3, 1).contiguous())
    return result.permute(0, 3, 1, 2)
