"""What follows a convolution of an image, in one pass: pooling or unfolding, bias, RMSNorm over channels, SiLU.

Images are (N, H, W, C). A *folded* image (N, H/2, W/2, 4C) holds the pixels of each 2×2 patch in its channels, row by row:
see nn/folded_conv.py.

    pool:    2×2 max-pool → norm → SiLU    a plain or folded image in, half the size out, plain or folded
    unfold:  norm → SiLU → plain image     a folded image in, (N, 2H, 2W, C) out
"""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.kernels.norm_silu import norm_silu_backward, norm_silu_forward
from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl

PARTIALS = 1056  # programs that each sum the parameters' gradients over their share of the rows: 8 for each of 132 cores


def fold(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, C) -> (N, H/2, W/2, 4C)."""
    n, h, w, c = x.shape
    return x.view(n, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(n, h // 2, w // 2, 4 * c)


def unfold(x: torch.Tensor) -> torch.Tensor:
    """(N, H, W, 4C) -> (N, 2H, 2W, C)."""
    n, h, w, c = x.shape
    return x.view(n, h, w, 2, 2, c // 4).transpose(2, 3).reshape(n, 2 * h, 2 * w, c // 4)


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
            return _pool_norm_silu_cuda(x, bias, weight, eps, folded_in, folded_out)
        pooled, _ = _pool(x, folded_in)
        y = norm_silu_forward(pooled.flatten(0, -2), bias, weight, eps).view(pooled.shape)
        return fold(y) if folded_out else y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        eps, folded_in, folded_out = ctx.options
        grad = grad.contiguous()
        if x.is_cuda:
            gx, gweight, gbias = _pool_norm_silu_backward_cuda(
                grad, x, bias, weight, eps, folded_in, folded_out
            )
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
            return _unfold_norm_silu_cuda(x, bias, weight, eps)
        return unfold(norm_silu_forward(x.reshape(-1, len(weight)), bias, weight, eps).view(x.shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias, weight = ctx.saved_tensors
        grad = grad.contiguous()
        if x.is_cuda:
            gx, gweight, gbias = _unfold_norm_silu_backward_cuda(grad, x, bias, weight, ctx.eps)
        else:
            rows = fold(grad).reshape(-1, len(weight))
            gx, gweight, gbias = norm_silu_backward(rows, x.reshape(-1, len(weight)), bias, weight, ctx.eps)
            gx = gx.view(x.shape)
        return gx, gbias, gweight, None


@jit
def _plain_row(row, height, width):
    """Index (in rows of C) of the first pixel of the 2×2 patch `row` = (n, i, j) in a plain image of twice the size."""
    j = row % width
    i = (row // width) % height
    n = row // (width * height)
    return (n * 2 * height + 2 * i) * (2 * width) + 2 * j


@jit
def _folded_row(row, height, width):
    """Index (in rows of C) of pixel `row` = (n, i, j) of an image in its folded form."""
    j = row % width
    i = (row // width) % height
    n = row // (width * height)
    patch = (n * (height // 2) + i // 2) * (width // 2) + j // 2
    return patch * 4 + (i % 2) * 2 + j % 2


@jit
def _pool_kernel(
    x, bias, weight, grad, out, gweight, gbias, rows, height, width, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    FOLDED_IN: tl.constexpr, FOLDED_OUT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        if FOLDED_IN:
            first = row * 4
            second, third, fourth = first + 1, first + 2, first + 3
        else:
            first = _plain_row(row, height, width)
            second, third = first + 1, first + 2 * width
            fourth = third + 1
        at0 = first[:, None].to(tl.int64) * C + column[None, :]
        at1 = second[:, None].to(tl.int64) * C + column[None, :]
        at2 = third[:, None].to(tl.int64) * C + column[None, :]
        at3 = fourth[:, None].to(tl.int64) * C + column[None, :]
        x0 = tl.load(x + at0, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(x + at1, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x + at2, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(x + at3, mask=mask, other=0.0).to(tl.float32)
        best = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        z = tl.where(mask, best + b[None, :], 0.0)
        r = tl.rsqrt(tl.sum(z * z, 1) / C + eps)[:, None]
        n = z * r * w[None, :]
        s = tl.sigmoid(n)
        result = _folded_row(row, height, width) if FOLDED_OUT else row
        at = result[:, None].to(tl.int64) * C + column[None, :]
        if BACKWARD:
            g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
            gn = g * s * (1.0 + n * (1.0 - s))
            gw = gn * w[None, :]
            gz = r * gw - z * (r * r * r) * (tl.sum(gw * z, 1) / C)[:, None]
            sum_weight += tl.sum(tl.where(mask, gn * z * r, 0.0), 0)
            sum_bias += tl.sum(tl.where(mask, gz, 0.0), 0)
            # Of equal ones the first takes the gradient.
            is0 = x0 == best
            is1 = (x1 == best) & (x0 != best)
            is2 = (x2 == best) & (x0 != best) & (x1 != best)
            is3 = (x0 != best) & (x1 != best) & (x2 != best)
            tl.store(out + at0, tl.where(is0, gz, 0.0).to(out.dtype.element_ty), mask=mask)
            tl.store(out + at1, tl.where(is1, gz, 0.0).to(out.dtype.element_ty), mask=mask)
            tl.store(out + at2, tl.where(is2, gz, 0.0).to(out.dtype.element_ty), mask=mask)
            tl.store(out + at3, tl.where(is3, gz, 0.0).to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(out + at, (n * s).to(out.dtype.element_ty), mask=mask)
    if BACKWARD:
        at_sum = tl.program_id(0) * C + column
        tl.store(gweight + at_sum, sum_weight, mask=inside)
        tl.store(gbias + at_sum, sum_bias, mask=inside)


@jit
def _unfold_kernel(
    x, bias, weight, grad, out, gweight, gbias, rows, height, width, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < C
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)  # (n, i, j, a, b): pixels in folded order
        mask = (row[:, None] < rows) & inside[None, :]
        at = row[:, None].to(tl.int64) * C + column[None, :]
        corner = _plain_row(row // 4, height, width)
        pixel = corner + ((row // 2) % 2) * (2 * width) + row % 2
        pixel_at = pixel[:, None].to(tl.int64) * C + column[None, :]
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        z = tl.where(mask, z + b[None, :], 0.0)
        r = tl.rsqrt(tl.sum(z * z, 1) / C + eps)[:, None]
        n = z * r * w[None, :]
        s = tl.sigmoid(n)
        if BACKWARD:
            g = tl.load(grad + pixel_at, mask=mask, other=0.0).to(tl.float32)
            gn = g * s * (1.0 + n * (1.0 - s))
            gw = gn * w[None, :]
            gz = r * gw - z * (r * r * r) * (tl.sum(gw * z, 1) / C)[:, None]
            sum_weight += tl.sum(tl.where(mask, gn * z * r, 0.0), 0)
            sum_bias += tl.sum(tl.where(mask, gz, 0.0), 0)
            tl.store(out + at, gz.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(out + pixel_at, (n * s).to(out.dtype.element_ty), mask=mask)
    if BACKWARD:
        at_sum = tl.program_id(0) * C + column
        tl.store(gweight + at_sum, sum_weight, mask=inside)
        tl.store(gbias + at_sum, sum_bias, mask=inside)


def _tiles(channels: int) -> tuple[int, int]:
    block = next_power_of_2(channels)
    return block, max(1, min(64, 2048 // block))


def _pool_norm_silu_cuda(
    x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, eps: float, folded_in: bool, folded_out: bool
) -> torch.Tensor:
    n, h, w, c = _pooled_shape(x, folded_in)
    shape = (n, h // 2, w // 2, 4 * c) if folded_out else (n, h, w, c)
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    block, group = _tiles(c)
    rows = n * h * w
    _pool_kernel[(cdiv(rows, group),)](
        x, bias, weight, x, out, weight, weight, rows, h, w, eps, C=c, BLOCK=block, ROWS=group,
        FOLDED_IN=folded_in, FOLDED_OUT=folded_out, BACKWARD=False, num_warps=4,
    )  # fmt: skip
    return out


def _pool_norm_silu_backward_cuda(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    folded_in: bool,
    folded_out: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, h, w, c = _pooled_shape(x, folded_in)
    gx = torch.empty_like(x)
    block, group = _tiles(c)
    rows = n * h * w
    programs = min(PARTIALS, cdiv(rows, group))
    sums = torch.empty((2, programs, c), dtype=torch.float32, device=x.device)
    _pool_kernel[(programs,)](
        x, bias, weight, grad, gx, sums[0], sums[1], rows, h, w, eps, C=c, BLOCK=block, ROWS=group,
        FOLDED_IN=folded_in, FOLDED_OUT=folded_out, BACKWARD=True, num_warps=4,
    )  # fmt: skip
    gweight, gbias = sums.sum(1)
    return gx, gweight, gbias


def _pooled_shape(x: torch.Tensor, folded: bool) -> tuple[int, int, int, int]:
    n, h, w, c = x.shape
    return (n, h, w, c // 4) if folded else (n, h // 2, w // 2, c)


def _unfold_norm_silu_cuda(
    x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    n, h, w, c = x.shape
    out = torch.empty((n, 2 * h, 2 * w, c // 4), dtype=x.dtype, device=x.device)
    block, group = _tiles(c // 4)
    rows = 4 * n * h * w
    _unfold_kernel[(cdiv(rows, group),)](
        x, bias, weight, x, out, weight, weight, rows, h, w, eps,
        C=c // 4, BLOCK=block, ROWS=group, BACKWARD=False, num_warps=4,
    )  # fmt: skip
    return out


def _unfold_norm_silu_backward_cuda(
    grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, h, w, c = x.shape
    gx = torch.empty_like(x)
    block, group = _tiles(c // 4)
    rows = 4 * n * h * w
    programs = min(PARTIALS, cdiv(rows, group))
    sums = torch.empty((2, programs, c // 4), dtype=torch.float32, device=x.device)
    _unfold_kernel[(programs,)](
        x, bias, weight, grad, gx, sums[0], sums[1], rows, h, w, eps,
        C=c // 4, BLOCK=block, ROWS=group, BACKWARD=True, num_warps=4,
    )  # fmt: skip
    gweight, gbias = sums.sum(1)
    return gx, gweight, gbias
