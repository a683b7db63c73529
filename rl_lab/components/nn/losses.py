"""Losses with named terms, and reconstruction losses of images for tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.errors import ConfigError


@dataclass
class LossWithIntermediateLosses:
    """loss_total (0-d) has the gradient; intermediate_losses are its weighted terms by name, detached."""

    loss_total: torch.Tensor
    intermediate_losses: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, **losses: torch.Tensor) -> LossWithIntermediateLosses:
        """From weighted 0-d losses."""
        total = torch.stack([loss.float() for loss in losses.values()]).sum()
        return cls(total, {name: loss.detach() for name, loss in losses.items()})


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean of values where mask, over their leading dimensions, is True; 0 if it is nowhere True."""
    if mask is None:
        return values.mean()
    weight = mask.to(values.dtype)
    weight = weight.view(*mask.shape, *[1] * (values.ndim - mask.ndim)).expand_as(values)
    return (values * weight).sum() / weight.sum().clamp(min=1.0)


NO_REWARD = 0.05  # in absolute value; a predicted mean of rewards is never exactly 0


def reward_share(reward: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Share of steps with a reward, positive or negative; the same measure for stored and imagined rewards."""
    return masked_mean((reward.detach().abs() >= NO_REWARD).float(), mask)


# --- Reconstruction losses ---


class ReconstructionLoss(nn.Module):
    """Maps prediction and target, (M, C, H, W) with pixels in [0, 1], to (M,).

    A tokenizer minimises the weighted sum of any number of them.

    weight: factor in the sum
    """

    smallest_side = 1  # of the images that it accepts

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
    """Largest squared error of any pixel (Δ-IRIS): a mean gives small objects little weight."""

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (prediction - target).square().amax((-3, -2, -1))


def check_image_side(losses: Mapping[str, Any], side: int) -> None:
    """Raise ConfigError if the tokenizer has a loss that does not accept images of this side."""
    for name, loss in losses.items():
        least = getattr(loss, "smallest_side", 1)
        if side < least and getattr(loss, "weight", 1.0) != 0.0:
            raise ConfigError(
                f"components.tokenizer.losses.{name} ({type(loss).__name__}) needs images of at least "
                f"{least}×{least} pixels, not {side}×{side}: set environment.size, or use another loss"
            )


def weighted_losses(
    losses: Mapping[str, Any] | nn.ModuleDict,
    prediction: torch.Tensor,  # (M, C, H, W)
    target: torch.Tensor,
    mask: torch.Tensor | None,  # (M,) bool: images that count
) -> dict[str, torch.Tensor]:
    """Each loss times its weight, 0-d float32; losses of weight 0 are not computed."""
    prediction, target = prediction.float(), target.float()
    parts: list[tuple[str, Any]] = list(losses.items())
    return {
        name: loss.weight * masked_mean(loss(prediction, target), mask)
        for name, loss in parts
        if loss.weight != 0.0
    }


# VGG16: number of convolutions per stage, and their width as a multiple of the first; pooling between stages.
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # LPIPS' normalisation of [-1, 1] pixels


class Perceptual(ReconstructionLoss):
    """Distance of VGG16 features, as in LPIPS (Zhang et al. 2018). The network is not trained.

    Squared differences of unit-length features after each stage, averaged over pixels, summed over stages.
    The weights are not saved with a run; they are restored from the file or the seed.

    path:  file of tensors named weight0, bias0, …, weight12, bias12 and stage0 … stage4 (channel weights of
           the stages), written with torch.save and read with weights_only; null: random weights from `seed`,
           which suffice for timing and compare edges, but are not LPIPS
    width: channels of the first stage; 64 is VGG16
    """

    smallest_side = 2 ** (len(STAGES) - 1)  # halved between the stages

    def __init__(
        self, *, weight: float = 1.0, path: str | None = None, width: int = 64, seed: int = 0
    ) -> None:
        super().__init__(weight=weight)
        tensors = _random_weights(width, seed) if path is None else _load(path)
        for name, value in tensors.items():
            self.register_buffer(name, value, persistent=False)
        self.register_buffer("shift", torch.tensor(SHIFT).view(3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(SCALE).view(3, 1, 1), persistent=False)

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(prediction), device=prediction.device)
        pairs = zip(self._features(prediction), self._features(target))
        for stage, (predicted, wanted) in enumerate(pairs):
            difference = (
                F.normalize(predicted, dim=1, eps=1e-10) - F.normalize(wanted, dim=1, eps=1e-10)
            ).square()
            weights = getattr(self, f"stage{stage}")
            total = total + (difference * weights.view(-1, 1, 1)).sum(1).mean((-2, -1))
        return total

    def _features(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        x = (pixels.expand(-1, 3, -1, -1) * 2.0 - 1.0 - self.get_buffer("shift")) / self.get_buffer("scale")
        features, layer = [], 0
        for stage, (layers, _) in enumerate(STAGES):
            x = F.max_pool2d(x, 2) if stage else x
            for _ in range(layers):
                x = F.relu(
                    F.conv2d(x, self.get_buffer(f"weight{layer}"), self.get_buffer(f"bias{layer}"), padding=1)
                )
                layer += 1
            features.append(x)
        return features


def _random_weights(width: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors, inputs, layer = dict[str, torch.Tensor](), 3, 0
    for stage, (layers, multiple) in enumerate(STAGES):
        for _ in range(layers):
            deviation = (2.0 / (9 * inputs)) ** 0.5
            shape = (multiple * width, inputs, 3, 3)
            tensors[f"weight{layer}"] = torch.randn(shape, generator=generator) * deviation
            tensors[f"bias{layer}"] = torch.zeros(multiple * width)
            inputs, layer = multiple * width, layer + 1
        tensors[f"stage{stage}"] = torch.full((inputs,), 1.0 / inputs)
    return tensors


def _load(path: str) -> dict[str, torch.Tensor]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"{file} has no perceptual weights: set path to a file of weights, or to null for random weights"
        )
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    wanted = _random_weights(1, 0)
    missing = [name for name in wanted if name not in loaded]
    if missing:
        raise ConfigError(
            f"{file} lacks the tensors {', '.join(missing[:4])}: write it as rl_lab/components/nn/losses.py describes"
        )
    return {name: loaded[name].float() for name in wanted}
