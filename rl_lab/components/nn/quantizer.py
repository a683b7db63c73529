"""What turns vectors into one of finitely many: the seam that tokenizers use.

`nearest` distances are float32 also under autocast: rounding to bfloat16 would change which code is the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch


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
