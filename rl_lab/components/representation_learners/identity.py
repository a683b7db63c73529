"""No representation learning: the observation is the state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import nn

from rl_lab.components.representation_learners.encoders import (
    image_keys,
    join_vectors,
    vector_keys,
    vector_size,
)
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

Observation = TypeVar("Observation")  # a tensor, or a dict of tensors


class IdentityRepresentation(nn.Module):
    """Passes observations through unchanged, one step (B, …) or a sequence (B, T, …).

    As the encoder of a workflow it concatenates all vector observations in sorted order, cast to float.
    """

    augments = False  # it takes no noise

    def __init__(self, spec: Spec | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.keys = [] if spec is None else vector_keys(spec)
        self.embed_dim = 0 if spec is None else sum(vector_size(spec, key) for key in self.keys)

    def observe(self, obs: Observation) -> Observation:
        return obs

    def observe_sequence(self, obs: Observation) -> Observation:
        return obs

    def decode(self, state: Observation) -> Observation:
        return state

    def forward(self, obs: Mapping[str, torch.Tensor], noise: torch.Tensor | None = None) -> torch.Tensor:
        """obs: name -> (*batch, …) -> state (*batch, embed_dim)."""
        if self.spec is None or not self.keys or image_keys(self.spec):
            raise ConfigError(
                "components.encoder: IdentityRepresentation needs an environment with vector observations only: "
                "use an encoder of images, such as components/encoder=dict"
            )
        return join_vectors(obs, self.spec, self.keys)
