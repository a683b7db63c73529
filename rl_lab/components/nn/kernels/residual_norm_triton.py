"""Triton kernels of residual_norm.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rl_lab.components.nn.kernels.dropout_triton import kept
from rl_lab.components.nn.kernels.row_tiles import row_tiles

PARTIALS = 512  # programs that each sum the parameters' gradients over their share of the rows


@triton.jit
def _forward_kernel(
    x, y, weight, bias, total, out, word, rows, eps, rate,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < F
    mask = (row[:, None] < rows) & inside[None, :]
    at = row[:, None].to(tl.int64) * F + column[None, :]
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        add = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        if DROP:
            add = add * kept(row[:, None] * F + column[None, :], word, rate)
        z = z + add
        tl.store(total + at, z.to(total.dtype.element_ty), mask=mask)
    mean = tl.sum(z, 1) / F
    z = tl.where(inside[None, :], z - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
    tl.store(out + at, (z * r * w + b).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    grad_sum, grad, total, weight, gx, gy, partial, word, rows, eps, rate,
    F: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < F
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    sum_weight = tl.zeros((BLOCK,), tl.float32)
    sum_bias = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row[:, None] < rows) & inside[None, :]
        at = row[:, None].to(tl.int64) * F + column[None, :]
        z = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(z, 1) / F
        z = tl.where(inside[None, :], z - mean[:, None], 0.0)
        r = tl.rsqrt(tl.sum(z * z, 1) / F + eps)[:, None]
        n = z * r
        gn = g * w
        result = r * (gn - (tl.sum(gn, 1) / F)[:, None] - n * (tl.sum(gn * n, 1) / F)[:, None])
        if ADD:
            result += tl.load(grad_sum + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(gx + at, result.to(gx.dtype.element_ty), mask=mask)
        if DROP:
            result = result * kept(row[:, None] * F + column[None, :], word, rate)
        tl.store(gy + at, result.to(gy.dtype.element_ty), mask=mask)
        sum_weight += tl.sum(g * n, 0)
        sum_bias += tl.sum(g, 0)
    to = (tl.program_id(0) * 2).to(tl.int64) * F + column  # (programs, 2, F)
    tl.store(partial + to, sum_weight, mask=inside)
    tl.store(partial + to + F, sum_bias, mask=inside)


def forward(
    x: torch.Tensor,
    y: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float,
    word: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    add = x if y is None else y.contiguous()
    features = x.shape[-1]
    rows = x.numel() // features
    total = x if y is None else torch.empty_like(x)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block, many, warps = row_tiles(rows, features)
    _forward_kernel[(triton.cdiv(rows, many),)](
        x, add, weight, bias, total, out, x if word is None else word, rows, eps, rate,
        F=features, BLOCK=block, ROWS=many, ADD=y is not None, DROP=word is not None, num_warps=warps,
    )  # fmt: skip
    return total, out


def backward(
    grad_sum: torch.Tensor | None,
    grad: torch.Tensor,
    total: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    rate: float,
    word: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad = grad.contiguous()
    more = grad if grad_sum is None else grad_sum.contiguous()
    features = total.shape[-1]
    rows = total.numel() // features
    gx, gy = torch.empty_like(total), torch.empty(total.shape, dtype=dtype, device=total.device)
    block, many, warps = row_tiles(rows, features)
    programs = min(PARTIALS, triton.cdiv(rows, many))
    partial = torch.empty((programs, 2, features), dtype=torch.float32, device=total.device)
    _backward_kernel[(programs,)](
        more, grad, total, weight, gx, gy, partial, grad if word is None else word, rows, eps, rate,
        F=features, BLOCK=block, ROWS=many, ADD=grad_sum is not None, DROP=word is not None, num_warps=warps,
    )  # fmt: skip
    return gx, gy, partial.sum(0)
