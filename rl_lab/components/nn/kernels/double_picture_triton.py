"""Triton kernels of double_picture.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 2048  # numbers of the smaller picture that a program holds


@triton.jit
def _places(count, W, C: tl.constexpr, ROWS: tl.constexpr):
    """Where a tile of the smaller picture lies, and where its upper left copies do."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, C)
    mask = (row < count)[:, None] & (channel < C)[None, :]
    copy = (row // W).to(tl.int64) * (4 * W) + (row % W) * 2
    return row.to(tl.int64)[:, None] * C + channel[None, :], copy[:, None] * C + channel[None, :], mask


@triton.jit
def _forward(x, out, count, W, C: tl.constexpr, ROWS: tl.constexpr):
    at, to, mask = _places(count, W, C, ROWS)
    value = tl.load(x + at, mask=mask, other=0.0)
    tl.store(out + to, value, mask=mask)
    tl.store(out + to + C, value, mask=mask)
    tl.store(out + to + 2 * W * C, value, mask=mask)
    tl.store(out + to + 2 * W * C + C, value, mask=mask)


@triton.jit
def _backward(grad, out, count, W, C: tl.constexpr, ROWS: tl.constexpr):
    to, at, mask = _places(count, W, C, ROWS)
    total = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(grad + at + C, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(grad + at + 2 * W * C, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(grad + at + 2 * W * C + C, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + to, total.to(out.dtype.element_ty), mask=mask)


def forward(x: torch.Tensor) -> torch.Tensor:
    m, h, w, c = x.shape
    out = torch.empty((m, 2 * h, 2 * w, c), dtype=x.dtype, device=x.device)
    rows = max(1, TILE // c)
    _forward[(triton.cdiv(m * h * w, rows),)](x, out, m * h * w, w, C=c, ROWS=rows)
    return out


def backward(grad: torch.Tensor) -> torch.Tensor:
    m, h, w, c = grad.shape
    out = torch.empty((m, h // 2, w // 2, c), dtype=grad.dtype, device=grad.device)
    rows = max(1, TILE // c)
    _backward[(triton.cdiv(m * h * w // 4, rows),)](grad, out, m * h * w // 4, w // 2, C=c, ROWS=rows)
    return out
