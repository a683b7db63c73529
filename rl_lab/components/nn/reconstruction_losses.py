"""How wrong a reconstructed picture is: small parts, of which a tokenizer adds up any number, each with its weight.

Each is a network part called with prediction and target, (M, C, H, W) with pixels in [0, 1], and gives (M,).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.component_loss import masked_mean


class ReconstructionLoss(nn.Module):
    """weight: what it is multiplied with in the sum."""

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = weight


class AbsoluteError(ReconstructionLoss):
    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction - target).abs().mean((-3, -2, -1))


class SquaredPixelError(ReconstructionLoss):
    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction - target).square().mean((-3, -2, -1))


class WorstPixel(ReconstructionLoss):
    """The largest squared error of any pixel: small things that matter are small shares of a mean (Δ-IRIS)."""

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction - target).square().amax((-3, -2, -1))


def weighted_losses(
    losses: Mapping[str, Any] | nn.ModuleDict,
    prediction: torch.Tensor,  # (M, C, H, W)
    target: torch.Tensor,
    mask: torch.Tensor | None,  # (M,) bool: which pictures count
) -> dict[str, torch.Tensor]:
    """Each loss times its weight, 0-d, in float32; a weight of 0 is not computed."""
    prediction, target = prediction.float(), target.float()
    parts: list[tuple[str, Any]] = list(losses.items())
    return {
        name: loss.weight * masked_mean(loss(prediction, target), mask)
        for name, loss in parts
        if loss.weight != 0.0
    }
