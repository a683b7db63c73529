"""Triton kernel of two_hot_mean.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _mean_kernel(
    logits, positive, out, rows, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    mask = (row[:, None] < rows) & inside[None, :]
    middle = row.to(tl.int64) * (2 * HALF + 1) + HALF
    at = middle[:, None] + 1 + column[None, :]
    mirrored = middle[:, None] - 1 - column[None, :]
    # Rows beyond the last: any number, they are not stored.
    m = tl.load(logits + middle, mask=row < rows, other=0.0).to(tl.float32)
    x = tl.load(logits + at, mask=mask, other=-float("inf")).to(tl.float32)
    y = tl.load(logits + mirrored, mask=mask, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(tl.maximum(x, y), 1), m)
    x = tl.exp(x - top[:, None])
    y = tl.exp(y - top[:, None])
    total = tl.sum(x + y, 1) + tl.exp(m - top)
    b = tl.load(positive + column, mask=inside, other=0.0)
    tl.store(out + row, tl.sum((x - y) * b[None, :], 1) / total, mask=row < rows)


def mean(logits: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
    out = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    rows, block = out.numel(), triton.next_power_of_2(len(positive))
    # One warp keeps its rows' sums to itself: no barrier. Few rows are spread over the chip.
    group = 1 if rows <= 4096 else max(1, min(4, 512 // block))
    _mean_kernel[(triton.cdiv(rows, group),)](
        logits.contiguous(), positive, out, rows, HALF=len(positive), BLOCK=block, ROWS=group,
        num_warps=1 if block <= 512 else 4,
    )  # fmt: skip
    return out
