"""Decoder of dict observations from a latent state (deter, stoch): DreamerV3, 2025 form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.representation_learners.image_decoder import ImageDecoder
from rl_lab.components.representation_learners.observations import chosen, image_keys, vector_keys
from rl_lab.components.representation_learners.vector_decoder import State, VectorDecoder
from rl_lab.records import Spec


class DictDecoder(nn.Module):
    """Predicts the environment's observations, or of these the `keys`.

    `losses` compares, `observations` gives readable values.
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
        spec = chosen(spec, keys, "decoder")
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
        """Name -> (*batch, …): vectors float32, images uint8."""
        return {key: value for part in self.parts for key, value in part.observations(prediction).items()}
