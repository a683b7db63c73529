"""Noise schedule of diffusion models, and the steps of DDPM (Ho et al. 2020) and DDIM (Song et al. 2021).

The cosine schedule of Nichol and Dhariwal 2021, `squaredcos_cap_v2` in diffusers. Predictions are of the noise, and the
denoised sample is clipped to [-1, 1]. Tests hold it to diffusers' DDPMScheduler and DDIMScheduler.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from rl_lab.errors import ConfigError

LARGEST_BETA = 0.999
SMALLEST_VARIANCE = 1e-20

Sampler = Literal["ddpm", "ddim"]
# removed, scale, of_clean, of_noisy, of_predicted, of_noise: see `denoised`
Coefficients = tuple[float, float, float, float, float, float]


class NoiseSchedule(nn.Module):
    """ᾱ_t for t = 0 … T-1: the share of the signal's variance in a sample at step t."""

    signal: torch.Tensor  # (T,)

    def __init__(self, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise ConfigError(f"algorithm.denoising_steps is {steps}: set it to at least 1")
        self.steps = steps

        def cosine(time: float) -> float:
            return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

        product, products = 1.0, []
        for step in range(steps):
            beta = min(1.0 - cosine((step + 1) / steps) / cosine(step / steps), LARGEST_BETA)
            product *= 1.0 - beta
            products.append(product)
        self.values = products  # for the constants of sampling
        self.register_buffer("signal", torch.tensor(products), persistent=False)

    def add_noise(self, sample: torch.Tensor, noise: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """sample, noise: (B, …), step: (B,) int64 -> sqrt(ᾱ) · sample + sqrt(1 - ᾱ) · noise"""
        signal = self.signal[step].view(-1, *[1] * (sample.ndim - 1))
        return signal.sqrt() * sample + (1.0 - signal).sqrt() * noise

    def sampling_steps(self, count: int) -> list[int]:
        """The steps of a sampler with `count` of them, from the noisiest to 0 (diffusers: "leading")."""
        if not 1 <= count <= self.steps:
            raise ConfigError(
                f"algorithm.sampling_steps is {count}: it must be from 1 to denoising_steps={self.steps}"
            )
        stride = self.steps // count
        return [k * stride for k in reversed(range(count))]

    def coefficients(self, sampler: Sampler, step: int, count: int) -> Coefficients:
        """Of one step from `step` to `step` - T // count, with `count` sampling steps."""
        before = step - self.steps // count
        here = self.values[step]
        there = self.values[before] if before >= 0 else 1.0
        removed, scale = math.sqrt(1.0 - here), math.sqrt(here)
        if sampler == "ddim":
            return removed, scale, math.sqrt(there), 0.0, math.sqrt(1.0 - there), 0.0
        alpha = here / there
        of_clean = math.sqrt(there) * (1.0 - alpha) / (1.0 - here)
        of_noisy = math.sqrt(alpha) * (1.0 - there) / (1.0 - here)
        variance = max((1.0 - there) / (1.0 - here) * (1.0 - alpha), SMALLEST_VARIANCE)
        return removed, scale, of_clean, of_noisy, 0.0, 0.0 if step == 0 else math.sqrt(variance)

    def denoise(
        self,
        sampler: Sampler,
        noisy: torch.Tensor,
        predicted: torch.Tensor,  # noise
        step: int,
        count: int,  # sampling steps
        noise: torch.Tensor | None,  # of DDPM, except for the last step
    ) -> torch.Tensor:
        """One step from `step` to `step` - T // count."""
        return denoised(self.coefficients(sampler, step, count), noisy, predicted, noise)


def denoised(
    coefficients: Sequence[Any], noisy: torch.Tensor, predicted: torch.Tensor, noise: torch.Tensor | None
) -> torch.Tensor:
    """x₀ = (noisy - removed · predicted) / scale, clipped; then the sum of x₀ and the others, by their coefficients."""
    removed, scale, of_clean, of_noisy, of_predicted, of_noise = coefficients
    clean = ((noisy - removed * predicted) / scale).clamp(-1.0, 1.0)
    result = of_clean * clean + of_noisy * noisy + of_predicted * predicted
    return result if noise is None else result + of_noise * noise
