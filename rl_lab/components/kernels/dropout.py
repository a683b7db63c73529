"""Dropout from a seed, in one pass over memory.

The mask is a hash of an element's index and the seed (the finaliser of MurmurHash3, 32 bits): forward and backward
compute it, neither stores it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from rl_lab.components.kernels.triton_jit import cdiv, jit, tl

BLOCK = 1024  # elements of a program
_WORD = 0xFFFFFFFF


def hashed_uniform(shape: tuple[int, ...], word: torch.Tensor) -> torch.Tensor:
    """word: 0-d int64 -> `shape` values in [0, 1), the same for the same word."""
    hashed = torch.arange(math.prod(shape), device=word.device) * 0x9E3779B1 + word
    hashed = hashed & _WORD
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _WORD
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _WORD
    hashed = hashed ^ (hashed >> 16)
    return ((hashed >> 8).float() * 2.0**-24).view(shape)


def kept(shape: tuple[int, ...], rate: float, word: torch.Tensor) -> torch.Tensor:
    """float32: 1 / (1 - rate) where an element stays, else 0."""
    return (hashed_uniform(shape, word) >= rate) * (1.0 / (1.0 - rate))


class SeededDropout(torch.autograd.Function):
    """x (…) contiguous, CUDA; word: 0-d int64, the seed as an integer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float, word: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(word)
        ctx.rate = rate
        return _dropout_cuda(x.contiguous(), rate, word)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (word,) = ctx.saved_tensors
        return _dropout_cuda(grad.contiguous(), ctx.rate, word), None, None


@jit
def dropout_scale(index, word, rate):
    """`kept` at some indices, for use in kernels: 1 / (1 - rate) where an element stays, else 0."""
    h = index.to(tl.uint32) * 0x9E3779B1 + tl.load(word).to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    uniform = (h >> 8).to(tl.float32) * (1.0 / 16777216.0)
    return tl.where(uniform >= rate, 1.0 / (1.0 - rate), 0.0)


@jit
def _dropout_kernel(x, out, word, count, rate, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    y = tl.load(x + index, mask=mask, other=0.0).to(tl.float32) * dropout_scale(index, word, rate)
    tl.store(out + index, y.to(out.dtype.element_ty), mask=mask)


def _dropout_cuda(x: torch.Tensor, rate: float, word: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _dropout_kernel[(cdiv(x.numel(), BLOCK),)](x, out, word, x.numel(), rate, BLOCK=BLOCK)
    return out
