"""Decoder of vector observations: an MLP that predicts their symlog."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rl_lab.components.nn.linear import Linear
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.symlog import symexp, symlog
from rl_lab.components.representation_learners.observations import join_vectors, vector_keys, vector_size
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
        """Predictions in the observation's own shape and units."""
        return {
            key: symexp(value).reshape(*value.shape[:-1], *self.spec.observations[key].shape)
            for key, value in prediction.items()
            if key in self.keys
        }
