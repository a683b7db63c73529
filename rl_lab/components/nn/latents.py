"""Stochastic states of an RSSM: a vector of categorical variables, or of independent normals.

A distribution turns raw outputs of a network (…, width) into statistics: log probabilities (…, S, C), or mean and
standard deviation (…, S, 2). Samples are (…, S, C) one-hot, or (…, S, 1). The caller draws the noise. Everything is
float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from rl_lab.components.nn import categorical
from rl_lab.errors import ConfigError, require_choice
from rl_lab.records import ArraySpec, NoiseSpec

LATENTS = ("categorical", "gaussian")
STD_FORMS = ("softplus", "sigmoid2")
LOG_2_PI = math.log(2.0 * math.pi)


class CategoricalLatent(nn.Module):
    """S one-hot variables of C classes, mixed with the uniform distribution (unimix; 0 in DreamerV2)."""

    fast = False  # samples in one kernel; see fast_path.py
    noise_kind = "uniform"

    def __init__(self, stoch: int, classes: int, *, unimix: float = 0.01) -> None:
        super().__init__()
        self.stoch, self.classes, self.unimix = stoch, classes, unimix
        self.width = stoch * classes
        self.column = ArraySpec((stoch,), "uint8")

    def statistics(self, raw: torch.Tensor) -> torch.Tensor:
        """Log probabilities (…, S, C)."""
        grouped = raw.unflatten(-1, (self.stoch, self.classes))
        if self.unimix == 0.0:  # a probability may round to 0
            return torch.log_softmax(grouped.float(), -1)
        return categorical.unimix_probs(grouped, self.unimix).log()

    def draw(self, raw: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise (…, S) uniform -> one-hot sample (…, S, C) with the gradient of the probabilities; statistics."""
        if self.fast:
            rows = raw.flatten(0, -2)
            sample = FusedSample.apply(rows, noise.reshape(len(rows), -1), self.unimix)
            return sample.view(*raw.shape[:-1], self.stoch, self.classes), self.statistics(raw)
        grouped = raw.unflatten(-1, (self.stoch, self.classes))
        probs = categorical.unimix_probs(grouped, self.unimix)
        log_probs = probs.log() if self.unimix else torch.log_softmax(grouped.float(), -1)
        return categorical.straight_through(probs, noise), log_probs

    def mode(self, statistics: torch.Tensor) -> torch.Tensor:
        return categorical.one_hot(statistics.argmax(-1), self.classes)

    def kl_divergence(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """KL(p ‖ q), summed over the variables: (…)."""
        return categorical.kl_divergence(p, q)

    def entropy(self, p: torch.Tensor) -> torch.Tensor:
        return categorical.entropy(p)

    def to_column(self, stoch: torch.Tensor) -> torch.Tensor:
        """As stored in replay: the classes (…, S) uint8."""
        return stoch.argmax(-1).to(torch.uint8)

    def from_column(self, column: torch.Tensor) -> torch.Tensor:
        return categorical.one_hot(column.long(), self.classes)


class FusedSample(torch.autograd.Function):
    """logits (R, S·C), noise (R, S) -> one-hot (R, S·C) float32, with the gradient of the probabilities."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, noise: torch.Tensor, unimix: float) -> torch.Tensor:
        from rl_lab.components.kernels.sampling import categorical_sample

        logits = logits.contiguous()
        no_bias = torch.zeros(logits.shape[-1], device=logits.device)
        probs, sample = categorical_sample(logits, no_bias, noise, unimix)
        ctx.save_for_backward(probs)
        ctx.unimix, ctx.dtype = unimix, logits.dtype
        return sample.float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        from rl_lab.components.kernels.sampling import categorical_sample_backward

        (probs,) = ctx.saved_tensors
        found = categorical_sample_backward(probs, None, grad.contiguous(), None, ctx.unimix, ctx.dtype)
        return found, None, None


class GaussianLatent(nn.Module):
    """S independent normals (DreamerV1, and an option of V2 and V3).

    std_form: softplus (danijar/dreamer models.py) | sigmoid2: 2 sigmoid(x / 2) (danijar/dreamerv2 common/nets.py)
    """

    noise_kind = "normal"
    classes = 1

    def __init__(self, stoch: int, *, std_form: str = "softplus", min_std: float = 0.1) -> None:
        super().__init__()
        require_choice("components.rssm.std_form", std_form, STD_FORMS)
        self.stoch, self.std_form, self.min_std = stoch, std_form, min_std
        self.width = 2 * stoch
        self.column = ArraySpec((stoch,), "float32")

    def statistics(self, raw: torch.Tensor) -> torch.Tensor:
        """Mean and standard deviation, (…, S, 2)."""
        mean, spread = raw.float().chunk(2, -1)
        std = F.softplus(spread) if self.std_form == "softplus" else 2.0 * torch.sigmoid(spread / 2.0)
        return torch.stack([mean, std + self.min_std], -1)

    def draw(self, raw: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Noise (…, S) standard normal -> sample (…, S, 1) with gradients of mean and deviation; statistics."""
        statistics = self.statistics(raw)
        mean, std = statistics.unbind(-1)
        return torch.addcmul(mean, std, noise).unsqueeze(-1), statistics

    def mode(self, statistics: torch.Tensor) -> torch.Tensor:
        return statistics[..., :1]

    def kl_divergence(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """KL(p ‖ q), summed over the variables: (…)."""
        (mean, std), (other, spread) = p.unbind(-1), q.unbind(-1)
        ratio = (std / spread).square()
        distance = ((mean - other) / spread).square()
        return 0.5 * (distance + ratio - 1.0 - ratio.log()).sum(-1)

    def entropy(self, p: torch.Tensor) -> torch.Tensor:
        return (p[..., 1].log() + 0.5 * (1.0 + LOG_2_PI)).sum(-1)

    def to_column(self, stoch: torch.Tensor) -> torch.Tensor:
        """As stored in replay: (…, S) float32."""
        return stoch.squeeze(-1).float()

    def from_column(self, column: torch.Tensor) -> torch.Tensor:
        return column.float().unsqueeze(-1)


Latent = CategoricalLatent | GaussianLatent


def make_latent(
    kind: str, stoch: int, classes: int, *, unimix: float, std_form: str, min_std: float
) -> Latent:
    require_choice("components.rssm.latent", kind, LATENTS)
    if kind == "categorical":
        return CategoricalLatent(stoch, classes, unimix=unimix)
    if classes != 1:
        raise ConfigError(
            f"components.rssm.classes is {classes}: set algorithm.size.classes=1 with components.rssm.latent=gaussian"
        )
    return GaussianLatent(stoch, std_form=std_form, min_std=min_std)


def noise_spec(latent: Latent, *batch: int) -> NoiseSpec:
    """Random values of one state per element: (*batch, S)."""
    return NoiseSpec((*batch, latent.stoch), "normal" if latent.noise_kind == "normal" else "uniform")
