"""How networks that read tokens are initialised: minGPT's way, as the IRIS family uses it."""

from __future__ import annotations

from torch import nn


def init_token_network(module: nn.Module, deviation: float = 0.02) -> None:
    """Normal weights, zero biases, neutral norms. Call it before loading weights, on parts of your own only."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=deviation)
        if isinstance(part, nn.Linear | nn.LayerNorm) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.LayerNorm):
            nn.init.ones_(part.weight)
