"""A learned codebook with straight-through gradients (van den Oord et al. 2017), as IRIS trains it."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.quantizer import Quantized, code_shares, entropy_bits, straight_through


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
