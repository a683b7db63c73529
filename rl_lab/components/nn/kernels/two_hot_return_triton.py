"""Triton kernel of two_hot_return.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 4  # sequences of a program


@triton.jit
def _decoded(x, b, inside):
    x = tl.where(inside[None, :], x, float("-inf"))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    mean = tl.sum(e * b[None, :], 1) / tl.sum(e, 1)
    size = tl.exp(tl.abs(mean)) - 1.0
    return tl.where(mean < 0.0, -size, size)


@triton.jit
def _return_kernel(
    rewards, values, bias, bins, weight, out, rows,
    reward_step, reward_row, value_member, value_row, worst,
    H: tl.constexpr, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < K
    mask = (row[:, None] < rows) & inside[None, :]
    b = tl.load(bins + column, mask=inside, other=0.0)
    at = row[:, None].to(tl.int64)
    total = tl.zeros((ROWS,), tl.float32)
    for t in tl.static_range(H):
        x = tl.load(rewards + t * reward_step + at * reward_row + column[None, :], mask=mask, other=0.0)
        w = tl.load(weight + row * (H + 1) + t, mask=row < rows, other=0.0)
        total += w * _decoded(x.to(tl.float32), b, inside)
    last = tl.load(weight + row * (H + 1) + H, mask=row < rows, other=0.0)
    for member in tl.static_range(E):
        x = tl.load(values + member * value_member + at * value_row + column[None, :], mask=mask, other=0.0)
        x = x.to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + member * K + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        total += last / E * _decoded(x, b, inside)
    total = tl.where(total == total, total, worst)
    tl.store(out + row, total, mask=row < rows)


def two_hot_return(
    rewards: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    bins: torch.Tensor,
    weight: torch.Tensor,
    worst: float,
) -> torch.Tensor:
    steps, rows, count = rewards.shape
    out = torch.empty(rows, dtype=torch.float32, device=rewards.device)
    bias = None if bias is None else bias.contiguous()
    _return_kernel[(triton.cdiv(rows, ROWS),)](
        rewards, values, values if bias is None else bias, bins, weight.contiguous(), out, rows,
        rewards.stride(0), rewards.stride(1), values.stride(0), values.stride(1), worst,
        H=steps, E=len(values), K=count, BLOCK=triton.next_power_of_2(count), ROWS=ROWS,
        HAS_BIAS=bias is not None, num_warps=4,
    )  # fmt: skip
    return out
