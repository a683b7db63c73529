"""Noise schedule of diffusion models, and the steps of DDPM (Ho et al. 2020) and DDIM (Song et al. 2021).

The cosine schedule of Nichol and Dhariwal 2021, `squaredcos_cap_v2` in diffusers. Predictions are of the noise, and the
denoised sample is clipped to [-1, 1]. Tests hold it to diffusers' DDPMScheduler and DDIMScheduler.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import nn

from rl_lab.errors import ConfigError

LARGEST_BETA = 0.999
SMALLEST_VARIANCE = 1e-20

Sampler = Literal["ddpm", "ddim"]


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
        before = step - self.steps // count
        here = self.values[step]
        there = self.values[before] if before >= 0 else 1.0
        clean = ((noisy - math.sqrt(1.0 - here) * predicted) / math.sqrt(here)).clamp(-1.0, 1.0)
        if sampler == "ddim":
            return math.sqrt(there) * clean + math.sqrt(1.0 - there) * predicted
        alpha = here / there
        mean = math.sqrt(there) * (1.0 - alpha) / (1.0 - here) * clean
        mean = mean + math.sqrt(alpha) * (1.0 - there) / (1.0 - here) * noisy
        if step == 0 or noise is None:
            return mean
        variance = max((1.0 - there) / (1.0 - here) * (1.0 - alpha), SMALLEST_VARIANCE)
        return mean + math.sqrt(variance) * noise
