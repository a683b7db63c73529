"""Encoder of vector observations: symlog, then an MLP."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.symlog import symlog
from rl_lab.components.representation_learners.observations import join_vectors, vector_keys, vector_size
from rl_lab.errors import ConfigError
from rl_lab.records import Spec


class MLPEncoder(nn.Module):
    """All vector observations, side by side in sorted order. Integers are taken as numbers.

    input_dim may state the joint width; where the environment has another, the message names both.
    """

    def __init__(self, *, spec: Spec, units: int, layers: int = 3, input_dim: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.keys = vector_keys(spec)
        width = sum(vector_size(spec, key) for key in self.keys)
        if width == 0:
            raise ConfigError(f"{spec.name} has no vector observation: use the `dict` encoder for images")
        if input_dim is not None and input_dim != width:
            raise ConfigError(
                f"the encoder's input_dim is {input_dim}, but {spec.name} gives vectors of width {width}"
            )
        self.mlp = MLP(width, units, layers)
        self.embed_dim = units

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, …) -> embed (*batch, embed_dim)."""
        return self.mlp(symlog(join_vectors(obs, self.spec, self.keys)))
