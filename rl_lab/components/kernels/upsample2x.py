"""Nearest-neighbour upsampling of images by two: each pixel becomes 2×2 equal ones. In the dtype of the input."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, tl

TILE = 2048  # elements of the smaller image that a program holds


def upsample2x_forward(x: torch.Tensor) -> torch.Tensor:
    """(M, H, W, C) -> (M, 2·H, 2·W, C)."""
    if x.is_cuda and _kernel_fits(x):
        return _upsample_cuda(x)
    m, h, w, c = x.shape
    return x[:, :, None, :, None].expand(m, h, 2, w, 2, c).reshape(m, 2 * h, 2 * w, c)


def upsample2x_backward(grad: torch.Tensor) -> torch.Tensor:
    """(M, 2·H, 2·W, C) -> (M, H, W, C): sums of each 2×2 pixels, added in float32."""
    if grad.is_cuda and _kernel_fits(grad):
        return _upsample_backward_cuda(grad)
    m, h, w, c = grad.shape
    return grad.view(m, h // 2, 2, w // 2, 2, c).float().sum((2, 4)).to(grad.dtype)


def _kernel_fits(x: torch.Tensor) -> bool:
    channels = x.shape[3]
    return channels & (channels - 1) == 0 and channels <= 4096


class Upsample2x(torch.autograd.Function):
    """`upsample2x_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return upsample2x_forward(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return upsample2x_backward(grad.contiguous())


def upsample2x(x: torch.Tensor) -> torch.Tensor:
    """(M, C, H, W) -> (M, C, 2·H, 2·W), channels last in memory. Differentiable."""
    result: torch.Tensor = Upsample2x.apply(x.permute(0, 2, 3, 1).contiguous())
    return result.permute(0, 3, 1, 2)


@jit
def _offsets(count, W, C: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of a tile of the smaller image, and of its upper left copies in the larger one."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, C)
    mask = (row < count)[:, None] & (channel < C)[None, :]
    copy = (row // W).to(tl.int64) * (4 * W) + (row % W) * 2
    return row.to(tl.int64)[:, None] * C + channel[None, :], copy[:, None] * C + channel[None, :], mask


@jit
def _upsample_kernel(x, out, count, W, C: tl.constexpr, ROWS: tl.constexpr):
    at, to, mask = _offsets(count, W, C, ROWS)
    value = tl.load(x + at, mask=mask, other=0.0)
    tl.store(out + to, value, mask=mask)
    tl.store(out + to + C, value, mask=mask)
    tl.store(out + to + 2 * W * C, value, mask=mask)
    tl.store(out + to + 2 * W * C + C, value, mask=mask)


@jit
def _upsample_backward_kernel(grad, out, count, W, C: tl.constexpr, ROWS: tl.constexpr):
    to, at, mask = _offsets(count, W, C, ROWS)
    total = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(grad + at + C, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(grad + at + 2 * W * C, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(grad + at + 2 * W * C + C, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


def _upsample_cuda(x: torch.Tensor) -> torch.Tensor:
    m, h, w, c = x.shape
    out = torch.empty((m, 2 * h, 2 * w, c), dtype=x.dtype, device=x.device)
    rows = max(1, TILE // c)
    _upsample_kernel[(cdiv(m * h * w, rows),)](x, out, m * h * w, w, C=c, ROWS=rows)
    return out


def _upsample_backward_cuda(grad: torch.Tensor) -> torch.Tensor:
    m, h, w, c = grad.shape
    out = torch.empty((m, h // 2, w // 2, c), dtype=grad.dtype, device=grad.device)
    rows = max(1, TILE // c)
    _upsample_backward_kernel[(cdiv(m * h * w // 4, rows),)](
        grad, out, m * h * w // 4, w // 2, C=c, ROWS=rows
    )
    return out
