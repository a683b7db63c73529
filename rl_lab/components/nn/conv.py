"""Convolution blocks that halve or double an image, as in DreamerV3's 2025 form: kernel 5, stride 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.init import truncated_normal_
from rl_lab.components.nn.norm import RMSNorm

KERNEL = 5  # danijar/dreamerv3 rssm.py; "same" padding


class Conv(nn.Conv2d):
    """Same-size convolution with DreamerV3's initialisation."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int = KERNEL) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2)

    def reset_parameters(self) -> None:
        truncated_normal_(self.weight, self.in_channels * self.kernel_size[0] * self.kernel_size[1])
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ConvDown(nn.Module):
    """Conv → 2×2 max-pool → RMSNorm over channels → SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs)
        self.norm = RMSNorm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs, H, W) -> (N, outputs, H/2, W/2)."""
        return norm_act(self.norm, F.max_pool2d(self.conv(x), 2))


class ConvUp(nn.Module):
    """Nearest 2× upsampling → Conv → RMSNorm over channels → SiLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = Conv(inputs, outputs)
        self.norm = RMSNorm(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (N, inputs, H, W) -> (N, outputs, 2H, 2W)."""
        return norm_act(self.norm, self.conv(upsample(x)))


def upsample(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")


def norm_act(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Norm over the channel axis, then SiLU. Free of copies when x is in channels-last memory."""
    return F.silu(norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
