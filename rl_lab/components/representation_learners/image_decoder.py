"""Decoder of images: a small seed from the latent state, then four doublings (DreamerV3, 2025 form)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rl_lab.components.nn.conv import Conv, ConvUp, norm_act, upsample
from rl_lab.components.nn.fast_path import fast
from rl_lab.components.nn.folded_conv import decode_folded
from rl_lab.components.nn.kernels.norm_silu import norm_silu
from rl_lab.components.nn.linear import BlockLinear
from rl_lab.components.nn.mlp import MLP
from rl_lab.components.nn.norm import RMSNorm
from rl_lab.components.representation_learners.image_encoder import STAGES
from rl_lab.components.representation_learners.observations import image_keys, image_shape
from rl_lab.records import Spec

State = Mapping[str, torch.Tensor]


class ImageDecoder(nn.Module):
    """Gives pixels in [0, 1]; the loss is the squared error, summed over the image."""

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
        # (N, g, h·w·c) -> (N, h, w, g·c): each block of the recurrent state paints its own channels.
        grouped = self.from_deter(deter.unflatten(-1, (self.blocks, -1)))
        seed = grouped.unflatten(-1, (h, w, -1)).permute(0, 2, 3, 1, 4).flatten(-2)
        seed = seed + self.from_stoch(stoch).unflatten(-1, (h, w, -1))
        if fast():
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
        """Name -> (*batch)."""
        return {
            key: (prediction[key] - obs[key].float() / 255.0).square().sum((-3, -2, -1)) for key in self.keys
        }

    def observations(self, prediction: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Predictions as uint8 images."""
        return {key: (prediction[key] * 255.0).round().to(torch.uint8) for key in self.keys}
