"""What every trained part of a token world model returns: the sum to minimise, and what it is made of."""

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
    """loss_total (0-d) has the gradient; intermediate_losses are named, detached, and already weighted."""

    loss_total: torch.Tensor
    intermediate_losses: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, **losses: torch.Tensor) -> LossWithIntermediateLosses:
        """From weighted losses, 0-d each."""
        total = torch.stack([loss.float() for loss in losses.values()]).sum()
        return cls(total, {name: loss.detach() for name, loss in losses.items()})


def masked_mean(values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Mean over the places where mask, of the leading dimensions of values, is True; 0 where there is none."""
    if mask is None:
        return values.mean()
    weight = mask.to(values.dtype)
    weight = weight.view(*mask.shape, *[1] * (values.ndim - mask.ndim)).expand_as(values)
    return (values * weight).sum() / weight.sum().clamp(min=1.0)


# --------------------
# How wrong a reconstructed picture is: small parts, of which a tokenizer adds up any number, each with its weight.
#
# Each is a network part called with prediction and target, (M, C, H, W) with pixels in [0, 1], and gives (M,).


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


# --------------------
# Pictures compared by the features of a VGG16 (in the manner of LPIPS, Zhang et al. 2018). The network never learns.
#
# Weights come from a file; without one they are random, which is enough for timing and still compares edges, but is not
# LPIPS. They are not saved with a run: the file, or the seed, brings them back.


# Convolutions of each stage and their width as a multiple of the first; a pooling lies between stages. (VGG16)
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # LPIPS' normalisation of [-1, 1] pixels


class Perceptual(ReconstructionLoss):
    """Squared differences of unit-length features after each stage, averaged over places, summed over stages.

    path:  a file of tensors named weight0, bias0, …, weight12, bias12 and, for the stages' own channel weights, stage0 …
           stage4 (made with torch.save, read with weights_only); null: random weights from `seed`
    width: channels of the first stage; 64 is VGG16
    """

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
        for stage, (seen, wanted) in enumerate(pairs):
            difference = (
                F.normalize(seen, dim=1, eps=1e-10) - F.normalize(wanted, dim=1, eps=1e-10)
            ).square()
            weights = getattr(self, f"stage{stage}")
            total = total + (difference * weights.view(-1, 1, 1)).sum(1).mean((-2, -1))
        return total

    def _features(self, pixels: torch.Tensor) -> list[torch.Tensor]:
        x = (pixels.expand(-1, 3, -1, -1) * 2.0 - 1.0 - self.get_buffer("shift")) / self.get_buffer("scale")
        found, layer = [], 0
        for stage, (layers, _) in enumerate(STAGES):
            x = F.max_pool2d(x, 2) if stage else x
            for _ in range(layers):
                x = F.relu(
                    F.conv2d(x, self.get_buffer(f"weight{layer}"), self.get_buffer(f"bias{layer}"), padding=1)
                )
                layer += 1
            found.append(x)
        return found


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
            f"there are no perceptual weights at {file}: give a file, or path: null for random ones"
        )
    loaded = torch.load(file, weights_only=True, map_location="cpu")
    wanted = _random_weights(1, 0)
    missing = [name for name in wanted if name not in loaded]
    if missing:
        raise ConfigError(
            f"{file} lacks the tensors {', '.join(missing[:4])}: see rl_lab/components/nn/losses.py"
        )
    return {name: loaded[name].float() for name in wanted}
