"""Convolution stacks of Dreamer's earlier versions, with strides instead of pooling and upsampling.

outer    2024: kernel 5, the first convolution keeps the size, then four with stride 2 (danijar/dreamerv3 @ 251910d)
strided  2023: kernel 4, stride 2 (danijar/dreamerv3 @ 8fa35f8)
valid    v1, v2: kernel 4, stride 2, no padding; the decoder starts from one pixel (danijar/dreamer, danijar/dreamerv2)

`nn/conv.py` has the stack of today. Images are (N, C, H, W).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.mlp import LayerStyle, fill_, output_init
from rl_lab.errors import ConfigError

STAGES = 4  # halvings of `outer` and `strided`: 64 -> 4, 96 -> 6
# Side of the image -> kernel sizes of the valid decoder. With strides of 2 no other sides are possible.
VALID_KERNELS = {
    64: (5, 5, 6, 6),  # 1 -> 5 -> 13 -> 30 -> 64 pixels
    32: (5, 6, 6),  # 1 -> 5 -> 14 -> 32
    16: (6, 6),  # 1 -> 6 -> 16
}


@dataclass(frozen=True)
class Stack:
    """name: in configs; multiples: channels in multiples of `depth`; kernel: of the encoder's convolutions."""

    name: str
    multiples: tuple[int, ...]
    kernel: int

    def strides(self, side: int) -> list[int]:
        """Of the encoder's convolutions."""
        if self.name == "valid":
            return [2] * len(VALID_KERNELS[side])
        return [1, *[2] * STAGES] if self.name == "outer" else [2] * STAGES

    def check(self, size: tuple[int, int]) -> None:
        height, width = size
        if self.name == "valid" and (height != width or height not in VALID_KERNELS):
            raise ConfigError(
                f"images of {height}×{width} do not fit convolutions without padding (images: valid), which take "
                "64×64, 32×32 or 16×16: set environment.size=64"
            )
        factor = 2**STAGES
        if self.name != "valid" and (height % factor or width % factor):
            raise ConfigError(
                f"images of {height}×{width} cannot be downsampled {STAGES} times: set environment.size to sides "
                f"divisible by {factor}, for example 64×64 or 96×96"
            )

    def widths(self, size: tuple[int, int], depth: int) -> list[int]:
        """Channels after each of the encoder's convolutions."""
        self.check(size)
        return [depth * multiple for multiple in self.multiples[: len(self.strides(size[0]))]]

    def space(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width after the encoder."""
        self.check(size)
        return (2, 2) if self.name == "valid" else (size[0] >> STAGES, size[1] >> STAGES)

    def features(self, size: tuple[int, int], depth: int) -> int:
        height, width = self.space(size)
        return self.widths(size, depth)[-1] * height * width


def chosen_stack(
    part: str, images: str, kernel: int | None = None, multipliers: Sequence[int] | None = None
) -> Stack:
    """The stack of the keys `images`, `kernel` and `multipliers` of a part, `components.<part>`."""
    stack = STACKS[images]
    if images == "valid" and (kernel is not None or multipliers is not None):
        raise ConfigError(
            f"components.{part}.images is valid, whose kernels and channels are fixed: leave kernel and multipliers "
            "at null, or choose outer or strided"
        )
    if multipliers is not None and len(multipliers) != len(stack.multiples):
        raise ConfigError(
            f"components.{part}.multipliers has {len(multipliers)} values: list {len(stack.multiples)} with "
            f"images={images}, one for each convolution"
        )
    if kernel is not None and kernel < 2:
        raise ConfigError(f"components.{part}.kernel is {kernel}: set it to 2 or more with images={images}")
    multiples = stack.multiples if multipliers is None else tuple(multipliers)
    return dataclasses.replace(stack, kernel=kernel or stack.kernel, multiples=multiples)


STACKS = {
    "outer": Stack("outer", (1, 2, 3, 4, 4), 5),
    "strided": Stack("strided", (1, 2, 4, 8), 4),
    "valid": Stack("valid", (1, 2, 4, 8), 4),
}


class ConvLayer(nn.Module):
    """Convolution or transposed convolution with stride 1 or 2, then norm over channels and activation.

    same:   pad as TensorFlow and JAX do: the output has size / stride, or size · stride; False: no padding
    output: without norm and activation, with bias
    """

    fast = False  # bias, norm and activation in one kernel; see fast_path.py

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        style: LayerStyle,
        stride: int = 2,
        transposed: bool = False,
        same: bool = True,
        output: bool = False,
    ) -> None:
        super().__init__()
        self.stride, self.kernel, self.transposed, self.same = stride, kernel, transposed, same
        self.style = LayerStyle("none", "none", output_init(style.init), True) if output else style
        bias = output or style.bias or style.norm == "none"
        # In the order of torch's layers: a transposed convolution has its inputs first.
        shape = (inputs, outputs) if transposed else (outputs, inputs)
        self.weight = nn.Parameter(torch.empty(*shape, kernel, kernel))
        fill_(self.weight, (inputs * kernel**2, outputs * kernel**2), self.style.init)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.norm = self.style.make_norm(outputs)
        self.output = output

    @property
    def has_fast_form(self) -> bool:
        return self.style.fused_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, inputs, H, W) -> (N, outputs, H', W')."""
        apply = self._transposed if self.transposed else self._convolved
        if self.fast:
            pixels = apply(x, None).permute(0, 2, 3, 1)
            return self.style.norm_activate(self.norm, pixels, self.bias).permute(0, 3, 1, 2)
        y = apply(x, self.bias)
        if self.output:
            return y
        if self.style.norm != "none":
            y = self.norm(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.style.activate(y)

    def _convolved(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.same:
            return F.conv2d(x, self.weight, bias, self.stride)
        # An odd rest of the padding is on the right and at the bottom.
        total = self.kernel - self.stride
        low, high = total // 2, total - total // 2
        if low == high:
            return F.conv2d(x, self.weight, bias, self.stride, padding=low)
        return F.conv2d(F.pad(x, (low, high, low, high)), self.weight, bias, self.stride)

    def _transposed(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if not self.same:
            return F.conv_transpose2d(x, self.weight, bias, self.stride)
        # In torch's terms: cropped by `low`, and on the right as far as the size is wrong.
        total = self.kernel - self.stride
        y = F.conv_transpose2d(x, self.weight, bias, self.stride, padding=total // 2)
        height, width = x.shape[-2] * self.stride, x.shape[-1] * self.stride
        return y if y.shape[-2] == height else y[..., :height, :width]


class StackEncoder(nn.Module):
    """(N, C, H, W) in [-0.5, 0.5] -> (N, features), rows of pixels with channels last."""

    def __init__(
        self, stack: Stack, channels: int, size: tuple[int, int], depth: int, style: LayerStyle
    ) -> None:
        super().__init__()
        widths = [channels, *stack.widths(size, depth)]
        same = stack.name != "valid"
        self.layers = nn.ModuleList(
            ConvLayer(a, b, stack.kernel, style=style, stride=stride, same=same)
            for (a, b), stride in zip(itertools.pairwise(widths), stack.strides(size[0]))
        )
        self.features = stack.features(size, depth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x)
        return x.permute(0, 2, 3, 1).flatten(1)


class StackDecoder(nn.Module):
    """(N, c, h, w) -> raw pixels (N, C, H, W); `seed` is (c, h, w)."""

    def __init__(
        self, stack: Stack, channels: int, size: tuple[int, int], depth: int, style: LayerStyle
    ) -> None:
        super().__init__()
        widths = stack.widths(size, depth)
        height, width = stack.space(size)
        same = stack.name != "valid"
        if same:
            self.seed = (widths[-1], height, width)
            kernels = [stack.kernel] * STAGES
        else:
            self.seed = (widths[-1] * height * width, 1, 1)
            kernels = list(VALID_KERNELS[size[0]])
        # outer: four transposed layers, and one that keeps the size; else the last transposed layer is the output.
        inner = widths[-2::-1]
        self.layers = nn.ModuleList()
        for number, (a, b) in enumerate(itertools.pairwise([self.seed[0], *inner])):
            self.layers.append(ConvLayer(a, b, kernels[number], style=style, transposed=True, same=same))
        stride = 1 if stack.name == "outer" else 2
        self.layers.append(
            ConvLayer(
                inner[-1] if inner else self.seed[0],
                channels,
                kernels[-1],
                style=style,
                stride=stride,
                transposed=True,
                same=same,
                output=True,
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x)
        return x
