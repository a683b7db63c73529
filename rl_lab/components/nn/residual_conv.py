"""Pieces of the convolutional nets that encode and decode frames into tokens.

A bias by itself is a pass over memory. On the fast path a layer may therefore leave it out of its result, and hand it on
beside (`pre`, one number for each channel): norms and sums add it where they read the picture anyway. `PictureNet` says
which layer may.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.kernels.add_bias import add_bias
from rl_lab.components.nn.kernels.double_picture import double_picture
from rl_lab.components.nn.kernels.group_norm_silu import fused_group_norm, supports

# A picture (M, C, H, W), and what is still to be added to it, (C,).
Pending = tuple[torch.Tensor, torch.Tensor | None]


def _bias(layer: nn.Module) -> torch.Tensor:
    bias = layer.bias
    assert isinstance(bias, torch.Tensor)
    return bias


def _residual(x: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor, hand_on: bool) -> Pending:
    return (x + hidden, bias) if hand_on else (add_bias(x, hidden, bias), None)


class PictureNorm(nn.GroupNorm):
    """Group norm over pictures, and SiLU behind it where `silu`.

    32 groups, or as many as the channels allow: only nets smaller than the published ones have fewer.
    """

    def __init__(self, channels: int, *, eps: float = 1e-5, silu: bool = True) -> None:
        super().__init__(math.gcd(32, channels), channels, eps=eps)
        self.silu = silu

    def forward(self, x: torch.Tensor, pre: torch.Tensor | None = None) -> torch.Tensor:
        """(M, C, H, W), and (C,) to be added to it first -> the same shape."""
        return self.beside(x, pre)[0]

    def beside(self, x: torch.Tensor, pre: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and x itself for others to go on with: the gradients of both ways are then one pass."""
        if fast() and supports(self.num_channels, self.num_groups):
            return fused_group_norm(x, self.weight, self.bias, self.num_groups, self.eps, self.silu, pre)
        normed = super().forward(x if pre is None else x + pre[:, None, None])
        return F.silu(normed) if self.silu else normed, x


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
        if fast():
            return self.handing_on(x, None, False)[0]
        return self.skip(x) + self.conv2(self.norm2(self.conv1(self.norm1(x))))

    def handing_on(self, x: torch.Tensor, pre: torch.Tensor | None, hand_on: bool) -> Pending:
        normed, x = self.norm1.beside(x, pre)
        hidden = self.norm2(F.conv2d(normed, self.conv1.weight, padding=1), self.conv1.bias)
        hidden = F.conv2d(hidden, self.conv2.weight, padding=1)
        bias = _bias(self.conv2)
        if isinstance(self.skip, nn.Conv2d):
            bias = bias + _bias(self.skip)
            if pre is not None:  # a sum of products, not a matrix product: it stays in float32
                bias = bias + (self.skip.weight.flatten(1) * pre).sum(1)
            x = F.conv2d(x, self.skip.weight)
        elif pre is not None:
            bias = bias + pre
        return _residual(x, hidden, bias, hand_on)


class ImageAttention(nn.Module):
    """Single-head attention between all places of a picture, added to it."""

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = PictureNorm(channels, eps=eps, silu=False)
        self.query, self.key, self.value, self.project = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> the same shape."""
        if fast():
            return self.handing_on(x, None, False)[0]
        normed = self.norm(x)
        q, k, v = (
            layer(normed).flatten(2).transpose(1, 2).unsqueeze(1)
            for layer in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return x + self.project(out)

    def handing_on(self, x: torch.Tensor, pre: torch.Tensor | None, hand_on: bool) -> Pending:
        """The 1×1 convolutions as products of the rows that the places are: these add a bias on the way."""
        normed, x = self.norm.beside(x, pre)
        places = normed.permute(0, 2, 3, 1)
        rows = places.flatten(1, 2)  # (M, P, C)
        q, k, v = (
            F.linear(rows, layer.weight.flatten(1), layer.bias).unsqueeze(1)
            for layer in (self.query, self.key, self.value)
        )
        out = F.linear(F.scaled_dot_product_attention(q, k, v).squeeze(1), self.project.weight.flatten(1))
        bias = _bias(self.project) if pre is None else _bias(self.project) + pre
        return _residual(x, out.view(places.shape).permute(0, 3, 1, 2), bias, hand_on)


class Halve(nn.Module):
    """A convolution of stride 2. size 3: padded below and on the right only; size 2: not at all."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.conv = nn.Conv2d(channels, channels, size, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self._padded(x))

    def without_bias(self, x: torch.Tensor) -> Pending:
        return F.conv2d(self._padded(x), self.conv.weight, stride=2), self.conv.bias

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x, (0, 1, 0, 1)) if self.size == 3 else x


class Double(nn.Module):
    """Nearest neighbours, then a 3×3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # torch's own makes float32 of the picture on the way.
        larger = double_picture(x) if fast() else F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(larger)

    def without_bias(self, x: torch.Tensor) -> Pending:
        return F.conv2d(double_picture(x), self.conv.weight, padding=1), self.conv.bias


class PictureNet(nn.Sequential):
    """Layers one after the other; on the fast path biases are handed on to the next layer that can take one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, False)[0] if fast() else super().forward(x)

    def pending(self, x: torch.Tensor) -> Pending:
        """For a norm behind the net."""
        return self._run(x, True) if fast() else (super().forward(x), None)

    def _run(self, x: torch.Tensor, norm_follows: bool) -> Pending:
        layers = list(_flat(self))
        takes = [isinstance(layer, ResidualConv | ImageAttention | PictureNorm) for layer in layers]
        pre: torch.Tensor | None = None
        for layer, hand_on in zip(layers, [*takes[1:], norm_follows]):
            if isinstance(layer, ResidualConv | ImageAttention):
                x, pre = layer.handing_on(x, pre, hand_on)
            elif isinstance(layer, PictureNorm):
                x, pre = layer(x, pre), None
            elif hand_on and isinstance(layer, Halve | Double):
                x, pre = layer.without_bias(x)
            elif hand_on and isinstance(layer, nn.Conv2d):
                x, pre = F.conv2d(x, layer.weight, None, layer.stride, layer.padding), layer.bias
            else:
                x = layer(x)
        return x, pre


def _flat(layers: nn.Sequential) -> Iterator[nn.Module]:
    for layer in layers:
        if isinstance(layer, nn.Sequential):
            yield from _flat(layer)
        else:
            yield layer
