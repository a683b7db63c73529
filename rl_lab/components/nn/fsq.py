"""Finite scalar quantization (Mentzer et al. 2023): each number of a short vector is rounded to one of a few levels.

There is no codebook, so nothing of it can die, and no loss beside the reconstruction's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.components.nn.quantizer import Quantized, code_shares, entropy_bits, straight_through
from rl_lab.errors import ConfigError


class FSQ(nn.Module):
    """levels: how many values each number may take; their product is the number of codes ([8, 8, 8]: 512)."""

    noise = 0
    levels: torch.Tensor
    basis: torch.Tensor

    def __init__(self, *, levels: Sequence[int] = (8, 8, 8)) -> None:
        super().__init__()
        if not levels or min(levels) < 2:
            raise ConfigError(f"FSQ needs at least two levels for each number, not {list(levels)}")
        self.vocab, self.dim = math.prod(levels), len(levels)
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = [math.prod(levels[:i]) for i in range(len(levels))]
        self.register_buffer("basis", torch.tensor(basis), persistent=False)

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            bounded = self._bound(vectors.float())
            whole = straight_through(bounded, bounded.round())
            half = self.levels // 2
            tokens = ((whole.detach() + half).long().clamp(min=0) * self.basis).sum(-1)
            metrics = {"code_bits": entropy_bits(code_shares(tokens, self.vocab, mask)[1])}
            return Quantized(
                whole / half, tokens, torch.zeros_like(vectors[:, 0], dtype=torch.float32), metrics
            )

    def _bound(self, vectors: torch.Tensor) -> torch.Tensor:
        """Into the range whose rounding gives exactly `levels` values, with a bit of room at its ends."""
        span = (self.levels - 1) * (1 - 1e-3) / 2
        offset = torch.where(self.levels % 2 == 0, 0.5, 0.0)
        return (vectors + torch.atanh(offset / span)).tanh() * span - offset

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        digits = (tokens.unsqueeze(-1) // self.basis) % self.levels
        half = self.levels // 2
        return (digits - half) / half

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """There is nothing to learn."""
