"""Pieces of the convolutional nets that encode and decode frames into tokens."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.add_bias import add_bias
from rl_lab.components.nn.kernels.group_norm_silu import fused_group_norm, supports


class PictureNorm(nn.GroupNorm):
    """Group norm over pictures, and SiLU behind it where `silu`.

    32 groups, or as many as the channels allow: only nets smaller than the published ones have fewer.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, silu: bool = True) -> None:
        super().__init__(math.gcd(32, channels), channels, eps=eps)
        self.silu = silu

    def forward(self, x: torch.Tensor, pre: torch.Tensor | None = None) -> torch.Tensor:
        """(M, C, H, W), and (C,) to be added to it first -> the same shape."""
        if fast() and supports(self.num_channels, self.num_groups):
            return fused_group_norm(x, self.weight, self.bias, self.num_groups, self.eps, self.silu, pre)
        normed = super().forward(x if pre is None else x + pre[:, None, None])
        return F.silu(normed) if self.silu else normed


class ResidualConv(nn.Module):
    """Twice norm, SiLU, 3×3 convolution; beside it the input, through a 1×1 convolution where the width changes."""

    def __init__(self, inputs: int, outputs: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1, self.norm2 = PictureNorm(inputs, eps=eps), PictureNorm(outputs, eps=eps)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip: nn.Module = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, inputs, H, W) -> (M, outputs, H, W)."""
        if not fast():
            return self.skip(x) + self.conv2(self.norm2(self.conv1(self.norm1(x))))
        # A bias by itself is a pass over memory: the first one goes with the norm, the others with the sum.
        hidden = self.norm2(F.conv2d(self.norm1(x), self.conv1.weight, padding=1), self.conv1.bias)
        hidden = F.conv2d(hidden, self.conv2.weight, padding=1)
        bias = self.conv2.bias
        assert bias is not None
        if isinstance(self.skip, nn.Conv2d):
            assert self.skip.bias is not None
            return add_bias(F.conv2d(x, self.skip.weight), hidden, bias + self.skip.bias)
        return add_bias(x, hidden, bias)


class ImageAttention(nn.Module):
    """Single-head attention between all places of a picture, added to it."""

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = PictureNorm(channels, eps=eps, silu=False)
        self.query, self.key, self.value, self.project = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> the same shape."""
        normed = self.norm(x)
        q, k, v = (
            layer(normed).flatten(2).transpose(1, 2).unsqueeze(1)
            for layer in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return x + self.project(out)


class Halve(nn.Module):
    """A convolution of stride 2. size 3: padded below and on the right only; size 2: not at all."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.conv = nn.Conv2d(channels, channels, size, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)) if self.size == 3 else x)


class Double(nn.Module):
    """Nearest neighbours, then a 3×3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
