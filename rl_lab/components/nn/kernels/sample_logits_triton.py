"""Triton kernel of sample_logits.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(logits, noise, stride, index, C, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(logits + row * C + column, mask=column < C, other=-float("inf")).to(tl.float32)
    chance = tl.exp(value - tl.max(value, 0))
    borders = tl.cumsum(chance / tl.sum(chance, 0), 0)
    # The last class takes what rounding leaves above the sum.
    below = (borders <= tl.load(noise + row * stride)) & (column < C - 1)
    tl.store(index + row, tl.sum(below.to(tl.int32), 0).to(tl.int64))


def sample(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    size, classes = logits.shape
    index = torch.empty(size, dtype=torch.int64, device=logits.device)
    block = triton.next_power_of_2(classes)
    _kernel[(size,)](logits, noise, noise.stride(0), index, classes, BLOCK=block, num_warps=4)
    return index
