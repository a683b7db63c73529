"""Losses with named terms, and reconstruction losses of images for tokenizers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.errors import ConfigError, one_line
from rl_lab.utils.ranks import count_over_ranks


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
    """Mean of values where mask, over their leading dimensions, is True; 0 if it is nowhere True.

    With several ranks their mean is that of the joint batch.
    """
    if mask is None:
        return values.mean()
    weight = mask.to(values.dtype)
    weight = weight.view(*mask.shape, *[1] * (values.ndim - mask.ndim)).expand_as(values)
    return (values * weight).sum() / count_over_ranks(weight.sum())


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
    needs_previous = False  # whether it also takes the frame before the target, (M, C, H, W)

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


class ChangeWeighted(ReconstructionLoss):
    """Absolute error, in which pixels that differ from the frame before count `factor` times more.

    A pixel has changed if a channel differs by more than `threshold`. The weights of a frame have mean 1, so
    a frame without change has the plain mean.
    """

    needs_previous = True

    def __init__(self, *, weight: float = 1.0, factor: float = 10.0, threshold: float = 0.02) -> None:
        super().__init__(weight=weight)
        self.factor, self.threshold = factor, threshold

    def forward(self, prediction: torch.Tensor, target: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        changed = (target - previous).abs().amax(-3) > self.threshold  # (M, H, W)
        weights = 1.0 + self.factor * changed.float()
        weights = weights / weights.mean((-2, -1), keepdim=True)
        return ((prediction - target).abs().mean(-3) * weights).mean((-2, -1))


class SSIM(ReconstructionLoss):
    """1 - structural similarity (Wang et al. 2004): means, deviations and correlation in Gaussian windows.

    window: side of the window, 11 with deviation 1.5 as published; smaller images have a smaller window
    """

    smallest_side = 3

    def __init__(self, *, weight: float = 1.0, window: int = 11, deviation: float = 1.5) -> None:
        super().__init__(weight=weight)
        self.window, self.deviation = window, deviation

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        channels, side = target.shape[1], min(self.window, *target.shape[-2:])
        places = torch.arange(side, device=target.device) - (side - 1) / 2
        line = torch.exp(-0.5 * (places / self.deviation).square())
        line = (line / line.sum()).expand(channels, 1, -1)

        def blur(x: torch.Tensor) -> torch.Tensor:
            x = F.conv2d(x, line.unsqueeze(-1), groups=channels)
            return F.conv2d(x, line.unsqueeze(-2), groups=channels)

        with torch.autocast(target.device.type, enabled=False):
            mean1, mean2 = blur(prediction), blur(target)
            variance1 = blur(prediction.square()) - mean1.square()
            variance2 = blur(target.square()) - mean2.square()
            covariance = blur(prediction * target) - mean1 * mean2
            light = (2.0 * mean1 * mean2 + 0.01**2) / (mean1.square() + mean2.square() + 0.01**2)
            shape = (2.0 * covariance + 0.03**2) / (variance1 + variance2 + 0.03**2)
            return 1.0 - (light * shape).mean((-3, -2, -1))


class HingeGAN(ReconstructionLoss):
    """A patch discriminator that tells frames from reconstructions, trained with the tokenizer.

    The loss is the sum of -D(reconstruction), with the discriminator's weights held fixed, and the
    discriminator's hinge loss max(0, 1 - D(frame)) + max(0, 1 + D(reconstruction)), with the reconstruction
    held fixed. Both are means over patches, so one optimizer trains both networks.

    channels: of the first convolution, doubled by each of the `layers` that halve the image
    """

    def __init__(self, *, weight: float = 0.1, channels: int = 32, layers: int = 2) -> None:
        super().__init__(weight=weight)
        self.smallest_side = 2 ** (layers + 1)
        widths = [3, *(channels << n for n in range(layers))]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            parts += [nn.Conv2d(before, after, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.discriminator = nn.Sequential(*parts, nn.Conv2d(widths[-1], 1, 3, padding=1))

    def forward(self, prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fixed = {name: value.detach() for name, value in self.discriminator.named_parameters()}
        deceived = torch.func.functional_call(self.discriminator, fixed, (_three_channels(prediction),))
        real = self.discriminator(_three_channels(target))
        made = self.discriminator(_three_channels(prediction.detach()))
        patches = -deceived.float() + F.relu(1.0 - real.float()) + F.relu(1.0 + made.float())
        return patches.mean((-3, -2, -1))


def _three_channels(pixels: torch.Tensor) -> torch.Tensor:
    """[0, 1] -> [-1, 1]; gray images three times."""
    return pixels.expand(-1, 3, -1, -1) * 2.0 - 1.0


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
    previous: torch.Tensor | None = None,  # (M, C, H, W), for losses with `needs_previous`
) -> dict[str, torch.Tensor]:
    """Each loss times its weight, 0-d float32; losses of weight 0 are not computed."""
    prediction, target = prediction.float(), target.float()
    parts: list[tuple[str, Any]] = list(losses.items())
    weighted = {}
    for name, loss in parts:
        if loss.weight != 0.0:
            more = (previous,) if getattr(loss, "needs_previous", False) else ()
            weighted[name] = loss.weight * masked_mean(loss(prediction, target, *more), mask)
    return weighted


def needs_previous(losses: Mapping[str, Any] | nn.ModuleDict) -> bool:
    """Whether a loss compares frames with those before."""
    parts: list[Any] = list(losses.values())
    return any(getattr(loss, "needs_previous", False) and loss.weight != 0.0 for loss in parts)


def frames_before(frames: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The frame before each row of (B, T, …); for the first row the one after it: the same pixels changed.

    Next to padding, the neighbour on the other side counts, and without one the frame itself.
    """
    before = torch.cat([frames[:, 1:2], frames[:, :-1]], 1)
    if mask is None:
        return before
    after = torch.cat([frames[:, 1:], frames[:, -2:-1]], 1)
    real = torch.cat([mask[:, 1:2], mask[:, :-1]], 1)
    real_after = torch.cat([mask[:, 1:], mask[:, -2:-1]], 1)
    shape = (*mask.shape, *[1] * (frames.ndim - 2))
    return torch.where(real.view(shape), before, torch.where(real_after.view(shape), after, frames))


# VGG16: number of convolutions per stage, and their width as a multiple of the first; pooling between stages.
STAGES = ((2, 1), (2, 2), (3, 4), (3, 8), (3, 8))
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # LPIPS' normalisation of [-1, 1] pixels


class Perceptual(ReconstructionLoss):
    """Distance of VGG16 features, as in LPIPS (Zhang et al. 2018). The network is not trained.

    Squared differences of unit-length features after each stage, averaged over pixels, summed over stages.
    The weights are not saved with a run; they are restored from the file or the seed.

    path:  file of tensors, written with torch.save and read with weights_only: torchvision's vgg16 (its
           state_dict), or tensors named weight0, bias0, …, weight12, bias12, and stage0 … stage4, the weights
           of each stage's channels; null: random weights from `seed`, with a warning: they suffice for timing
           and compare edges, but are not LPIPS
    linear: file of LPIPS' channel weights (lin0.model.1.weight …; the package lpips has it as
           weights/v0.1/vgg.pth); without it and without stage0 …, all channels count the same
    width: channels of the first stage; 64 is VGG16
    """

    smallest_side = 2 ** (len(STAGES) - 1)  # halved between the stages

    def __init__(
        self,
        *,
        weight: float = 1.0,
        path: str | None = None,
        linear: str | None = None,
        width: int = 64,
        seed: int = 0,
    ) -> None:
        super().__init__(weight=weight)
        if path is None and weight:
            warnings.warn(
                "components.tokenizer.losses: the perceptual loss has random weights, which is not LPIPS: set its path "
                "to a file of VGG16 weights (docs/algorithms/iris.md)",
                stacklevel=2,
            )
        tensors = _random_weights(width, seed) if path is None else _load(path, linear)
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


def _read(path: str, what: str) -> dict[str, torch.Tensor]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"{file} has no {what}: set path to a file of weights, or to null for random weights"
        )
    try:
        return dict(torch.load(file, weights_only=True, map_location="cpu"))
    except Exception as error:  # torch raises many types
        raise ConfigError(
            f"{file} could not be read as a file of tensors: {one_line(error)}; write it with torch.save"
        ) from error


def _load(path: str, linear: str | None = None) -> dict[str, torch.Tensor]:
    loaded = _from_torchvision(_read(path, "perceptual weights"))
    if linear is not None:
        stages = _read(linear, "channel weights")
        for stage in range(len(STAGES)):
            loaded[f"stage{stage}"] = stages.get(f"lin{stage}.model.1.weight", torch.empty(0)).flatten()
    wanted = _random_weights(1, 0)
    missing = [name for name in wanted if name not in loaded or not loaded[name].numel()]
    if missing:
        raise ConfigError(
            f"{linear or path} lacks the tensors {', '.join(missing[:4])}: "
            "write it as rl_lab/components/nn/losses.py describes"
        )
    return {name: loaded[name].float() for name in wanted}


def _from_torchvision(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our names for the convolutions of torchvision's vgg16 (features.0.weight, features.2.weight, …)."""
    places = sorted(
        int(name.split(".")[1]) for name in tensors if re.fullmatch(r"features\.\d+\.weight", name)
    )
    if not places:
        return tensors
    named = {}
    for layer, place in enumerate(places):
        named[f"weight{layer}"] = tensors[f"features.{place}.weight"]
        named[f"bias{layer}"] = tensors[f"features.{place}.bias"]
    layer = 0
    for stage, (layers, _) in enumerate(STAGES):
        layer += layers
        width = len(named.get(f"bias{layer - 1}", ()))
        named[f"stage{stage}"] = torch.full((width,), 1.0 / max(width, 1))
    return named
