"""The greatest values of each row: `torch.topk` for few and short rows (a planner's elites)."""

from __future__ import annotations

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, next_power_of_2, tl

MAX_LENGTH = 2048  # every value is compared with every other one of its row
ROWS = 32  # values that a program finds the rank of


def topk(values: torch.Tensor, count: int, *, fast: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (N, S), none of them NaN -> the greatest (N, count), in descending order, and their indices, int64."""
    if fast and values.is_cuda and values.shape[1] <= MAX_LENGTH:
        return _topk_cuda(values.contiguous(), count)
    return torch.topk(values, count, dim=1)


@jit
def _topk_kernel(values, best, index, S, count, ROWS: tl.constexpr, BLOCK: tl.constexpr):
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


def _topk_cuda(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length = values.shape
    best = torch.empty((rows, count), dtype=values.dtype, device=values.device)
    index = torch.empty((rows, count), dtype=torch.int64, device=values.device)
    _topk_kernel[(rows, cdiv(length, ROWS))](
        values, best, index, length, count, ROWS=ROWS, BLOCK=next_power_of_2(length)
    )
    return best, index
