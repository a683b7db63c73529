"""Encoder of image observations: four convolution stages, each halving the image (DreamerV3, 2025 form)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rl_lab.components.nn.conv import ConvDown
from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.folded_conv import encode_folded
from rl_lab.components.representation_learners.observations import image_keys, image_shape, join_images
from rl_lab.records import Spec

STAGES = (
    2,
    3,
    4,
    4,
)  # channels of each stage, in multiples of `depth`: danijar/dreamerv3 configs.yaml `mults`


class ImageEncoder(nn.Module):
    """uint8 images of any size that divides by 16, square or not; several are stacked by channel."""

    def __init__(self, *, spec: Spec, depth: int, stages: Sequence[int] = STAGES) -> None:
        super().__init__()
        self.keys = image_keys(spec)
        channels, _, _ = image_shape(spec, len(stages))
        widths = [channels] + [depth * multiple for multiple in stages]
        self.blocks = nn.ModuleList(ConvDown(a, b) for a, b in itertools.pairwise(widths))
        self.embed_dim = image_embed_dim(spec, depth, stages)

    def forward(self, obs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """obs: name -> (*batch, C, H, W) uint8 -> embed (*batch, embed_dim)."""
        image = join_images(obs, self.keys)
        batch = image.shape[:-3]
        x = image.flatten(0, -4) if len(batch) else image.unsqueeze(0)
        if fast():
            return encode_folded(list(self.blocks), x).reshape(*batch, self.embed_dim)
        x = (x.float() / 255.0 - 0.5).contiguous(memory_format=torch.channels_last)
        for block in self.blocks:
            x = block(x)
        return x.permute(0, 2, 3, 1).reshape(*batch, self.embed_dim)


def image_embed_dim(spec: Spec, depth: int, stages: Sequence[int] = STAGES) -> int:
    _, height, width = image_shape(spec, len(stages))
    return depth * stages[-1] * (height >> len(stages)) * (width >> len(stages))
