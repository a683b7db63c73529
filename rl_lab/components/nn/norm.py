"""Root-mean-square normalisation over the channels, as DreamerV3 uses it after every linear and conv layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) × scale over the last axis; computed in float32, given back in x's dtype."""

    def __init__(self, features: int, *, eps: float = 1e-4) -> None:  # eps: danijar/dreamerv3 nets.py
        super().__init__()
        self.features = features
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (…, features) -> (…, features)."""
        return F.rms_norm(x.float(), (self.features,), self.weight, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.features}, eps={self.eps}"
