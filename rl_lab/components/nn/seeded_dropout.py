"""Dropout whose mask is a function of a seed: the step that uses it stays pure, and nothing large has to be drawn.

A number for each element comes from hashing its place together with the seed (the finaliser of MurmurHash3, 32 bits).
"""

from __future__ import annotations

import torch

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.dropout import CausalSoftmaxDropout, SeededDropout

_WORD = 0xFFFFFFFF


def seed_word(seed: torch.Tensor) -> torch.Tensor:
    """0-d uniform in [0, 1) -> 0-d int64."""
    return (seed.double() * 2**31).long()


def seeded_uniform(shape: tuple[int, ...], seed: torch.Tensor) -> torch.Tensor:
    """seed: 0-d uniform in [0, 1) -> `shape` numbers in [0, 1), the same for the same seed."""
    count = 1
    for size in shape:
        count *= size
    word = torch.arange(count, device=seed.device) * 0x9E3779B1 + seed_word(seed)
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & _WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & _WORD
    word = word ^ (word >> 16)
    return ((word >> 8).float() * 2.0**-24).view(shape)


def seeded_dropout(x: torch.Tensor, rate: float, seed: torch.Tensor | None) -> torch.Tensor:
    """Zero a share `rate` of x and scale up the rest. Without a seed, or at rate 0, x itself."""
    if seed is None or rate == 0.0:
        return x
    if fast() and x.is_cuda:
        result: torch.Tensor = SeededDropout.apply(x, rate, seed_word(seed))
        return result
    keep = seeded_uniform(tuple(x.shape), seed) >= rate
    return x * (keep * (1.0 / (1.0 - rate))).to(x.dtype)


def causal_softmax_dropout(
    scores: torch.Tensor, scale: float, rate: float, seed: torch.Tensor
) -> torch.Tensor:
    """dropout(softmax(scale · scores)) over what lies not ahead: (…, T, T) -> (…, T, T)."""
    if fast() and scores.is_cuda:
        result: torch.Tensor = CausalSoftmaxDropout.apply(scores, scale, rate, seed_word(seed))
        return result
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return seeded_dropout(weights.to(scores.dtype), rate, seed)
