"""Triton kernel of cached_attention.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256  # places of the cache that are read at once, at most


@triton.jit
def _kernel(
    qkv, keys, values, filled, out, batch_stride, head_stride, L, scale,
    H: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, T: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a row, a head and a new token. W, NEW: WIDTH and T rounded up to powers of two."""
    row, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, W)
    inside = column < WIDTH
    start = tl.load(filled + row).to(tl.int32)
    old = tl.minimum(start, L - 1)  # places before this one stay as they are
    mine = tl.minimum(start + token, L - 1)

    source = qkv + row.to(tl.int64) * (T * 3 * H * WIDTH) + head * WIDTH
    q = tl.load(source + token * (3 * H * WIDTH) + column, mask=inside, other=0.0).to(tl.float32) * scale

    # The new tokens, from the product's result: nobody reads what is written to the cache in this call.
    new = tl.arange(0, NEW)
    theirs = tl.minimum(start + new, L - 1)
    after = tl.minimum(start + new + 1, L - 1)
    last = (new == T - 1) | (after != theirs)  # of those at one place the last wins
    seen = (new < T) & last & (theirs <= mine)
    at = new[:, None] * (3 * H * WIDTH) + column[None, :]
    mask = (new[:, None] < T) & inside[None, :]
    k = tl.load(source + H * WIDTH + at, mask=mask, other=0.0)
    v = tl.load(source + 2 * H * WIDTH + at, mask=mask, other=0.0)
    score = tl.where(seen, tl.sum(k.to(tl.float32) * q[None, :], 1), -float("inf"))
    highest = tl.max(score, 0)
    e = tl.exp(score - highest)
    total = tl.sum(e, 0)
    result = tl.sum(e[:, None] * v.to(tl.float32), 0)

    keys += row.to(tl.int64) * batch_stride + head * head_stride
    values += row.to(tl.int64) * batch_stride + head * head_stride
    to = theirs[:, None] * WIDTH + column[None, :]
    writes = mask & (last & (new == token))[:, None]
    tl.store(keys + to, k, mask=writes)
    tl.store(values + to, v, mask=writes)

    # Names of their own: what a loop assigns anew must keep its shape.
    for begin in range(0, old, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        there = place < old
        spot = place[:, None] * WIDTH + column[None, :]
        within = there[:, None] & inside[None, :]
        old_k = tl.load(keys + spot, mask=within, other=0.0).to(tl.float32)
        old_v = tl.load(values + spot, mask=within, other=0.0).to(tl.float32)
        old_score = tl.where(there, tl.sum(old_k * q[None, :], 1), -float("inf"))
        higher = tl.maximum(highest, tl.max(old_score, 0))
        old_e = tl.exp(old_score - higher)
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(old_e, 0)
        result = result * shrink + tl.sum(old_e[:, None] * old_v, 0)
        highest = higher
    end = (row * T + token).to(tl.int64) * (H * WIDTH) + head * WIDTH + column
    tl.store(out + end, (result / total).to(out.dtype.element_ty), mask=inside)


def forward(
    qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor
) -> torch.Tensor:
    qkv = qkv.contiguous()
    batch, heads, length, width = keys.shape
    count = qkv.shape[1]
    assert keys.stride() == values.stride() and keys.stride()[2:] == (width, 1)
    assert keys.dtype == values.dtype == qkv.dtype
    out = torch.empty((batch, count, heads * width), dtype=qkv.dtype, device=qkv.device)
    _kernel[(batch, heads, count)](
        qkv, keys, values, filled, out, keys.stride(0), keys.stride(1), length, width**-0.5,
        H=heads, WIDTH=width, W=triton.next_power_of_2(width), T=count, NEW=triton.next_power_of_2(count),
        BLOCK=max(16, min(BLOCK, triton.next_power_of_2(length))), num_warps=8,
    )  # fmt: skip
    return out
