"""Dropout whose mask is a function of a seed: the step that uses it stays pure, and nothing large has to be drawn.

A number for each element comes from hashing its place together with the seed (the finaliser of MurmurHash3, 32 bits).
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF


def seeded_uniform(shape: tuple[int, ...], seed: torch.Tensor) -> torch.Tensor:
    """seed: 0-d uniform in [0, 1) -> `shape` numbers in [0, 1), the same for the same seed."""
    count = 1
    for size in shape:
        count *= size
    word = torch.arange(count, device=seed.device) * 0x9E3779B1 + (seed.double() * 2**31).long()
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
    word = word ^ (word >> 16)
    return ((word >> 8).float() * 2.0**-24).view(shape)


def seeded_dropout(x: torch.Tensor, rate: float, seed: torch.Tensor | None) -> torch.Tensor:
    """Zero a share `rate` of x and scale up the rest. Without a seed, or at rate 0, x itself."""
    if seed is None or rate == 0.0:
        return x
    keep = seeded_uniform(tuple(x.shape), seed) >= rate
    return x * (keep * (1.0 / (1.0 - rate))).to(x.dtype)
