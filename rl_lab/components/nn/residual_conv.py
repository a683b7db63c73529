"""Layers of the convolutional networks that encode frames into tokens and decode them.

Adding a bias by itself is a pass over memory. On the fast path a layer may therefore return its bias
separately (`pre`, one value per channel), and the next norm or sum adds it when it reads the image.
`ImageSequential` decides which layers defer their bias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional as F

# An image batch (M, C, H, W), and a bias (C,) that is still to be added to it.
Pending = tuple[torch.Tensor, torch.Tensor | None]


def _bias(layer: nn.Module) -> torch.Tensor:
    bias = layer.bias
    assert isinstance(bias, torch.Tensor)
    return bias


def _residual(x: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor, defer_bias: bool) -> Pending:
    if defer_bias:
        return x + hidden, bias
    from rl_lab.components.kernels.add_bias import add_bias

    return add_bias(x, hidden, bias), None


class ImageNorm(nn.GroupNorm):
    """Group norm over images, followed by SiLU if `silu`.

    32 groups, or the greatest common divisor with the channels: only small networks have fewer.
    """

    fast = False  # see fast_path.py

    def __init__(self, channels: int, *, eps: float = 1e-5, silu: bool = True) -> None:
        super().__init__(math.gcd(32, channels), channels, eps=eps)
        self.silu = silu

    def forward(self, x: torch.Tensor, pre: torch.Tensor | None = None) -> torch.Tensor:
        """x: (M, C, H, W), pre: (C,) added to x before the norm -> (M, C, H, W)."""
        return self.forward_with_input(x, pre)[0]

    def forward_with_input(
        self, x: torch.Tensor, pre: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and x for the residual connection, so that one kernel computes x's gradient."""
        if self.fast:
            from rl_lab.components.kernels.group_norm_silu import fused_group_norm, supports

            if supports(self.num_channels, self.num_groups):
                return fused_group_norm(x, self.weight, self.bias, self.num_groups, self.eps, self.silu, pre)
        normed = super().forward(x if pre is None else x + pre[:, None, None])
        return F.silu(normed) if self.silu else normed, x


class ResidualConv(nn.Module):
    """x + twice (norm, SiLU, 3×3 convolution)(x); a 1×1 convolution of x where the width changes."""

    fast = False  # see fast_path.py

    def __init__(self, inputs: int, outputs: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm1, self.norm2 = ImageNorm(inputs, eps=eps), ImageNorm(outputs, eps=eps)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip: nn.Module = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, inputs, H, W) -> (M, outputs, H, W)."""
        if self.fast:
            return self.forward_deferred(x, None, False)[0]
        return self.skip(x) + self.conv2(self.norm2(self.conv1(self.norm1(x))))

    def forward_deferred(self, x: torch.Tensor, pre: torch.Tensor | None, defer_bias: bool) -> Pending:
        """As `forward` after adding pre (C,) to x; with `defer_bias` the bias is returned separately."""
        normed, x = self.norm1.forward_with_input(x, pre)
        hidden = self.norm2(F.conv2d(normed, self.conv1.weight, padding=1), self.conv1.bias)
        hidden = F.conv2d(hidden, self.conv2.weight, padding=1)
        bias = _bias(self.conv2)
        if isinstance(self.skip, nn.Conv2d):
            bias = bias + _bias(self.skip)
            if (
                pre is not None
            ):  # multiply and sum, because autocast would compute a matrix product in bfloat16
                bias = bias + (self.skip.weight.flatten(1) * pre).sum(1)
            x = F.conv2d(x, self.skip.weight)
        elif pre is not None:
            bias = bias + pre
        return _residual(x, hidden, bias, defer_bias)


class ImageAttention(nn.Module):
    """x + single-head attention between all pixels of x."""

    fast = False  # see fast_path.py

    def __init__(self, channels: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = ImageNorm(channels, eps=eps, silu=False)
        self.query, self.key, self.value, self.project = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> the same shape."""
        if self.fast:
            return self.forward_deferred(x, None, False)[0]
        normed = self.norm(x)
        q, k, v = (
            layer(normed).flatten(2).transpose(1, 2).unsqueeze(1)
            for layer in (self.query, self.key, self.value)
        )
        out = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).unflatten(2, x.shape[2:])
        return x + self.project(out)

    def forward_deferred(self, x: torch.Tensor, pre: torch.Tensor | None, defer_bias: bool) -> Pending:
        """The 1×1 convolutions as matrix products over pixels, which add the bias in the same kernel."""
        normed, x = self.norm.forward_with_input(x, pre)
        pixels = normed.permute(0, 2, 3, 1)
        rows = pixels.flatten(1, 2)  # (M, P, C)
        q, k, v = (
            F.linear(rows, layer.weight.flatten(1), layer.bias).unsqueeze(1)
            for layer in (self.query, self.key, self.value)
        )
        out = F.linear(F.scaled_dot_product_attention(q, k, v).squeeze(1), self.project.weight.flatten(1))
        bias = _bias(self.project) if pre is None else _bias(self.project) + pre
        return _residual(x, out.view(pixels.shape).permute(0, 3, 1, 2), bias, defer_bias)


class Downsample(nn.Module):
    """A convolution of stride 2. size 3: padded at the bottom and on the right only; size 2: not padded."""

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


class Upsample(nn.Module):
    """Nearest-neighbour 2× upsampling, then a 3×3 convolution."""

    fast = False  # see fast_path.py

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fast:
            return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        from rl_lab.components.kernels.upsample2x import upsample2x

        return self.conv(upsample2x(x))  # F.interpolate casts a bfloat16 image to float32

    def without_bias(self, x: torch.Tensor) -> Pending:
        from rl_lab.components.kernels.upsample2x import upsample2x

        return F.conv2d(upsample2x(x), self.conv.weight, padding=1), self.conv.bias


class ImageSequential(nn.Sequential):
    """A Sequential that, on the fast path, adds biases in the next layer that accepts one."""

    fast = False  # see fast_path.py

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, False)[0] if self.fast else super().forward(x)

    def pending(self, x: torch.Tensor) -> Pending:
        """The result and its deferred bias, for a norm that follows."""
        return self._run(x, True) if self.fast else (super().forward(x), None)

    def _run(self, x: torch.Tensor, norm_follows: bool) -> Pending:
        layers = list(_flat(self))
        accepts = [isinstance(layer, ResidualConv | ImageAttention | ImageNorm) for layer in layers]
        pre: torch.Tensor | None = None
        for layer, defer_bias in zip(layers, [*accepts[1:], norm_follows]):
            if isinstance(layer, ResidualConv | ImageAttention):
                x, pre = layer.forward_deferred(x, pre, defer_bias)
            elif isinstance(layer, ImageNorm):
                x, pre = layer(x, pre), None
            elif defer_bias and isinstance(layer, Downsample | Upsample):
                x, pre = layer.without_bias(x)
            elif defer_bias and isinstance(layer, nn.Conv2d):
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


# ---------------------------------------------------------------- frames of Δ-IRIS

# Of each residual block: its channels in multiples of `width`, and whether the image is downsampled after it.
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
        current = width
        for multiple, half in zip(widths, halve, strict=True):
            layers.append(ResidualConv(current, multiple * width))
            current = multiple * width
            if half:
                layers.append(Downsample(current, 2))
        layers += [ImageNorm(current), nn.Conv2d(current, latent, 3, padding=1)]
        self.layers = ImageSequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class FrameDecoder(nn.Module):
    """(M, latent, h, w) -> (M, channels, 8·h, 8·w) with the default widths; the encoder's blocks reversed."""

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
        before = [1, *widths[:-1]]  # input widths of the encoder's blocks
        layers: list[nn.Module] = [nn.Conv2d(latent, widths[-1] * width, 3, padding=1)]
        for multiple, smaller, half in reversed(list(zip(widths, before, halve, strict=True))):
            if half:
                layers.append(Upsample(multiple * width))
            layers.append(ResidualConv(multiple * width, smaller * width))
        layers += [ImageNorm(width), nn.Conv2d(width, channels, 3, padding=1)]
        self.layers = ImageSequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
