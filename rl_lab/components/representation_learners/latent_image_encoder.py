"""TD-MPC's encoder of images: random shift, four convolutions, the latent space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.normed_mlp import Layer, initialise
from rl_lab.components.nn.random_shift import random_shift
from rl_lab.components.nn.simnorm import GROUP, simnorm
from rl_lab.components.representation_learners.observations import image_keys, join_images
from rl_lab.errors import ConfigError
from rl_lab.records import Spec


class LatentImageEncoder(nn.Module):
    """x/255 − 0.5 → convolutions with ReLU between → flat → latent.

    TD-MPC2 (nicklashansen/tdmpc2 common/layers.py) ends in SimNorm right after the flattening, which fits one latent
    size only: where the widths are equal, so does this; else a layer of `out` leads into the latent.

    shift:    pixels of the random shift, applied where `noise` is given: in training. Acting sees the picture as it is.
    """

    augments = True

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        channels: int = 32,
        kernels: Sequence[int] = (7, 5, 3, 3),
        strides: Sequence[int] = (2, 2, 2, 1),
        shift: int = 3,
        out: str = "norm+simnorm",
        init: str = "normal",
        group: int = GROUP,
        context: int = 0,
    ) -> None:
        super().__init__()
        self.keys = image_keys(spec)
        if not self.keys:
            raise ConfigError(f"{spec.name} has no image: use components/encoder=tdmpc_state for vectors")
        if context:
            raise ConfigError("several tasks from images are not supported: use vector observations")
        self.shift = shift
        self.group = group
        shapes = [spec.observations[key].shape for key in self.keys]
        inputs, sides = sum(shape[0] for shape in shapes), list(shapes[0][1:])
        convs = []
        for kernel, stride in zip(kernels, strides, strict=True):
            convs.append(nn.Conv2d(inputs, channels, kernel, stride))
            inputs, sides = channels, [(side - kernel) // stride + 1 for side in sides]
        if min(sides) < 1:
            raise ConfigError(f"images of {shapes[0][1:]} are too small for kernels {list(kernels)}")
        self.convs = nn.ModuleList(convs)
        for conv in convs:
            if init == "orthogonal":
                initialise(conv.weight.data.view(channels, -1), init)
                nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        self.flat = channels * sides[0] * sides[1]
        activation = out.rpartition("+")[2]
        self.bare = self.flat == latent and activation == "simnorm"
        self.out = None if self.bare else Layer([self.flat], latent, out, init=init, group=group)
        if self.bare and latent % group:
            raise ConfigError(f"a latent of {latent} does not divide into groups of {group}")

    def forward(
        self, obs: Mapping[str, torch.Tensor], *task: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        """obs: name -> (*batch, C, H, W) uint8, noise: (*batch, 2) uniform -> latent (*batch, L)."""
        image = join_images(obs, self.keys)
        batch = image.shape[:-3]
        image = image.reshape(-1, *image.shape[-3:])
        if noise is not None and self.shift:
            image = random_shift(image, noise.reshape(-1, 2), self.shift)
        x = image.float() / 255.0 - 0.5
        for number, conv in enumerate(self.convs):
            x = conv(F.relu(x) if number else x)
        x = x.flatten(1)
        if self.out is None:
            x = simnorm(x, self.group)
        else:
            x = self.out(F.relu(x))
        return x.view(*batch, -1)
