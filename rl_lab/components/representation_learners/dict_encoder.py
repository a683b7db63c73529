"""Encoder of dict observations: vectors through an MLP, images through convolutions, joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rl_lab.components.representation_learners.image_encoder import ImageEncoder, image_embed_dim
from rl_lab.components.representation_learners.mlp_encoder import MLPEncoder
from rl_lab.components.representation_learners.observations import chosen, image_keys, vector_keys
from rl_lab.records import Spec


class DictEncoder(nn.Module):
    """Takes whatever the environment offers, or of that the `keys`; `embed` is (vector part, image part) side by side."""

    def __init__(
        self, *, spec: Spec, units: int, depth: int, layers: int = 3, keys: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        spec = chosen(spec, keys, "encoder")
        parts: list[MLPEncoder | ImageEncoder] = []
        if vector_keys(spec):
            parts.append(MLPEncoder(spec=spec, units=units, layers=layers))
        if image_keys(spec):
            parts.append(ImageEncoder(spec=spec, depth=depth))
        self.parts = nn.ModuleList(parts)
        self.embed_dim = sum(part.embed_dim for part in parts)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, …) -> embed (*batch, embed_dim)."""
        outputs = [part(obs) for part in self.parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def dict_embed_dim(spec: Spec, *, units: int, depth: int, keys: Sequence[str] | None = None) -> int:
    """Width of a DictEncoder's output, without building one."""
    spec = chosen(spec, keys, "encoder")
    vector = units if vector_keys(spec) else 0
    return vector + (image_embed_dim(spec, depth) if image_keys(spec) else 0)
