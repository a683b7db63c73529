"""Quantizers, which map vectors to discrete codes: VQ (IRIS), EMA codebook (Δ-IRIS), FSQ, LFQ, residual VQ, none.

All have the methods of `protocols.Quantizer`. Distances are float32 under autocast too: rounding to bfloat16
would change which code is nearest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.errors import ConfigError
from rl_lab.records import Quantized
from rl_lab.utils.ranks import active, count_over_ranks, mean_over_ranks, rows_of_ranks


def straight_through(vectors: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """The codes, with the gradient of the vectors."""
    return vectors + (codes - vectors).detach()


def code_shares(
    tokens: torch.Tensor, vocab: int, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(M,) tokens -> one-hot codes (M, vocab), zeros where masked; and the codes' frequencies (vocab,)."""
    chosen = (tokens.unsqueeze(-1) == torch.arange(vocab, device=tokens.device)).float()
    if mask is not None:
        chosen = chosen * mask.unsqueeze(-1)
    return chosen, chosen.sum(0) / chosen.sum().clamp(min=1.0)


def entropy_bits(shares: torch.Tensor) -> torch.Tensor:
    """(K,) probabilities -> 0-d."""
    return -(shares * shares.clamp(min=1e-10).log2()).sum()


def _shuffled(first: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A permutation (N,): the places where `first` (N,) is True in random order, then the others."""
    return torch.argsort(noise + 2.0 * ~first, stable=True)


def _joint_batch(
    vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What all ranks give to `EMAQuantizer.learn`, in the order of the ranks."""
    if not active():
        return vectors, tokens, mask, noise
    count = len(mask)
    codes = rows_of_ranks(noise[None, count:])[0]
    joint = torch.cat([rows_of_ranks(noise[:count]), codes])
    return rows_of_ranks(vectors), rows_of_ranks(tokens), rows_of_ranks(mask.to(torch.uint8)).bool(), joint


class VectorQuantizer(nn.Module):
    """Learned codebook, Euclidean distance, straight-through gradients (van den Oord et al. 2017; IRIS).

    commitment: weight of the loss that moves vectors to their codes: 1 in IRIS, 0.25 in van den Oord et al.
    """

    def __init__(self, *, vocab: int, dim: int, commitment: float = 1.0) -> None:
        super().__init__()
        self.vocab, self.dim, self.commitment = vocab, dim, commitment
        self.codes = nn.Embedding(vocab, dim)
        nn.init.uniform_(self.codes.weight, -1.0 / vocab, 1.0 / vocab)

    def noise_size(self, vectors: int) -> int:
        return 0

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            vectors, table = vectors.float(), self.codes.weight
            with torch.no_grad():  # the norm of a vector is the same for every code, so it is left out
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
        """Nothing to do: the codes are trained by gradients."""


class EMAQuantizer(nn.Module):
    """Codebook on the unit sphere with cosine similarity (Δ-IRIS). It is a buffer: no gradient, no optimizer.

    Each code is a moving average of the normalized means of the vectors assigned to it. Values of
    vmicheli/delta-iris: commitment 0.02, code_rate 0.99, usage_rate 0.98.

    Revival: while the entropy of the usage is below log2(vocab) - 2 bits, codes with a usage below
    1 / (10 · vocab) are replaced by different vectors of the batch, and their usage becomes 1 / vocab; after
    `revive_updates` updates only below 1 bit.
    """

    table: torch.Tensor  # (vocab, dim), unit length
    usage: torch.Tensor  # (vocab,) moving averages of the frequencies; revival adds to their sum of 1
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
        self.vocab, self.dim = vocab, dim
        self.commitment, self.code_rate, self.usage_rate = commitment, code_rate, usage_rate
        self.revive_updates = revive_updates
        self.register_buffer("table", F.normalize(torch.randn(vocab, dim), dim=-1))
        self.register_buffer("usage", torch.full((vocab,), 1.0 / vocab))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    def noise_size(self, vectors: int) -> int:
        return vectors + self.vocab

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = F.normalize(vectors.float(), dim=-1)
            with torch.no_grad():
                tokens = (vectors @ self.table.t()).argmax(-1)
            # Indexing copies: `learn` writes to the table while autograd still needs the codes.
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
        """vectors: (M, dim) as passed to `forward`, tokens (M,), mask (M,) bool, noise (M + vocab,) uniform.

        With several ranks each learns from the vectors of all, with the first rank's noise for the codes.
        """
        vectors, tokens, mask, noise = _joint_batch(vectors, tokens, mask, noise)
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = F.normalize(vectors.float(), dim=-1)
            chosen, shares = code_shares(tokens, self.vocab, mask)
            count = chosen.sum(0)
            means = F.normalize(chosen.t() @ vectors, dim=-1)  # the sum has the direction of the mean
            moved = F.normalize(torch.lerp(means, self.table, self.code_rate), dim=-1)
            table = torch.where(count.unsqueeze(-1) > 0, moved, self.table)
            usage = torch.lerp(shares, self.usage, self.usage_rate)
            bits = entropy_bits(usage)
            allowed = (self.updates < self.revive_updates) | (bits < 1.0)
            expired = allowed & (bits < math.log2(self.vocab) - 2.0) & (usage < self._rare)
            # Expired codes in random order get the unmasked vectors in random order, one each.
            vector_order, code_order = (
                _shuffled(mask, noise[: len(mask)]),
                _shuffled(expired, noise[len(mask) :]),
            )
            rank = torch.empty_like(code_order).scatter_(
                0, code_order, torch.arange(self.vocab, device=code_order.device)
            )
            revive = expired & (rank < mask.sum())
            picked = vectors[vector_order[rank.clamp(max=len(mask) - 1)]]
            self.table.copy_(torch.where(revive.unsqueeze(-1), picked, table))
            self.usage.copy_(torch.where(revive, 1.0 / self.vocab, usage))
            self.updates.add_(1)


class FSQ(nn.Module):
    """Finite scalar quantization (Mentzer et al. 2023): each dimension is rounded to one of a few levels.

    It has no codebook, so no dead codes, and no loss of its own.

    levels: number of values of each dimension; their product is the number of codes ([8, 8, 8]: 512)
    """

    levels: torch.Tensor
    basis: torch.Tensor

    def __init__(self, *, levels: Sequence[int] = (8, 8, 8)) -> None:
        super().__init__()
        if not levels or min(levels) < 2:
            raise ConfigError(f"FSQ levels={list(levels)} must have at least two levels for each dimension")
        self.vocab, self.dim = math.prod(levels), len(levels)
        self.register_buffer("levels", torch.tensor(levels), persistent=False)
        basis = [math.prod(levels[:i]) for i in range(len(levels))]
        self.register_buffer("basis", torch.tensor(basis), persistent=False)

    def noise_size(self, vectors: int) -> int:
        return 0

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            bounded = self._bound(vectors.float())
            rounded = straight_through(bounded, bounded.round())
            half = self.levels // 2
            tokens = ((rounded.detach() + half).long().clamp(min=0) * self.basis).sum(-1)
            metrics = {"code_bits": entropy_bits(code_shares(tokens, self.vocab, mask)[1])}
            return Quantized(
                rounded / half, tokens, torch.zeros_like(vectors[:, 0], dtype=torch.float32), metrics
            )

    def _bound(self, vectors: torch.Tensor) -> torch.Tensor:
        """Map to a range that rounds to exactly `levels` values, slightly smaller at both ends."""
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
        """Nothing to do: there is no codebook."""


class LFQ(nn.Module):
    """Lookup-free quantization (Yu et al. 2023): each dimension is replaced by its sign, -1 or 1.

    There are 2^dim codes and no codebook. Each vector should be near one code, and all codes should be used:
    entropy_weight × (mean entropy of the codes of a vector - entropy of the codes of the batch), in nats,
    where a code's probability is the softmax of 2 · vector · code / temperature.

    Values of lucidrains/vector-quantize-pytorch 1.32.0 lookup_free_quantization.py: entropy_weight 0.1,
    temperature 0.01. commitment: weight of the squared distance to the code.
    """

    signs: torch.Tensor  # (vocab, dim), -1 or 1
    basis: torch.Tensor

    def __init__(
        self,
        *,
        dim: int = 9,
        entropy_weight: float = 0.1,
        commitment: float = 0.25,
        temperature: float = 0.01,
    ) -> None:
        super().__init__()
        if not 1 <= dim <= 16:
            raise ConfigError(f"LFQ dim={dim} must be 1 to 16: it has 2^dim codes")
        self.vocab, self.dim = 2**dim, dim
        self.entropy_weight, self.commitment, self.temperature = entropy_weight, commitment, temperature
        basis = 2 ** torch.arange(dim)
        bits = (torch.arange(self.vocab).unsqueeze(-1) // basis) % 2
        self.register_buffer("basis", basis, persistent=False)
        self.register_buffer("signs", bits.float() * 2.0 - 1.0, persistent=False)

    def noise_size(self, vectors: int) -> int:
        return 0

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            vectors = vectors.float()
            positive = vectors > 0.0
            tokens = (positive.long() * self.basis).sum(-1)
            codes = positive.float() * 2.0 - 1.0
            loss = self.commitment * (vectors - codes).square().mean(-1)
            if self.entropy_weight:
                loss = loss + self.entropy_weight * self._entropy_gap(vectors, mask)
            metrics = {"code_bits": entropy_bits(code_shares(tokens, self.vocab, mask)[1])}
            return Quantized(straight_through(vectors, codes), tokens, loss, metrics)

    def _entropy_gap(self, vectors: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """(M, D) -> (M,): entropy of each vector's codes, minus the entropy of the batch's codes."""
        log_shares = (2.0 / self.temperature * vectors @ self.signs.t()).log_softmax(-1)
        shares = log_shares.exp()
        each = -(shares * log_shares).sum(-1)
        if mask is None:
            mean = shares.mean(0)
        else:
            weight = mask.to(shares.dtype)
            mean = weight @ shares / count_over_ranks(weight.sum())
        mean = mean_over_ranks(mean)
        return each + (mean * mean.clamp(min=1e-10).log()).sum()

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.signs[tokens]

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """Nothing to do: there is no codebook."""


class ResidualVQ(nn.Module):
    """Residual quantization: each stage quantizes what the stages before left over (Zeghidour et al. 2021).

    The codes of all stages are one token, so `codes`^`stages` different tokens: 32 codes and 2 stages make
    1024. The vector is the sum of its stages' codes; the loss is the sum of theirs.
    """

    def __init__(self, *, codes: int = 32, stages: int = 2, dim: int, commitment: float = 1.0) -> None:
        super().__init__()
        if stages < 1:
            raise ConfigError(f"ResidualVQ stages={stages} must be at least 1")
        self.vocab, self.dim, self.codes = codes**stages, dim, codes
        self.stages: Any = nn.ModuleList(
            VectorQuantizer(vocab=codes, dim=dim, commitment=commitment) for _ in range(stages)
        )

    def noise_size(self, vectors: int) -> int:
        return 0

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        with torch.autocast(vectors.device.type, enabled=False):
            rest = vectors = vectors.float()
            total = torch.zeros_like(vectors)
            tokens = torch.zeros_like(vectors[:, 0], dtype=torch.int64)
            loss = torch.zeros_like(vectors[:, 0])
            for number, stage in enumerate(self.stages):
                found = stage(rest, mask)
                codes = stage.embed(found.tokens).detach()
                tokens = tokens + found.tokens * self.codes**number
                loss, total, rest = loss + found.loss, total + codes, rest - codes
            metrics = {"code_bits": entropy_bits(code_shares(tokens, self.vocab, mask)[1])}
            return Quantized(straight_through(vectors, total), tokens, loss, metrics)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = [
            stage.embed((tokens // self.codes**number) % self.codes)
            for number, stage in enumerate(self.stages)
        ]
        return torch.stack(parts).sum(0)

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """Nothing to do: the codes are trained by gradients."""


class Continuous(nn.Module):
    """No quantizer, as a control: vectors are only limited to (-1, 1) by tanh.

    `vocab` is 0, and a "token" is the vector itself: `Quantized.tokens` and the tokens of the tokenizer are
    float (…, dim). A world model predicts them by regression (`TokenWorldModel(vocab=0, code=dim)`).
    """

    vocab = 0

    def __init__(self, *, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def noise_size(self, vectors: int) -> int:
        return 0

    def forward(self, vectors: torch.Tensor, mask: torch.Tensor | None = None) -> Quantized:
        limited = torch.tanh(vectors.float())
        return Quantized(limited, limited, torch.zeros_like(limited[:, 0]))

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens

    def learn(
        self, vectors: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor, noise: torch.Tensor
    ) -> None:
        """Nothing to do: there are no codes."""
