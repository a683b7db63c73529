"""Dropout from a seed, as one pass over memory.

The mask is a hash of an element's place and the seed (the finaliser of MurmurHash3, 32 bits): forward and backward
compute it, nobody stores it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

_WORD = 0xFFFFFFFF


def hashed_uniform(shape: tuple[int, ...], word: torch.Tensor) -> torch.Tensor:
    """word: 0-d int64 -> `shape` numbers in [0, 1), the same for the same word."""
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
        from rl_lab.components.nn.kernels import dropout_triton

        ctx.save_for_backward(word)
        ctx.rate = rate
        return dropout_triton.drop(x.contiguous(), rate, word)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from rl_lab.components.nn.kernels import dropout_triton

        (word,) = ctx.saved_tensors
        return dropout_triton.drop(grad.contiguous(), ctx.rate, word), None, None
