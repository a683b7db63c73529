"""Triton kernels of normal_action.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.jit
def _sample_kernel(raw, noise, out, count, D, low, width, temperature, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    at = raw + (i // D) * (2 * D) + i % D
    mean = 2.0 * tl.sigmoid(2.0 * tl.load(at, mask=inside, other=0.0).to(tl.float32)) - 1.0  # tanh
    std = width * tl.sigmoid(tl.load(at + D, mask=inside, other=0.0).to(tl.float32) + 2.0) + low
    tl.store(out + i, mean + std * temperature * tl.load(noise + i, mask=inside, other=0.0), mask=inside)


@triton.jit
def _limit_kernel(action, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(action + i, mask=i < count, other=0.0)
    value = value / tl.maximum(tl.abs(value), 1.0)
    tl.store(out + i, value.to(out.dtype.element_ty), mask=i < count)


def sample_normal(
    raw: torch.Tensor, noise: torch.Tensor, min_std: float, max_std: float, temperature: float
) -> torch.Tensor:
    out = torch.empty(noise.shape, dtype=torch.float32, device=raw.device)
    count = out.numel()
    _sample_kernel[(triton.cdiv(count, BLOCK),)](
        raw.contiguous(), noise.contiguous(), out, count, noise.shape[-1], min_std, max_std - min_std,
        temperature, BLOCK=BLOCK,
    )  # fmt: skip
    return out


def limit_action(action: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(action.shape, dtype=dtype, device=action.device)
    count = out.numel()
    _limit_kernel[(triton.cdiv(count, BLOCK),)](action.contiguous(), out, count, BLOCK=BLOCK)
    return out
