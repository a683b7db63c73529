"""The controller C of World Models: one linear layer from latent and memory to the action, or two layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, Spec


class LinearController(nn.Module):
    """Features (…, F) to actions: tanh for continuous actions, argmax for each discrete variable.

    hidden:    units of a hidden layer, tanh(W features + b), before the linear layer; 0: none
    rectified: continuous dimensions whose neutral value is the low end of their range (a brake): the positive
               half of tanh covers the full range and negative outputs are neutral, as World Models does for
               CarRacing's brake
    """

    def __init__(self, *, spec: Spec, features: int, hidden: int = 0, rectified: Sequence[int] = ()) -> None:
        super().__init__()
        if hidden < 0:
            raise ConfigError(f"hidden is {hidden}: set it to the units of a hidden layer, or to 0 for none")
        self.action = spec.action
        self.features = features
        self.hidden = hidden
        self.outputs = spec.action.size
        wrong = [index for index in rectified if not 0 <= index < self.outputs]
        if rectified and (spec.action.kind != "continuous" or wrong):
            raise ConfigError(
                f"rectified={list(rectified)} must list dimensions of a continuous action, but {spec.name} has "
                f"{self.outputs} of kind {spec.action.kind}"
            )
        # Evolution starts at zero, where every action is neutral.
        shapes = {"weight": (self.outputs, hidden or features), "bias": (self.outputs,)}
        if hidden:
            shapes = {"hidden_weight": (hidden, features), "hidden_bias": (hidden,), **shapes}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        self._shapes = shapes
        mask = torch.zeros(self.outputs, dtype=torch.bool)
        mask[list(rectified)] = True
        self.register_buffer("rectified", mask, persistent=False)

    weight: torch.Tensor
    bias: torch.Tensor
    hidden_weight: torch.Tensor
    hidden_bias: torch.Tensor
    rectified: torch.Tensor

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self._shapes.values())

    # ---------------------------------------------------------------- acting

    def act(self, features: torch.Tensor, mode: ActMode | None = None) -> torch.Tensor:
        """features: (N, F) -> actions (N, …) as stored. The policy is deterministic, so `mode` is ignored."""
        if self.hidden:
            features = torch.tanh(nn.functional.linear(features, self.hidden_weight, self.hidden_bias))
        return self.to_action(nn.functional.linear(features, self.weight, self.bias))

    def act_population(self, candidates: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """candidates: (P, num_parameters), features: (P, F) or (P, E, F) -> actions (P, …) or (P, E, …)."""
        parts = self.unflatten(candidates)
        single = features.ndim == 2
        x = features.unsqueeze(1) if single else features
        if self.hidden:
            x = torch.tanh(_layer(x, parts["hidden_weight"], parts["hidden_bias"]))
        raw = _layer(x, parts["weight"], parts["bias"])
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

    def unflatten(self, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        """(…, num_parameters) -> each parameter by name, (…, *its shape); those of the hidden layer first."""
        parts = vectors.split([math.prod(shape) for shape in self._shapes.values()], -1)
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.unflatten(-1, shape) for (name, shape), part in named}

    def get_vector(self) -> torch.Tensor:
        return torch.cat([getattr(self, name).detach().flatten() for name in self._shapes])

    @torch.no_grad()
    def set_vector(self, vector: torch.Tensor) -> None:
        for name, value in self.unflatten(vector.to(self.weight)).items():
            getattr(self, name).copy_(value)


def _layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """One dense layer per candidate: x (P, E, F), weight (P, A, F), bias (P, A) -> (P, E, A)."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))
