"""The convolutional nets of IRIS' tokenizer: a picture to a grid of features, and back.

Written from the facts of the paper (Micheli, Alonso, Fleuret 2023): widths, depths and where attention stands.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.components.nn.residual_conv import (
    Double,
    Halve,
    ImageAttention,
    PictureNet,
    PictureNorm,
    ResidualConv,
)

EPS = 1e-6  # of the norms


def _middle(width: int) -> nn.Sequential:
    return nn.Sequential(
        ResidualConv(width, width, eps=EPS),
        ImageAttention(width, eps=EPS),
        ResidualConv(width, width, eps=EPS),
    )


def _level(width: int, blocks: int, attends: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers.append(ResidualConv(width, width, eps=EPS))
        if attends:
            layers.append(ImageAttention(width, eps=EPS))
    return layers


class IrisEncoder(nn.Module):
    """`levels` resolutions of `blocks` residual blocks each, halved between them."""

    def __init__(
        self,
        *,
        channels: int,
        side: int,
        width: int,
        levels: int,
        latent: int,
        attention: Sequence[int],
        blocks: int = 2,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1)]
        for level in range(levels):
            layers += _level(width, blocks, side >> level in attention)
            if level + 1 < levels:
                layers.append(Halve(width, 3))
        self.layers = PictureNet(*layers, _middle(width))
        self.norm, self.out = PictureNorm(width, eps=EPS), nn.Conv2d(width, latent, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) in [-1, 1] -> (M, latent, H / 2^(levels-1), …)."""
        return self.out(self.norm(*self.layers.pending(x)))


class IrisDecoder(nn.Module):
    """The encoder's mirror, with one residual block more at each resolution."""

    def __init__(
        self,
        *,
        channels: int,
        side: int,
        width: int,
        levels: int,
        latent: int,
        attention: Sequence[int],
        blocks: int = 3,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(latent, width, 3, padding=1), _middle(width)]
        for level in reversed(range(levels)):
            layers += _level(width, blocks, side >> level in attention)
            if level:
                layers.append(Double(width))
        self.layers = PictureNet(*layers)
        self.norm, self.out = PictureNorm(width, eps=EPS), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, latent, h, w) -> (M, C, H, W), about in [-1, 1]."""
        return self.out(self.norm(*self.layers.pending(x)))
