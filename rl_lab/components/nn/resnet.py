"""ResNet-18 (He et al. 2015) with GroupNorm, and spatial softmax (Finn et al. 2016)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS_PER_GROUP = (
    16  # real-stanford/diffusion_policy @ 5ba07ac, vision/model_getter.py and policy/*_hybrid_image_policy.py
)


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // CHANNELS_PER_GROUP), channels)


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, (M, in, h, w) -> (M, out, h / stride, w / stride)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = group_norm(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = group_norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), group_norm(channels)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class ResNet18(nn.Module):
    """Images (M, C, H, W) -> features (M, 8 · width, H / 32, W / 32), without pooling and classifier.

    width: channels of the first stage; 64 is ResNet-18
    """

    def __init__(self, channels_in: int = 3, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels_in, width, 7, stride=2, padding=3, bias=False)
        self.norm = group_norm(width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        widths = [width * 2**stage for stage in range(4)]
        blocks = []
        for before, after, stride in zip([width, *widths], widths, (1, 2, 2, 2)):
            blocks += [ResidualBlock(before, after, stride), ResidualBlock(after, after, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.channels = widths[-1]
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.pool(F.relu(self.norm(self.stem(images)))))


class SpatialSoftmax(nn.Module):
    """The expected position of each of K keypoints, in [-1, 1]: (M, C, h, w) -> (M, 2K) as x, y, x, y, …"""

    def __init__(self, channels: int, keypoints: int) -> None:
        super().__init__()
        self.to_maps = nn.Conv2d(channels, keypoints, 1)
        self.size = 2 * keypoints

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        maps = self.to_maps(features).float()
        height, width = maps.shape[-2:]
        weight = maps.flatten(2).softmax(-1)  # (M, K, h·w)
        y, x = torch.meshgrid(
            torch.linspace(-1.0, 1.0, height, device=maps.device),
            torch.linspace(-1.0, 1.0, width, device=maps.device),
            indexing="ij",
        )
        places = torch.stack([x.flatten(), y.flatten()], -1)  # (h·w, 2)
        return (weight @ places).flatten(1)
