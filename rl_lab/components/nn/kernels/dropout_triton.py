"""Triton kernels of dropout.py, and of the causal softmax with dropout in causal_attention.py. Imported on CUDA only."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def kept(place, word, rate):
    """MurmurHash3's finaliser, as in dropout.py: 1 / (1 − rate) where an element stays, else 0."""
    h = place.to(tl.uint32) * 0x9E3779B1 + tl.load(word).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    number = (h >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(number >= rate, 1.0 / (1.0 - rate), 0.0)


@triton.jit
def _drop_kernel(x, out, word, count, rate, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    y = tl.load(x + place, mask=mask, other=0.0).to(tl.float32) * kept(place, word, rate)
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _probabilities(scores, row, column, T, scale):
    """Softmax of one row of scores over the places up to its own."""
    seen = column <= row % T
    z = tl.load(scores + row.to(tl.int64) * T + column, mask=seen & (column < T), other=-float("inf")).to(
        tl.float32
    )
    e = tl.exp(z * scale - tl.max(z, 0) * scale)
    e = tl.where(seen & (column < T), e, 0.0)
    return e / tl.sum(e, 0)


@triton.jit
def _softmax_forward_kernel(scores, out, word, T, scale, rate, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    y = _probabilities(scores, row, column, T, scale) * kept(row * T + column, word, rate)
    tl.store(out + row.to(tl.int64) * T + column, y.to(out.dtype.element_ty), mask=column < T)


@triton.jit
def _softmax_backward_kernel(grad, scores, out, word, T, scale, rate, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    p = _probabilities(scores, row, column, T, scale)
    g = tl.load(grad + row.to(tl.int64) * T + column, mask=column < T, other=0.0).to(tl.float32)
    g = g * kept(row * T + column, word, rate)
    result = scale * p * (g - tl.sum(p * g, 0))
    tl.store(out + row.to(tl.int64) * T + column, result.to(out.dtype.element_ty), mask=column < T)


def drop(x: torch.Tensor, rate: float, word: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _drop_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, word, x.numel(), rate, BLOCK=BLOCK)
    return out


def softmax_forward(scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(scores)
    width = scores.shape[-1]
    _softmax_forward_kernel[(scores.numel() // width,)](
        scores, out, word, width, scale, rate, BLOCK=triton.next_power_of_2(width)
    )
    return out


def softmax_backward(
    grad: torch.Tensor, scores: torch.Tensor, scale: float, rate: float, word: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(scores)
    width = scores.shape[-1]
    _softmax_backward_kernel[(scores.numel() // width,)](
        grad, scores, out, word, width, scale, rate, BLOCK=triton.next_power_of_2(width)
    )
    return out
