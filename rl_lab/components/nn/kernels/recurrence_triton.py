"""Triton kernel of recurrence.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 32  # of each program


@triton.jit
def _kernel(base, gain, final, out, rows, base_stride, gain_stride, T: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < rows
    y = tl.load(final + row, mask=mask, other=0.0)
    for back in range(T):
        t = T - 1 - back
        b = tl.load(base + row * base_stride + t, mask=mask, other=0.0)
        y = b + tl.load(gain + row * gain_stride + t, mask=mask, other=0.0) * y
        tl.store(out + row * T + t, y, mask=mask)


def reverse_recurrence(base: torch.Tensor, gain: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
    base, gain, final = base.contiguous(), gain.contiguous(), final.contiguous()
    rows, steps = base.shape
    out = torch.empty_like(base)
    _kernel[(triton.cdiv(rows, ROWS),)](
        base, gain, final, out, rows, base.stride(0), gain.stride(0), T=steps, ROWS=ROWS, num_warps=1
    )
    return out
