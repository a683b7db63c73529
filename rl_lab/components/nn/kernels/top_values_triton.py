"""Triton kernel of top_values.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32  # numbers that a program finds the rank of


@triton.jit
def _rank_kernel(values, best, index, S, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    env = tl.program_id(0)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, BLOCK)
    mine = tl.load(values + env * S + i, mask=i < S, other=0.0)
    others = tl.load(values + env * S + j, mask=j < S, other=float("-inf"))
    greater = others[None, :] > mine[:, None]
    # Of equal ones the first comes first: every rank is taken once.
    before = (others[None, :] == mine[:, None]) & (j[None, :] < i[:, None])
    rank = tl.sum((greater | before).to(tl.int32), 1)
    kept = (i < S) & (rank < count)
    tl.store(best + env * count + rank, mine, mask=kept)
    tl.store(index + env * count + rank, i.to(tl.int64), mask=kept)


def top_values(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length = values.shape
    best = torch.empty((rows, count), dtype=values.dtype, device=values.device)
    index = torch.empty((rows, count), dtype=torch.int64, device=values.device)
    _rank_kernel[(rows, triton.cdiv(length, ROWS))](
        values, best, index, length, count, ROWS=ROWS, BLOCK=triton.next_power_of_2(length)
    )
    return best, index
