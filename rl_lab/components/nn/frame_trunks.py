"""Networks that turn a frame into a vector for a recurrent policy. Frames in [0, 1]; they see them in [-1, 1]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.representation_learners.frame_convnet import HALVE, WIDTHS, FrameEncoder, latent_side
from rl_lab.components.representation_learners.tokenizer import frame_shape
from rl_lab.errors import ConfigError
from rl_lab.records import Spec


class PoolTrunk(nn.Module):
    """3×3 convolution, pooling by 2, ReLU, for each of `channels` (IRIS)."""

    def __init__(self, spec: Spec, *, channels: Sequence[int] = (32, 32, 64, 64)) -> None:
        super().__init__()
        inputs, side = frame_shape(spec)
        if side >> len(channels) < 1:
            raise ConfigError(
                f"pictures with sides of {side} cannot be pooled {len(channels)} times: give fewer channels"
            )
        layers: list[nn.Module] = []
        for before, after in zip([inputs, *channels[:-1]], channels):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Flatten())
        self.width = channels[-1] * (side >> len(channels)) ** 2

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> (M, width)."""
        x = frames * 2.0 - 1.0
        if not fast():
            return self.layers(x)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                assert layer.bias is not None
                pooled = F.max_pool2d(F.conv2d(x, layer.weight, padding=1), 2)
                x = F.relu(pooled + layer.bias.to(pooled.dtype)[:, None, None])  # of a quarter of the places
        return x.flatten(1)


class ResidualTrunk(nn.Module):
    """The residual net of Δ-IRIS' frames."""

    def __init__(
        self,
        spec: Spec,
        *,
        width: int = 32,
        latent: int = 16,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
    ) -> None:
        super().__init__()
        channels, side = frame_shape(spec)
        self.net = FrameEncoder(
            channels=channels, latent=latent, width=width, widths=tuple(widths), halve=tuple(halve)
        )
        self.width = latent * latent_side(side, halve) ** 2

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> (M, width)."""
        return self.net(frames * 2.0 - 1.0).flatten(1)
