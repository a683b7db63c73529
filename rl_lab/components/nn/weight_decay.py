"""Which weights decay: matrices of linear layers and convolutions do; biases, norms and tables do not (minGPT's groups)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def exempt_from_decay(module: nn.Module) -> None:
    """Mark the biases, norms and embedding tables of a network, for `decayed_adamw` to find."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            table = isinstance(part, nn.Embedding | nn.LayerNorm | nn.GroupNorm)
            if table or "bias" in name or parameter.ndim < 2:
                parameter.no_decay = True  # type: ignore[attr-defined]


def decayed_adamw(
    parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0, **options: Any
) -> torch.optim.AdamW:
    """AdamW in two groups: marked parameters (`exempt_from_decay`) do not decay, the others do."""
    listed = list(parameters)
    decayed = [p for p in listed if not getattr(p, "no_decay", False)]
    spared = [p for p in listed if getattr(p, "no_decay", False)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, **options)
