"""Encoders of dict observations: vectors by an MLP, images by convolutions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.mlp import MLP, LayerStyle, layer_style
from rl_lab.components.nn.two_hot import symlog
from rl_lab.errors import ConfigError, reject_unknown, require_choice
from rl_lab.records import ArraySpec, Spec


def select_observations(spec: Spec, keys: Sequence[str] | None, part: str) -> Spec:
    """The spec with these observations only; None: all. `part` is the component that errors are about."""
    if keys is None:
        return spec
    where = f"components.{part}.keys"
    if isinstance(keys, str) or not keys:
        raise ConfigError(
            f"{where}={keys!r} must be a list of some of [{', '.join(sorted(spec.observations))}], "
            "or null for all"
        )
    reject_unknown(where, keys, spec.observations)
    return dataclasses.replace(spec, observations={key: spec.observations[key] for key in keys})


def refuse_unread(part: str, reads: str, unread: Sequence[str], advice: str) -> None:
    """Raise ConfigError if a part would ignore observations: a model that cannot see them trains without a sign."""
    if unread:
        raise ConfigError(
            f"components.{part} reads {reads} only and would ignore {', '.join(unread)}: {advice}, or list the "
            f"observations to read in components.{part}.keys"
        )


def is_image(spec: ArraySpec) -> bool:
    """Whether it is uint8 with three axes: channels, height, width."""
    return spec.dtype == "uint8" and len(spec.shape) == 3


def image_keys(spec: Spec) -> list[str]:
    return sorted(key for key, item in spec.observations.items() if is_image(item))


def vector_keys(spec: Spec) -> list[str]:
    return sorted(key for key, item in spec.observations.items() if not is_image(item))


def vector_size(spec: Spec, key: str) -> int:
    return math.prod(spec.observations[key].shape)


def image_shape(spec: Spec, stages: int) -> tuple[int, int, int]:
    """Total channels of all images, height, width; raises if they cannot be downsampled `stages` times."""
    shapes = {key: spec.observations[key].shape for key in image_keys(spec)}
    sizes = {shape[1:] for shape in shapes.values()}
    if len(sizes) != 1:
        raise ConfigError(f"images {shapes} are stacked by channel and must have one size: resize them")
    height, width = sizes.pop()
    factor = 2**stages
    if height % factor or width % factor:
        raise ConfigError(
            f"images of {height}×{width} cannot be downsampled {stages} times: set environment.size to sides "
            f"divisible by {factor}, for example 64×64 or 96×96"
        )
    return sum(shape[0] for shape in shapes.values()), height, width


def join_vectors(obs: Mapping[str, torch.Tensor], spec: Spec, keys: list[str]) -> torch.Tensor:
    """Concatenate vector observations: name -> (*batch, …) becomes (*batch, width) float32."""
    parts = []
    for key in keys:
        value, axes = obs[key], len(spec.observations[key].shape)
        batch = value.shape[: value.ndim - axes]
        parts.append(value.reshape(*batch, vector_size(spec, key)).float())
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def join_images(obs: Mapping[str, torch.Tensor], keys: list[str]) -> torch.Tensor:
    """Stack images by channel: name -> (*batch, C, H, W) becomes (*batch, ΣC, H, W) uint8."""
    return obs[keys[0]] if len(keys) == 1 else torch.cat([obs[key] for key in keys], -3)


class MLPEncoder(nn.Module):
    """MLP on the symlog of vector observations, concatenated in sorted order and cast to float.

    input_dim: optional expected width of the concatenated vectors
    keys:      observations to read; None: all, and images are an error
    squash:    symlog of the vectors; False (v1, v2): as they are
    layer, init, bias: see LayerStyle
    """

    def __init__(
        self,
        *,
        spec: Spec,
        units: int,
        layers: int = 3,
        input_dim: int | None = None,
        keys: Sequence[str] | None = None,
        squash: bool = True,
        layer: str = "rms+silu",
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        spec = select_observations(spec, keys, "encoder")
        self.spec = spec
        self.keys = vector_keys(spec)
        width = sum(vector_size(spec, key) for key in self.keys)
        if width == 0:
            raise ConfigError(
                f"{spec.name} has no vector observation: use components/encoder=dict for images"
            )
        refuse_unread("encoder", "vectors", image_keys(spec), "use components/encoder=dict")
        if input_dim is not None and input_dim != width:
            raise ConfigError(
                f"components.encoder.input_dim is {input_dim}, but {spec.name} has vectors of width {width}: "
                "correct it"
            )
        self.squash = squash
        self.mlp = MLP(width, units, layers, style=layer_style(layer, init, bias))
        self.embed_dim = units

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, …) -> embed (*batch, embed_dim)."""
        vectors = join_vectors(obs, self.spec, self.keys)
        return self.mlp(symlog(vectors) if self.squash else vectors)


# Channels of each stage, in multiples of `depth`: danijar/dreamerv3 configs.yaml `mults`.
STAGES = (2, 3, 4, 4)


# Of `images`: today's stack (nn/conv.py), and those of earlier versions (nn/image_stacks.py).
IMAGES = ("pooled", "outer", "strided", "valid")


class ImageEncoder(nn.Module):
    """Four convolution stages that downsample 2× each, as in DreamerV3's 2025 version.

    uint8 images with sides divisible by 16, square or not; several images are stacked by channel.
    keys: observations to read; None: all, and vectors are an error
    """

    fast = False  # convolutions of folded images; see fast_path.py

    def __init__(
        self,
        *,
        spec: Spec,
        depth: int,
        stages: Sequence[int] = STAGES,
        kernel: int | None = None,
        keys: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        from rl_lab.components.nn.conv import ConvDown

        spec = select_observations(spec, keys, "encoder")
        refuse_unread("encoder", "images", vector_keys(spec), "use components/encoder=dict")
        self.keys = image_keys(spec)
        channels, _, _ = image_shape(spec, len(stages))
        widths = [channels] + [depth * multiple for multiple in stages]
        self.kernel = pooled_kernel("encoder", kernel)
        self.blocks = nn.ModuleList(ConvDown(a, b, kernel=self.kernel) for a, b in itertools.pairwise(widths))
        self.embed_dim = image_embed_dim(spec, depth, stages)

    @property
    def has_fast_form(self) -> bool:
        """Folding is of 5×5 convolutions."""
        from rl_lab.components.nn.conv import KERNEL

        return self.kernel == KERNEL

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, C, H, W) uint8 -> embed (*batch, embed_dim)."""
        image = join_images(obs, self.keys)
        batch = image.shape[:-3]
        x = image.flatten(0, -4) if len(batch) else image.unsqueeze(0)
        if self.fast:
            from rl_lab.components.nn.conv import encode_folded

            return encode_folded(list(self.blocks), x).reshape(*batch, self.embed_dim)
        x = (x.float() / 255.0 - 0.5).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x)
        return x.permute(0, 2, 3, 1).reshape(*batch, self.embed_dim)


def pooled_kernel(part: str, kernel: int | None) -> int:
    """The kernel of convolutions that keep the size, with images=pooled; None: today's."""
    from rl_lab.components.nn.conv import KERNEL

    if kernel is not None and (kernel < 1 or kernel % 2 == 0):
        raise ConfigError(f"components.{part}.kernel is {kernel}: set it to an odd number with images=pooled")
    return kernel or KERNEL


def image_embed_dim(spec: Spec, depth: int, stages: Sequence[int] = STAGES) -> int:
    _, height, width = image_shape(spec, len(stages))
    return depth * stages[-1] * (height >> len(stages)) * (width >> len(stages))


class DictEncoder(nn.Module):
    """Concatenated outputs of an MLP and an image encoder, for all observations or those in `keys`.

    images: convolutions: pooled (today) | outer (2024) | strided (2023) | valid (v1, v2); see `nn/image_stacks.py`
    image_layer: norm and activation of the convolutions of an earlier version; None: `layer`
    kernel, multipliers: of the convolutions; channels of each in multiples of `depth` (`mults`). None: those of `images`
    layer, init, bias: see LayerStyle; squash: see MLPEncoder
    """

    def __init__(
        self,
        *,
        spec: Spec,
        units: int,
        depth: int,
        layers: int = 3,
        keys: Sequence[str] | None = None,
        images: str = "pooled",
        kernel: int | None = None,
        multipliers: Sequence[int] | None = None,
        squash: bool = True,
        layer: str = "rms+silu",
        image_layer: str | None = None,
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        from rl_lab.components.nn.image_stacks import chosen_stack

        require_choice("components.encoder.images", images, IMAGES)
        spec = select_observations(spec, keys, "encoder")
        parts: list[Any] = []
        if names := vector_keys(spec):
            parts.append(
                MLPEncoder(
                    spec=spec,
                    units=units,
                    layers=layers,
                    keys=names,
                    squash=squash,
                    layer=layer,
                    init=init,
                    bias=bias,
                )
            )
        if image_keys(spec) and images == "pooled":
            stages = STAGES if multipliers is None else multipliers
            parts.append(
                ImageEncoder(spec=spec, depth=depth, stages=stages, kernel=kernel, keys=image_keys(spec))
            )
        elif image_keys(spec):
            convolutions = layer_style(image_layer or layer, init, bias)
            stack = chosen_stack("encoder", images, kernel, multipliers)
            parts.append(StackImageEncoder(spec=spec, depth=depth, stack=stack, style=convolutions))
        self.parts: Any = nn.ModuleList(parts)
        self.embed_dim: int = sum(part.embed_dim for part in parts)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, …) -> embed (*batch, embed_dim)."""
        outputs = [part(obs) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class StackImageEncoder(nn.Module):
    """Image encoder of an earlier version, with a stack of `nn/image_stacks.py`."""

    def __init__(self, *, spec: Spec, depth: int, stack: Any, style: LayerStyle) -> None:
        super().__init__()
        from rl_lab.components.nn.image_stacks import StackEncoder

        self.keys = image_keys(spec)
        channels, height, width = image_shape(spec, 0)
        self.stack = StackEncoder(stack, channels, (height, width), depth, style)
        self.embed_dim = self.stack.features

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, C, H, W) uint8 -> embed (*batch, embed_dim)."""
        image = join_images(obs, self.keys)
        batch = image.shape[:-3]
        x = image.flatten(0, -4) if len(batch) else image.unsqueeze(0)
        return self.stack(x.float() / 255.0 - 0.5).reshape(*batch, self.embed_dim)


def dict_embed_dim(
    spec: Spec,
    *,
    units: int,
    depth: int,
    keys: Sequence[str] | None = None,
    images: str = "pooled",
    multipliers: Sequence[int] | None = None,
) -> int:
    """Output width of a DictEncoder, without building it."""
    require_choice("components.rssm.images", images, IMAGES)
    spec = select_observations(spec, keys, "encoder")
    vector = units if vector_keys(spec) else 0
    if not image_keys(spec):
        return vector
    if images == "pooled":
        return vector + image_embed_dim(spec, depth, STAGES if multipliers is None else multipliers)
    from rl_lab.components.nn.image_stacks import chosen_stack

    _, height, width = image_shape(spec, 0)
    stack = chosen_stack("encoder", images, None, multipliers)
    return vector + stack.features((height, width), depth)
