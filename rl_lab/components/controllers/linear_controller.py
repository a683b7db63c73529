"""C of World Models: one linear layer from what is seen and remembered to an action."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Spec


class LinearController(nn.Module):
    """Features (…, F) to actions. Continuous: tanh; discrete: the largest output, for each variable of its own.

    rectified: continuous dimensions whose rest is at the low end of their range (a brake): the positive half of tanh
               covers the whole range, and everything below 0 is rest, as World Models does with CarRacing's brake
    """

    def __init__(self, *, spec: Spec, features: int, rectified: Sequence[int] = ()) -> None:
        super().__init__()
        self.action = spec.action
        self.features = features
        self.outputs = spec.action.size
        wrong = [index for index in rectified if not 0 <= index < self.outputs]
        if rectified and (spec.action.kind != "continuous" or wrong):
            raise ConfigError(
                f"rectified={list(rectified)} must name dimensions of a continuous action, and {spec.name} has "
                f"{self.outputs} of kind {spec.action.kind}"
            )
        # Zeros: evolution starts there, and every action is the neutral one.
        self.weight = nn.Parameter(torch.zeros(self.outputs, features), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(self.outputs), requires_grad=False)
        mask = torch.zeros(self.outputs, dtype=torch.bool)
        mask[list(rectified)] = True
        self.register_buffer("rectified", mask, persistent=False)

    rectified: torch.Tensor

    @property
    def num_parameters(self) -> int:
        return self.weight.numel() + self.bias.numel()

    # ---------------------------------------------------------------- acting

    def act(self, features: torch.Tensor, mode: ActMode | None = None) -> torch.Tensor:
        """features: (N, F) -> actions (N, …) as stored. There is nothing to sample: `mode` is not read."""
        return self.to_action(nn.functional.linear(features, self.weight, self.bias))

    def act_population(self, candidates: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """candidates: (P, num_parameters); features: (P, F) or (P, E, F) -> actions of each candidate, (P, …) or (P, E, …)."""
        weight, bias = self.unflatten(candidates)
        single = features.ndim == 2
        x = features.unsqueeze(1) if single else features
        raw = torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
        return self.to_action(raw.squeeze(1) if single else raw)

    def to_action(self, raw: torch.Tensor) -> torch.Tensor:
        """Outputs (…, A) -> actions as stored."""
        if self.action.kind == "continuous":
            return self.from_unit(torch.tanh(raw))
        if self.action.kind == "discrete":
            return raw.argmax(-1)
        return torch.stack([part.argmax(-1) for part in raw.split(self.action.choices, -1)], -1)

    def from_unit(self, unit: torch.Tensor) -> torch.Tensor:
        """Numbers in [-1, 1] with rest at 0 -> continuous actions as stored, in [-1, 1] over their whole range."""
        return torch.where(self.rectified, 2.0 * unit.clamp(min=0.0) - 1.0, unit)

    # ---------------------------------------------------------------- as one vector

    def unflatten(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(…, num_parameters) -> weights (…, A, F) and biases (…, A)."""
        weight, bias = vectors.split([self.weight.numel(), self.outputs], -1)
        return weight.unflatten(-1, (self.outputs, self.features)), bias

    def get_vector(self) -> torch.Tensor:
        return torch.cat([self.weight.detach().flatten(), self.bias.detach()])

    @torch.no_grad()
    def set_vector(self, vector: torch.Tensor) -> None:
        weight, bias = self.unflatten(vector.to(self.weight))
        self.weight.copy_(weight)
        self.bias.copy_(bias)
