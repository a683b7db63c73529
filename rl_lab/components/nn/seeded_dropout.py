"""Dropout whose mask is a function of a seed: the step that uses it stays pure, and nothing large has to be drawn.

A number for each element comes from hashing its place together with the seed: see nn/kernels/dropout.py.
"""

from __future__ import annotations

import torch

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.dropout import SeededDropout, hashed_uniform, kept


def seed_word(seed: torch.Tensor) -> torch.Tensor:
    """Uniform in [0, 1), any shape -> int64."""
    return (seed.double() * 2**31).long()


def seeded_uniform(shape: tuple[int, ...], seed: torch.Tensor) -> torch.Tensor:
    """seed: 0-d uniform in [0, 1) -> `shape` numbers in [0, 1), the same for the same seed."""
    return hashed_uniform(shape, seed_word(seed))


def seeded_dropout(x: torch.Tensor, rate: float, seed: torch.Tensor | None) -> torch.Tensor:
    """Zero a share `rate` of x and scale up the rest. Without a seed, or at rate 0, x itself."""
    if seed is None or rate == 0.0:
        return x
    if fast() and x.is_cuda:
        result: torch.Tensor = SeededDropout.apply(x, rate, seed_word(seed))
        return result
    return x * kept(tuple(x.shape), rate, seed_word(seed)).to(x.dtype)


def causal_softmax_dropout(
    scores: torch.Tensor, scale: float, rate: float, seed: torch.Tensor
) -> torch.Tensor:
    """dropout(softmax(scale · scores)) over what lies not ahead: (…, T, T) -> (…, T, T)."""
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    weights = (scores * scale).masked_fill(hidden, -torch.inf).softmax(-1)
    return seeded_dropout(weights.to(scores.dtype), rate, seed)
