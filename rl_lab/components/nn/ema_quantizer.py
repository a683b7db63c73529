"""A codebook on the unit sphere that follows the mean of what chose each code, and revives codes nobody chooses (Δ-IRIS)."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.quantizer import Quantized, code_shares, entropy_bits, straight_through


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
