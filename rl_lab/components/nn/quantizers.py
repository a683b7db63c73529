"""What turns vectors into one of finitely many: the seam that tokenizers use.

`nearest` distances are float32 also under autocast: rounding to bfloat16 would change which code is the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.errors import ConfigError


@dataclass
class Quantized:
    """Vectors (M, D) replaced by codes, with the gradient of the vectors themselves."""

    vectors: torch.Tensor  # (M, D)
    tokens: torch.Tensor  # (M,) int64
    loss: torch.Tensor  # (M,) what the quantizer itself wants to be small; zeros where it wants nothing
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # 0-d, detached


class Quantizer(Protocol):
    """A network part. Codes are numbered 0 … vocab - 1."""

    vocab: int
    dim: int  # width of the vectors
    noise: int  # uniform numbers that `learn` wants

    def __call__(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        """vectors: (M, D); mask: (M,) bool, which of them count in the metrics."""

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """(…) -> (…, D)."""

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """What is learned without a gradient. Called once in each training step, and nowhere else."""


def straight_through(vectors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The codes, with the gradient of the vectors."""
    return vectors + (codes - vectors).detach()


def code_shares(
    tokens: torch.Tensor, vocab: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(M,) tokens -> which code each is, (M, vocab) with zeros where masked; and the codes' shares (vocab,)."""
    chosen = (tokens.unsqueeze(-1) == torch.arange(vocab, device=tokens.device)).float()
    if mask is not None:
        chosen = chosen * mask.unsqueeze(-1)
    return chosen, chosen.sum(0) / chosen.sum().clamp(min=1.0)


def entropy_bits(shares: torch.Tensor) -> torch.Tensor:
    """(K,) probabilities -> 0-d."""
    return -(shares * shares.clamp(min=1e-10).log2()).sum()


# --------------------
# A learned codebook with straight-through gradients (van den Oord et al. 2017), as IRIS trains it.


class VectorQuantizer(nn.Module):
    """The nearest code by Euclidean distance; codes and vectors are drawn together by two squared errors.

    commitment: weight of the error that moves vectors to their codes. IRIS has 1; van den Oord et al. have 0.25.
    """

    noise = 0

    def __init__(self, *, vocab: int, dim: int, commitment: float = 1.0) -> None:
        super().__init__()
        self.vocab, self.dim, self.commitment = vocab, dim, commitment
        self.codes = nn.Embedding(vocab, dim)
        nn.init.uniform_(self.codes.weight, -1.0 / vocab, 1.0 / vocab)

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            vectors, table = vectors.float(), self.codes.weight
            with torch.no_grad():  # the vectors' own length is the same for every code
                tokens = (table.square().sum(-1) - 2.0 * vectors @ table.t()).argmin(-1)
            codes = self.codes(tokens)
            loss = (vectors.detach() - codes).square().mean(-1)
            loss = loss + self.commitment * (vectors - codes.detach()).square().mean(-1)
            with torch.no_grad():
                shares = code_shares(tokens, self.vocab, mask)[1]
                metrics = {"code_bits": entropy_bits(shares)}
            return Quantized(straight_through(vectors, codes), tokens, loss, metrics)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.codes(tokens)

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """Its codes learn by gradient."""


# --------------------
# A codebook on the unit sphere that follows the mean of what chose each code, and revives codes nobody chooses (Δ-IRIS).


class EMAQuantizer(nn.Module):
    """The code of the largest cosine. The codebook is a buffer: no gradient, no optimizer.

    Numbers of vmicheli/delta-iris: commitment 0.02, code_rate 0.99, usage_rate 0.98.

    Revival: while the entropy of usage is below log2(vocab) - 2 bits, codes used less than 1 / (10 · vocab) are replaced by
    vectors of the batch; for the first `revive_updates` updates, and later only below 1 bit.
    """

    table: torch.Tensor  # (vocab, dim), unit length
    usage: torch.Tensor  # (vocab,) shares, sum 1
    updates: torch.Tensor  # 0-d int64

    def __init__(
        self,
        *,
        vocab: int,
        dim: int,
        commitment: float = 0.02,
        code_rate: float = 0.99,
        usage_rate: float = 0.98,
        revive_updates: int = 0,
    ) -> None:
        super().__init__()
        self.vocab, self.dim, self.noise = vocab, dim, vocab
        self.commitment, self.code_rate, self.usage_rate = commitment, code_rate, usage_rate
        self.revive_updates = revive_updates
        self.register_buffer("table", F.normalize(torch.randn(vocab, dim), dim=-1))
        self.register_buffer("usage", torch.full((vocab,), 1.0 / vocab))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = F.normalize(vectors.float(), dim=-1)
            with torch.no_grad():
                tokens = (vectors @ self.table.t()).argmax(-1)
            # A copy: `learn` writes the table while this step's graph still has it.
            codes = self.table[tokens]
            loss = self.commitment * (vectors - codes).square().mean(-1)
            metrics = {
                "code_bits": entropy_bits(self.usage),
                "dead_codes": (self.usage < self._rare).float().sum(),
            }
            return Quantized(straight_through(vectors, codes), tokens, loss, metrics)

    @property
    def _rare(self) -> float:
        return 0.1 / self.vocab

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table[tokens]

    @torch.no_grad()
    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """vectors: (M, dim) as given to `forward`, tokens (M,), mask (M,) bool, noise (vocab,) uniform."""
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = F.normalize(vectors.float(), dim=-1)
            chosen, shares = code_shares(tokens, self.vocab, mask)
            count = chosen.sum(0)
            means = chosen.t() @ vectors / count.clamp(min=1.0).unsqueeze(-1)
            moved = F.normalize(torch.lerp(means, self.table, self.code_rate), dim=-1)
            table = torch.where(count.unsqueeze(-1) > 0, moved, self.table)
            usage = torch.lerp(shares, self.usage, self.usage_rate)
            bits = entropy_bits(usage)
            allowed = (self.updates < self.revive_updates) | (bits < 1.0)
            revive = allowed & (bits < math.log2(self.vocab) - 2.0) & (usage < self._rare)
            # Any real vector of the batch: the masked ones sort behind, and are never reached.
            order = torch.argsort(~mask, stable=True)
            pick = (noise * mask.sum()).long().clamp(max=len(mask) - 1)
            self.table.copy_(torch.where(revive.unsqueeze(-1), vectors[order[pick]], table))
            self.usage.copy_(usage)
            self.updates.add_(1)


# --------------------
# Finite scalar quantization (Mentzer et al. 2023): each number of a short vector is rounded to one of a few levels.
#
# There is no codebook, so nothing of it can die, and no loss beside the reconstruction's.


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
