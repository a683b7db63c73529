"""TD-MPC's encoder of vector observations: an MLP that ends in the latent space."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rl_lab.components.nn.normed_mlp import NormedMLP
from rl_lab.components.nn.simnorm import GROUP
from rl_lab.components.representation_learners.observations import (
    image_keys,
    join_vectors,
    vector_keys,
    vector_size,
)
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

# Observations that say what the task is; they are not part of its state.
TASK_KEYS = ("task", "action_mask")


def state_keys(spec: Spec) -> list[str]:
    """Vector observations that describe the state."""
    return [key for key in vector_keys(spec) if key not in TASK_KEYS]


class LatentEncoder(nn.Module):
    """All vector observations side by side in sorted order -> latent.

    layers:   hidden layers are max(layers - 1, 1), then one into the latent (nicklashansen/tdmpc2: num_enc_layers)
    context:  width of a task's embedding beside the observation
    """

    augments = False  # takes no noise

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        layers: int = 2,
        context: int = 0,
        hidden: str = "norm+mish",
        out: str = "norm+simnorm",
        init: str = "normal",
        group: int = GROUP,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.keys = state_keys(spec)
        if not self.keys:
            raise ConfigError(
                f"{spec.name} has no vector observation: use components/encoder=tdmpc_pixels for images"
            )
        if image_keys(spec):
            raise ConfigError(
                f"{spec.name} has images and vectors, and this encoder sees one kind: keep some of "
                f"{sorted(spec.observations)} with environment.observations=[…]"
            )
        width = sum(vector_size(spec, key) for key in self.keys)
        words = [hidden] * max(layers - 1, 1)
        inputs = [width, context] if context else [width]
        self.mlp = NormedMLP(inputs, units, latent, hidden=words, out=out, init=init, group=group)

    def forward(
        self, obs: Mapping[str, torch.Tensor], *task: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """obs: name -> (*batch, …), task: (*batch, context) where there is one -> latent (*batch, L)."""
        return self.mlp(join_vectors(obs, self.spec, self.keys), *task)
