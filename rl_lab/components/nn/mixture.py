"""Mixtures of normals, one for each number: density, and sampling at a temperature."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

HALF_LOG_TAU = 0.5 * math.log(2.0 * math.pi)


@dataclass
class Mixture:
    """Independent mixtures of K normals for D numbers: each tensor (…, D, K)."""

    log_weight: torch.Tensor  # normalised over K
    mean: torch.Tensor
    log_std: torch.Tensor

    @classmethod
    def from_raw(cls, raw: torch.Tensor, components: int) -> Mixture:
        """raw: (…, D · 3 · K) as a linear layer gives it."""
        logit, mean, log_std = raw.float().unflatten(-1, (-1, 3, components)).unbind(-2)
        return cls(torch.log_softmax(logit, -1), mean, log_std)

    def log_prob(self, value: torch.Tensor) -> torch.Tensor:
        """value: (…, D) -> log density of each number, (…, D)."""
        scaled = (value.unsqueeze(-1) - self.mean) * torch.exp(-self.log_std)
        return torch.logsumexp(self.log_weight - 0.5 * scaled.square() - self.log_std - HALF_LOG_TAU, -1)

    def sample(
        self, uniform: torch.Tensor, normal: torch.Tensor, temperature: float | torch.Tensor = 1.0
    ) -> torch.Tensor:
        """uniform, normal: (…, D) -> (…, D).

        The weights' logits are divided by the temperature and the deviations multiplied by its root (World Models):
        towards 0 the likeliest component's mean, above 1 more uncertain than the model is.
        """
        weight = torch.softmax(self.log_weight / temperature, -1)
        # The first component whose cumulated weight passes the uniform number; rounding may leave the last short of 1.
        index = (weight.cumsum(-1) < uniform.unsqueeze(-1)).sum(-1, keepdim=True)
        index = index.clamp(max=weight.shape[-1] - 1)
        mean = self.mean.gather(-1, index).squeeze(-1)
        std = self.log_std.gather(-1, index).squeeze(-1).exp()
        return mean + std * temperature**0.5 * normal
