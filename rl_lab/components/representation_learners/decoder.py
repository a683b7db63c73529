"""Decoder of dict observations from a latent state (deter, stoch): DreamerV3, 2025 form."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rl_lab.components.nn.linear import Linear
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.symlog import symexp, symlog
from rl_lab.components.representation_learners.image_decoder import ImageDecoder
from rl_lab.components.representation_learners.observations import (
    image_keys,
    join_vectors,
    vector_keys,
    vector_size,
)
from rl_lab.records import Spec

State = Mapping[str, torch.Tensor]


class VectorDecoder(nn.Module):
    """An MLP on (deter, stoch), one linear output per observation, in symlog space."""

    def __init__(self, *, spec: Spec, features: int, units: int, layers: int = 3) -> None:
        super().__init__()
        self.spec = spec
        self.keys = vector_keys(spec)
        self.mlp = MLP(features, units, layers)
        self.outputs = nn.ModuleList(Linear(units, vector_size(spec, key)) for key in self.keys)

    def forward(self, feature: torch.Tensor) -> dict[str, torch.Tensor]:
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
        """Predictions in the observation's own shape and units."""
        return {
            key: symexp(value).reshape(*value.shape[:-1], *self.spec.observations[key].shape)
            for key, value in prediction.items()
            if key in self.keys
        }


class DictDecoder(nn.Module):
    """Predicts every observation of the environment; `losses` compares, `observations` gives readable values."""

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
    ) -> None:
        super().__init__()
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
        self.parts = nn.ModuleList(parts)

    def forward(self, state: State, feature: torch.Tensor) -> dict[str, torch.Tensor]:
        """state: deter (*batch, D), stoch (*batch, S, C); feature: both, flat -> name -> raw prediction."""
        prediction: dict[str, torch.Tensor] = {}
        for part in self.parts:
            if isinstance(part, VectorDecoder):
                prediction.update(part(feature))
            else:
                prediction.update(part(state["deter"], state["stoch"].flatten(-2)))
        return prediction

    def losses(
        self, prediction: Mapping[str, torch.Tensor], obs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Name -> (*batch)."""
        return {key: loss for part in self.parts for key, loss in part.losses(prediction, obs).items()}

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name -> (*batch, …): vectors float32, images uint8."""
        return {key: value for part in self.parts for key, value in part.observations(prediction).items()}
