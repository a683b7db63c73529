"""A transformer's cached steps without gradient: weights merged and cast once, eight kernels a block."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from rl_lab.components.nn.kernels.cached_attention import cached_attention
from rl_lab.components.nn.kernels.residual_norm import residual_norm_forward

Affine = tuple[torch.Tensor, torch.Tensor]  # weight, bias
MOST_TOKENS = 2  # at once: a whole context goes the plain way


def merged(layers: list[Any]) -> Affine:
    """Weight and bias of several linear layers as one that puts their results side by side."""
    return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])


class FrozenBlocks:
    """What the blocks of a `Transformer` compute now, in `dtype`: for dreams, which use the same weights many times."""

    @torch.no_grad()
    def __init__(self, blocks: Any, norm: Any, dtype: torch.dtype) -> None:
        def cast(weight: torch.Tensor, bias: torch.Tensor) -> Affine:
            return weight.detach().to(dtype), bias.detach().to(dtype)

        self.dtype = dtype
        self.products: list[tuple[Affine, Affine, Affine, Affine]] = []
        for block in blocks:
            a, enter, leave = block.attention, block.mlp[0], block.mlp[2]
            self.products.append(
                (
                    cast(*merged([a.query, a.key, a.value])),
                    cast(a.project.weight, a.project.bias),
                    cast(enter.weight, enter.bias),
                    cast(leave.weight, leave.bias),
                )
            )
        norms = [*(part for block in blocks for part in (block.norm1, block.norm2)), norm]
        self.norms = [(part.weight.detach(), part.bias.detach(), part.eps) for part in norms]

    @torch.no_grad()
    def step(
        self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor
    ) -> torch.Tensor:
        """x: (B, T, D), T up to MOST_TOKENS; the cache (B, layers, heads, L, W) is written in place -> (B, T, D)."""
        result = x.dtype
        x, h = residual_norm_forward(x, None, *self.norms[0], self.dtype)
        for n, (qkv, project, enter, leave) in enumerate(self.products):
            y = F.linear(cached_attention(F.linear(h, *qkv), keys[:, n], values[:, n], filled), *project)
            x, h = residual_norm_forward(x, y, *self.norms[2 * n + 1], self.dtype)
            y = F.linear(F.gelu(F.linear(h, *enter)), *leave)
            last = n + 1 == len(self.products)
            x, h = residual_norm_forward(x, y, *self.norms[2 * n + 2], result if last else self.dtype)
        return h.to(result)
