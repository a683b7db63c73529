"""Δ-IRIS' convolutional nets: residual blocks that widen while the picture shrinks, and the mirror of that.

Written from the facts of the paper (Micheli, Alonso, Fleuret 2024): `widths` are multiples of `width`, and `halve` says
after which blocks the picture is halved.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.components.nn.residual_conv import Double, Halve, PictureNet, PictureNorm, ResidualConv

WIDTHS, HALVE = (1, 1, 2, 2, 4), (True, False, True, True, False)  # vmicheli/delta-iris


def latent_side(side: int, halve: Sequence[bool] = HALVE) -> int:
    return side // 2 ** sum(bool(item) for item in halve)


class FrameEncoder(nn.Module):
    """(M, channels, H, W) -> (M, latent, H/8, W/8) with the default widths."""

    def __init__(
        self,
        *,
        channels: int,
        latent: int,
        width: int,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1)]
        here = width
        for multiple, half in zip(widths, halve, strict=True):
            layers.append(ResidualConv(here, multiple * width))
            here = multiple * width
            if half:
                layers.append(Halve(here, 2))
        layers += [PictureNorm(here), nn.Conv2d(here, latent, 3, padding=1)]
        self.layers = PictureNet(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class FrameDecoder(nn.Module):
    """(M, latent, h, w) -> (M, channels, 8·h, 8·w) with the default widths: the encoder's blocks in reverse order."""

    def __init__(
        self,
        *,
        channels: int,
        latent: int,
        width: int,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
    ) -> None:
        super().__init__()
        before = [1, *widths[:-1]]  # width of what each of the encoder's blocks is given
        layers: list[nn.Module] = [nn.Conv2d(latent, widths[-1] * width, 3, padding=1)]
        for multiple, smaller, half in reversed(list(zip(widths, before, halve, strict=True))):
            if half:
                layers.append(Double(multiple * width))
            layers.append(ResidualConv(multiple * width, smaller * width))
        layers += [PictureNorm(width), nn.Conv2d(width, channels, 3, padding=1)]
        self.layers = PictureNet(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
