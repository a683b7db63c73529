"""The controller C of World Models: one linear layer from latent and memory to the action."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Spec


class LinearController(nn.Module):
    """Features (…, F) to actions: tanh for continuous actions, argmax for each discrete variable.

    rectified: continuous dimensions whose neutral value is the low end of their range (a brake): the positive
               half of tanh covers the full range and negative outputs are neutral, as World Models does for
               CarRacing's brake
    """

    def __init__(self, *, spec: Spec, features: int, rectified: Sequence[int] = ()) -> None:
        super().__init__()
        self.action = spec.action
        self.features = features
        self.outputs = spec.action.size
        wrong = [index for index in rectified if not 0 <= index < self.outputs]
        if rectified and (spec.action.kind != "continuous" or wrong):
            raise ConfigError(
                f"rectified={list(rectified)} must list dimensions of a continuous action, but {spec.name} has "
                f"{self.outputs} of kind {spec.action.kind}"
            )
        # Evolution starts at zero, where every action is neutral.
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
        """features: (N, F) -> actions (N, …) as stored. The policy is deterministic, so `mode` is ignored."""
        return self.to_action(nn.functional.linear(features, self.weight, self.bias))

    def act_population(self, candidates: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """candidates: (P, num_parameters), features: (P, F) or (P, E, F) -> actions (P, …) or (P, E, …)."""
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
        """Values in [-1, 1] with 0 neutral -> stored actions, where [-1, 1] is the full range."""
        return torch.where(self.rectified, 2.0 * unit.clamp(min=0.0) - 1.0, unit)

    # ---------------------------------------------------------------- parameters as a vector

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
