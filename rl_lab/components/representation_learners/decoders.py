"""Decoders of observations from latent states (deter, stoch): DreamerV3's 2025 version, and the earlier ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.mlp import MLP, TODAY, BlockLinear, LayerStyle, RMSNorm, layer_style
from rl_lab.components.nn.two_hot import symexp, symlog
from rl_lab.components.representation_learners.encoders import (
    IMAGES,
    STAGES,
    image_keys,
    image_shape,
    join_vectors,
    pooled_kernel,
    select_observations,
    vector_keys,
    vector_size,
)
from rl_lab.errors import require_choice
from rl_lab.records import Spec

State = Mapping[str, torch.Tensor]


class PixelDecoder(nn.Module):
    """Losses and images of predictions; subclasses compute them. `keys` are the images, stacked by channel."""

    keys: list[str]

    def losses(
        self, prediction: Mapping[str, torch.Tensor], obs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Squared error summed over pixels: name -> (*batch)."""
        return {
            key: (prediction[key] - obs[key].float() / 255.0).square().sum((-3, -2, -1)) for key in self.keys
        }

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Predictions as uint8 images."""
        return {key: (prediction[key] * 255.0).round().clamp(0.0, 255.0).to(torch.uint8) for key in self.keys}


class ImageDecoder(PixelDecoder):
    """A small feature map from the latent state, then four upsampling stages to pixels in [0, 1]."""

    fast = False  # convolutions of folded images; see fast_path.py

    def __init__(
        self,
        *,
        spec: Spec,
        deter: int,
        stoch: int,  # width of the flat stochastic state
        blocks: int,
        units: int,
        depth: int,
        stages: Sequence[int] = STAGES,
        kernel: int | None = None,
    ) -> None:
        super().__init__()
        from rl_lab.components.nn.conv import Conv, ConvUp

        self.keys = image_keys(spec)
        self.channels = [spec.observations[key].shape[0] for key in self.keys]
        channels, height, width = image_shape(spec, len(stages))
        self.space = (height >> len(stages), width >> len(stages))
        self.blocks = blocks
        widths = [depth * multiple for multiple in stages]
        seed = widths[-1] * self.space[0] * self.space[1]
        self.from_deter = BlockLinear(deter, seed, blocks=blocks)
        self.from_stoch = MLP(stoch, 2 * units, 1, outputs=seed)
        self.norm = RMSNorm(widths[-1])
        self.kernel = pooled_kernel("decoder", kernel)
        self.ups = nn.ModuleList(
            ConvUp(a, b, kernel=self.kernel) for a, b in zip(widths[:0:-1], widths[-2::-1])
        )
        self.out = Conv(widths[0], channels, kernel=self.kernel)

    @property
    def has_fast_form(self) -> bool:
        """Folding is of 5×5 convolutions."""
        from rl_lab.components.nn.conv import KERNEL

        return self.kernel == KERNEL

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """state: deter (*batch, D), stoch (*batch, S, C) -> name -> (*batch, C, H, W) float32 in [0, 1]."""
        batch = state["deter"].shape[:-1]
        deter, stoch = state["deter"].flatten(0, -2), state["stoch"].flatten(-2).flatten(0, -2)
        # (N, g, h·w·c) -> (N, h, w, g·c): each block of deter computes its own channels.
        grouped = self.from_deter(deter.unflatten(-1, (self.blocks, -1)))
        seed = join_seed(grouped, self.from_stoch(stoch), self.space)
        from rl_lab.components.nn.conv import decode_folded, norm_act, upsample

        if self.fast:
            from rl_lab.components.kernels.norm_silu import norm_silu

            x = norm_silu(seed, self.norm.weight, self.norm.eps)
            raw = decode_folded(list(self.ups), self.out, x).permute(0, 3, 1, 2)
        else:
            x = norm_act(self.norm, seed.permute(0, 3, 1, 2))
            for up in self.ups:
                x = up(x)
            raw = self.out(upsample(x))
        x = torch.sigmoid(raw.float())
        return dict(zip(self.keys, x.unflatten(0, batch).split(self.channels, -3)))


def join_seed(grouped: torch.Tensor, dense: torch.Tensor, space: tuple[int, int]) -> torch.Tensor:
    """Blocks (N, g, h·w·c) and dense (N, h·w·g·c) -> (N, h, w, g·c)."""
    seed = grouped.unflatten(-1, (*space, -1)).permute(0, 2, 3, 1, 4).flatten(-2)
    return seed + dense.unflatten(-1, (*space, -1))


class StackImageDecoder(PixelDecoder):
    """Image decoder of an earlier version: the transposed convolutions of a stack of `nn/image_stacks.py`.

    outer (2024) starts from a map as today's decoder and ends with a sigmoid. The others start from one linear layer
    and predict pixels around 0.5 without a limit.
    """

    def __init__(
        self,
        *,
        spec: Spec,
        deter: int,
        stoch: int,  # width of the flat stochastic state
        blocks: int,
        units: int,
        depth: int,
        stack: Any,
        style: LayerStyle,
    ) -> None:
        super().__init__()
        from rl_lab.components.nn.image_stacks import StackDecoder

        self.keys = image_keys(spec)
        self.channels = [spec.observations[key].shape[0] for key in self.keys]
        channels, height, width = image_shape(spec, 0)
        self.stack = StackDecoder(stack, channels, (height, width), depth, style)
        self.space = (self.stack.seed[1], self.stack.seed[2])
        self.blocks, self.style = blocks, style
        self.bounded = stack.name == "outer"
        seed = self.stack.seed[0] * self.space[0] * self.space[1]
        if self.bounded:
            self.from_deter = BlockLinear(deter, seed, blocks=blocks)
            self.from_stoch = MLP(stoch, 2 * units, 1, outputs=seed, style=style)
            self.norm = style.make_norm(self.stack.seed[0])
        else:
            self.from_feature = style.output(deter + stoch, seed)

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """feature: (*batch, D + S·C) -> name -> (*batch, C, H, W) float32."""
        batch = feature.shape[:-1]
        if self.bounded:
            deter, stoch = state["deter"].flatten(0, -2), state["stoch"].flatten(-2).flatten(0, -2)
            grouped = self.from_deter(deter.unflatten(-1, (self.blocks, -1)))
            seed = join_seed(grouped, self.from_stoch(stoch), self.space)
            x = self.style.activate(self.norm(seed))
        else:
            x = self.from_feature(feature.flatten(0, -2)).unflatten(-1, (*self.space, -1))
        raw = self.stack(x.permute(0, 3, 1, 2)).float()
        x = torch.sigmoid(raw) if self.bounded else raw + 0.5
        return dict(zip(self.keys, x.unflatten(0, batch).split(self.channels, -3)))


class VectorDecoder(nn.Module):
    """MLP on (deter, stoch) with one linear output per vector observation, which predicts its symlog.

    squash:    False (v1, v2): it predicts the vector itself
    out_scale: of the initial output weights; 0.1 in 2024
    """

    def __init__(
        self,
        *,
        spec: Spec,
        features: int,
        units: int,
        layers: int = 3,
        squash: bool = True,
        out_scale: float = 1.0,
        style: LayerStyle = TODAY,
    ) -> None:
        super().__init__()
        self.squash = squash
        self.spec = spec
        self.keys = vector_keys(spec)
        self.mlp = MLP(features, units, layers, style=style)
        self.outputs = nn.ModuleList(
            style.output(units, vector_size(spec, key), scale=out_scale) for key in self.keys
        )

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """feature: (*batch, features) -> name -> (*batch, width), the symlog of the observation."""
        x = self.mlp(feature)
        return {key: output(x).float() for key, output in zip(self.keys, self.outputs)}

    def losses(
        self, prediction: Mapping[str, torch.Tensor], obs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Squared error (in symlog space, if squashed), summed over the vector: name -> (*batch)."""
        return {
            key: (prediction[key] - self._target(join_vectors(obs, self.spec, [key]))).square().sum(-1)
            for key in self.keys
        }

    def _target(self, vector: torch.Tensor) -> torch.Tensor:
        return symlog(vector) if self.squash else vector

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Predictions in the shape and units of the observation."""
        return {
            key: (symexp(value) if self.squash else value).reshape(
                *value.shape[:-1], *self.spec.observations[key].shape
            )
            for key, value in prediction.items()
            if key in self.keys
        }


class DictDecoder(nn.Module):
    """Predicts all observations of the environment, or those listed in `keys`.

    images, image_layer, kernel, multipliers, layer, init, bias: see DictEncoder; squash, out_scale: see VectorDecoder

    `losses` compares raw predictions with observations, `observations` converts them to observations.
    """

    def __init__(
        self,
        *,
        spec: Spec,
        deter: int,
        stoch: int,
        classes: int,
        blocks: int,
        units: int,
        depth: int,
        layers: int = 3,
        keys: Sequence[str] | None = None,
        images: str = "pooled",
        kernel: int | None = None,
        multipliers: Sequence[int] | None = None,
        squash: bool = True,
        out_scale: float = 1.0,
        layer: str = "rms+silu",
        image_layer: str | None = None,
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        from rl_lab.components.nn.image_stacks import chosen_stack

        require_choice("components.decoder.images", images, IMAGES)
        spec = select_observations(spec, keys, "decoder")
        self.keys = list(spec.observations)
        style = layer_style(layer, init, bias)
        flat = stoch * classes
        parts: list[VectorDecoder | PixelDecoder] = []
        if vector_keys(spec):
            parts.append(
                VectorDecoder(
                    spec=spec,
                    features=deter + flat,
                    units=units,
                    layers=layers,
                    squash=squash,
                    out_scale=out_scale,
                    style=style,
                )
            )
        if image_keys(spec):
            sizes: Any = {"deter": deter, "stoch": flat, "blocks": blocks, "units": units, "depth": depth}
            if images == "pooled":
                stages = STAGES if multipliers is None else multipliers
                parts.append(ImageDecoder(spec=spec, stages=stages, kernel=kernel, **sizes))
            else:
                style = layer_style(image_layer or layer, init, bias)
                stack = chosen_stack("decoder", images, kernel, multipliers)
                parts.append(StackImageDecoder(spec=spec, stack=stack, style=style, **sizes))
        self.parts: Any = nn.ModuleList(parts)

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """state: deter (*batch, D), stoch (*batch, S, C); feature: both, flat -> name -> raw prediction."""
        return {key: value for part in self.parts for key, value in part(state, feature).items()}

    def losses(
        self, prediction: Mapping[str, torch.Tensor], obs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Name -> (*batch)."""
        return {key: loss for part in self.parts for key, loss in part.losses(prediction, obs).items()}

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name -> (*batch, …): float32 vectors, uint8 images."""
        return {key: value for part in self.parts for key, value in part.observations(prediction).items()}
