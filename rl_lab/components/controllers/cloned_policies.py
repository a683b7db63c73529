"""Policies of behaviour cloning: an MLP that predicts actions, and one that predicts a mixture of Gaussians.

Both map features (B, To, F) of the observations to normalized actions (B, T, A).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.nn.moving_averages import Averaged
from rl_lab.components.representation_learners.observation_encoder import feature_width
from rl_lab.errors import ConfigError
from rl_lab.records import Spec


def _layers(inputs: int, units: Sequence[int], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(1)]
    for width_in, width in zip([inputs, *units[:-1]], units):
        layers += [nn.Linear(width_in, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(units[-1], outputs))


class MLPPolicy(Averaged):
    """Predicts the actions; trained by mean squared error."""

    def __init__(
        self,
        *,
        spec: Spec,
        horizon: int,
        observation_horizon: int,
        image_features: int = 64,
        units: Sequence[int] = (1024, 1024),
    ) -> None:
        self.shape = (horizon, spec.action.size)
        inputs = observation_horizon * feature_width(spec, image_features)
        super().__init__(_layers(inputs, units, math.prod(self.shape)))

    def loss(self, features: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Features (B, To, F), action (B, T, A) -> (B,)"""
        predicted = self(features).unflatten(-1, self.shape)
        return (predicted.float() - action).square().mean((1, 2))

    def act(self, features: torch.Tensor, generator: torch.Generator | None, sample: bool) -> torch.Tensor:
        """Features (B, To, F) -> (B, T, A); it has nothing to sample."""
        return self(features, slow=True).unflatten(-1, self.shape).float()


class MixturePolicy(Averaged):
    """Predicts a mixture of Gaussians for each action; trained by the negative log-likelihood.

    sample=False acts with the mean of a drawn component, as robomimic's `low_noise_eval` does.
    """

    def __init__(
        self,
        *,
        spec: Spec,
        horizon: int,
        observation_horizon: int,
        image_features: int = 64,
        units: Sequence[int] = (1024, 1024),
        modes: int = 5,
        min_std: float = 1e-4,
    ) -> None:
        if modes < 1 or min_std <= 0:
            raise ConfigError("controllers.policy: modes must be at least 1 and min_std above 0")
        self.horizon, self.actions, self.modes, self.min_std = horizon, spec.action.size, modes, min_std
        inputs = observation_horizon * feature_width(spec, image_features)
        super().__init__(_layers(inputs, units, horizon * modes * (1 + 2 * self.actions)))

    def mixture(
        self, features: torch.Tensor, *, slow: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log weights (B, T, K), means in [-1, 1] and standard deviations (B, T, K, A)."""
        out = (
            self(features, slow=slow).float().unflatten(-1, (self.horizon, self.modes, 1 + 2 * self.actions))
        )
        logits, mean, std = out.split([1, self.actions, self.actions], -1)
        return logits.squeeze(-1).log_softmax(-1), mean.tanh(), F.softplus(std) + self.min_std

    def loss(self, features: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Features (B, To, F), action (B, T, A) -> (B,)"""
        weight, mean, std = self.mixture(features)
        error = (action[:, :, None] - mean) / std
        log_density = (-0.5 * error.square() - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
        return -(weight + log_density).logsumexp(-1).mean(-1)

    def act(self, features: torch.Tensor, generator: torch.Generator | None, sample: bool) -> torch.Tensor:
        weight, mean, std = self.mixture(features, slow=True)
        uniform = torch.rand(weight.shape, generator=generator, device=weight.device)
        mode = (weight - (-uniform.clamp(min=1e-10).log()).log()).argmax(-1)  # Gumbel-max
        which = mode[..., None, None].expand(*mode.shape, 1, self.actions)
        mean, std = (part.gather(2, which).squeeze(2) for part in (mean, std))
        if not sample:
            return mean
        return mean + std * torch.randn(mean.shape, generator=generator, device=mean.device)
