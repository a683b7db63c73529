"""Triton kernels of norm_silu.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PARTIALS = 512  # programs that each sum the parameters' gradients over their share of the rows


@triton.jit
def _forward_kernel(
    x, bias, weight, out, rows, x_stride, bias_stride, out_stride, eps,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row[:, None] < rows) & (column[None, :] < F)
    z = tl.load(x + row[:, None].to(tl.int64) * x_stride + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    if HAS_BIAS:
        at = row[:, None].to(tl.int64) * bias_stride + column[None, :]
        z += tl.load(bias + at, mask=mask, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)
    w = tl.load(weight + column, mask=column < F, other=0.0).to(tl.float32)
    n = z * r[:, None] * w[None, :]
    y = n * tl.sigmoid(n)
    tl.store(
        out + row[:, None].to(tl.int64) * out_stride + column[None, :], y.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def _backward_kernel(
    grad, x, bias, weight, gx, gweight, gbias, rows, grad_stride, x_stride, bias_stride, gx_stride, eps,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < F
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        long = row[:, None].to(tl.int64)
        z = tl.load(x + long * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if HAS_BIAS:
            z += tl.load(bias + long * bias_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + long * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
        n = z * r * w[None, :]
        s = tl.sigmoid(n)
        gn = g * s * (1.0 + n * (1.0 - s))
        gw = gn * w[None, :]
        gz = r * gw - z * (r * r * r) * (tl.sum(gw * z, 1) / F)[:, None]
        tl.store(gx + long * gx_stride + column[None, :], gz.to(gx.dtype.element_ty), mask=mask)
        if PARAMETERS:
            sum_weight += tl.sum(tl.where(mask, gn * z * r, 0.0), 0)
            sum_bias += tl.sum(tl.where(mask, gz, 0.0), 0)
    if PARAMETERS:
        at = tl.program_id(0) * F + column
        tl.store(gweight + at, sum_weight, mask=inside)
        tl.store(gbias + at, sum_bias, mask=inside)


@triton.jit
def _sum_kernel(partial, out, programs, F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(1)  # weight, bias
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < programs) & (column[None, :] < F)
        total += tl.load(
            partial + (which * programs + row[:, None]) * F + column[None, :], mask=mask, other=0.0
        )
    tl.store(out + which * F + column, tl.sum(total, 0), mask=column < F)


def _shape(features: int) -> tuple[int, int, int]:
    """Padded width, rows a program handles at once, warps."""
    block = triton.next_power_of_2(features)
    rows = max(1, min(16, 2048 // block))
    return block, rows, 4 if block * rows <= 2048 else 8


def forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,  # rows may lie apart
) -> torch.Tensor:
    rows, features = x.shape
    out = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    block, group, warps = _shape(features)
    if rows <= 4096:  # few rows: spread them over the chip
        group = 1
    bias_stride = 0 if bias is None or bias.ndim == 1 else bias.stride(0)
    _forward_kernel[(triton.cdiv(rows, group),)](
        x, x if bias is None else bias, weight, out, rows, x.stride(0), bias_stride, out.stride(0), eps,
        F=features, BLOCK=block, ROWS=group, HAS_BIAS=bias is not None, num_warps=warps,
    )  # fmt: skip
    return out


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    parameters: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    gx = torch.empty((rows, features), dtype=x.dtype, device=x.device) if out is None else out
    block, group, warps = _shape(features)
    if rows <= 4096:
        group = 1
    programs = min(PARTIALS, triton.cdiv(rows, group)) if parameters else triton.cdiv(rows, group)
    partial = torch.empty((2, programs, features) if parameters else (2, 1, 1), device=x.device)
    bias_stride = 0 if bias is None or bias.ndim == 1 else bias.stride(0)
    _backward_kernel[(programs,)](
        grad, x, x if bias is None else bias, weight, gx, partial[0], partial[1], rows,
        grad.stride(0), x.stride(0), bias_stride, gx.stride(0), eps,
        F=features, BLOCK=block, ROWS=group, HAS_BIAS=bias is not None, PARAMETERS=parameters, num_warps=warps,
    )  # fmt: skip
    if not parameters:
        return gx, partial[0], partial[1]
    sums = torch.empty((2, features), device=x.device)
    _sum_kernel[(triton.cdiv(features, 32), 2)](partial, sums, programs, F=features, ROWS=128, BLOCK=32)
    return gx, sums[0], sums[1]
