"""Decoders of observations from latent states (deter, stoch), as in DreamerV3's 2025 version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.conv import Conv, ConvUp, decode_folded, norm_act, upsample
from rl_lab.components.nn.mlp import MLP, BlockLinear, Linear, RMSNorm
from rl_lab.components.nn.two_hot import symexp, symlog
from rl_lab.components.representation_learners.encoders import (
    STAGES,
    image_keys,
    image_shape,
    join_vectors,
    select_observations,
    vector_keys,
    vector_size,
)
from rl_lab.records import Spec

State = Mapping[str, torch.Tensor]


class ImageDecoder(nn.Module):
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
    ) -> None:
        super().__init__()
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
        self.ups = nn.ModuleList(ConvUp(a, b) for a, b in zip(widths[:0:-1], widths[-2::-1]))
        self.out = Conv(widths[0], channels)

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """state: deter (*batch, D), stoch (*batch, S, C) -> name -> (*batch, C, H, W) float32 in [0, 1]."""
        batch = state["deter"].shape[:-1]
        deter, stoch = state["deter"].flatten(0, -2), state["stoch"].flatten(-2).flatten(0, -2)
        h, w = self.space
        # (N, g, h·w·c) -> (N, h, w, g·c): each block of deter computes its own channels.
        grouped = self.from_deter(deter.unflatten(-1, (self.blocks, -1)))
        seed = grouped.unflatten(-1, (h, w, -1)).permute(0, 2, 3, 1, 4).flatten(-2)
        seed = seed + self.from_stoch(stoch).unflatten(-1, (h, w, -1))
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

    def losses(
        self, prediction: Mapping[str, torch.Tensor], obs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Squared error summed over pixels: name -> (*batch)."""
        return {
            key: (prediction[key] - obs[key].float() / 255.0).square().sum((-3, -2, -1)) for key in self.keys
        }

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Predictions as uint8 images."""
        return {key: (prediction[key] * 255.0).round().to(torch.uint8) for key in self.keys}


class VectorDecoder(nn.Module):
    """MLP on (deter, stoch) with one linear output per vector observation, which predicts its symlog."""

    def __init__(self, *, spec: Spec, features: int, units: int, layers: int = 3) -> None:
        super().__init__()
        self.spec = spec
        self.keys = vector_keys(spec)
        self.mlp = MLP(features, units, layers)
        self.outputs = nn.ModuleList(Linear(units, vector_size(spec, key)) for key in self.keys)

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """feature: (*batch, features) -> name -> (*batch, width), the symlog of the observation."""
        x = self.mlp(feature)
        return {key: output(x).float() for key, output in zip(self.keys, self.outputs)}

    def losses(
        self, prediction: Mapping[str, torch.Tensor], obs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Squared error in symlog space, summed over the vector: name -> (*batch)."""
        return {
            key: (prediction[key] - symlog(join_vectors(obs, self.spec, [key]))).square().sum(-1)
            for key in self.keys
        }

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Predictions in the shape and units of the observation."""
        return {
            key: symexp(value).reshape(*value.shape[:-1], *self.spec.observations[key].shape)
            for key, value in prediction.items()
            if key in self.keys
        }


class DictDecoder(nn.Module):
    """Predicts all observations of the environment, or those listed in `keys`.

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
    ) -> None:
        super().__init__()
        spec = select_observations(spec, keys, "decoder")
        self.keys = list(spec.observations)
        parts: list[VectorDecoder | ImageDecoder] = []
        if vector_keys(spec):
            features = deter + stoch * classes
            parts.append(VectorDecoder(spec=spec, features=features, units=units, layers=layers))
        if image_keys(spec):
            parts.append(
                ImageDecoder(
                    spec=spec, deter=deter, stoch=stoch * classes, blocks=blocks, units=units, depth=depth
                )
            )
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
