"""Triton kernels of causal_attention.py: copies that split and merge heads. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 64  # tokens that a program copies


@triton.jit
def _kernel(
    x, out, T, P: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """One program for some tokens of one part and head: (B, T, P, H, WIDTH) to (P, B, H, T, WIDTH), or back."""
    which = tl.program_id(0)
    head, part, row = which % H, (which // H) % P, which // (H * P)
    batch = tl.num_programs(0) // (H * P)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, W)
    mask = (token[:, None] < T) & (column[None, :] < WIDTH)
    together = (row * T + token[:, None]).to(tl.int64) * (P * H * WIDTH) + (part * H + head) * WIDTH
    apart = (((part * batch + row) * H + head).to(tl.int64) * T + token[:, None]) * WIDTH
    if SPLIT:
        tl.store(out + apart + column[None, :], tl.load(x + together + column[None, :], mask=mask), mask=mask)
    else:
        tl.store(out + together + column[None, :], tl.load(x + apart + column[None, :], mask=mask), mask=mask)


def _launch(
    x: torch.Tensor, out: torch.Tensor, batch: int, tokens: int, parts: int, heads: int, width: int, split: bool
) -> torch.Tensor:  # fmt: skip
    _kernel[(batch * parts * heads, triton.cdiv(tokens, ROWS))](
        x, out, tokens, P=parts, H=heads, WIDTH=width, W=triton.next_power_of_2(width), ROWS=ROWS, SPLIT=split
    )
    return out


def split_heads(x: torch.Tensor, parts: int, heads: int) -> torch.Tensor:
    x = x.contiguous()
    batch, tokens, whole = x.shape
    width = whole // (parts * heads)
    out = torch.empty((parts, batch * heads, tokens, width), dtype=x.dtype, device=x.device)
    return _launch(x, out, batch, tokens, parts, heads, width, True)


def merge_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    x = x.contiguous()
    parts, several, tokens, width = x.shape
    batch = several // heads
    out = torch.empty((batch, tokens, parts * heads * width), dtype=x.dtype, device=x.device)
    return _launch(x, out, batch, tokens, parts, heads, width, False)
