"""Distributions over action sequences that a planner refines: normals, or categoricals.

Sequences are (N, S, H, A): N environments, S samples, H steps, actions as networks see them. A search has
`memory_width`, `noise` (random numbers of one sampled sequence) and `choice_noise` (of the executed action), and works
on parameters of its own. Everything is a pure function of tensors with fixed shapes.
"""

from __future__ import annotations

from typing import Protocol

import torch

from rl_lab.components.nn.categorical import one_hot, sample_index
from rl_lab.components.nn.regional_compile import piece
from rl_lab.records import ActionSpec, NoiseSpec

Parameters = tuple[torch.Tensor, ...]  # the first is what is remembered from step to step, (N, H, W)


class ActionSearch(Protocol):
    """What a planner needs of one."""

    memory_width: int
    noise: NoiseSpec
    choice_noise: NoiseSpec

    def blank(self, num_envs: int, device: torch.device | str) -> torch.Tensor:
        """Memory at an episode's start: (N, H, W)."""

    def start(self, memory: torch.Tensor, is_first: torch.Tensor) -> Parameters:
        """From the plan of the step before, moved on by one; from a blank one where `is_first` (N,)."""

    def sample(self, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        """noise: (N, S, H, k) -> (N, S, H, A)."""

    def refit(
        self, parameters: Parameters, elites: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor | float
    ) -> Parameters:
        """elites: (N, E, H, A), weight: (N, E), summing to 1; `floor` is how narrow it may become."""

    def choose(
        self,
        parameters: Parameters,
        first: torch.Tensor,  # (N, A) first action of the sequence to be executed
        noise: torch.Tensor,  # (N, k)
        explore: torch.Tensor | float,  # 1: with exploration, 0: without
    ) -> torch.Tensor:
        """-> (N, A) the action to send."""


@piece
def draw_normal(mean: torch.Tensor, std: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """mean, std (N, 1, H, A), noise (N, S, H, A) -> (N, S, H, A) within ±1."""
    return torch.addcmul(mean, noise, std).clamp(-1.0, 1.0)


@piece
def refit_normal(
    elites: torch.Tensor,  # (N, E, H, A)
    weight: torch.Tensor,  # (N, E, 1, 1)
    mean: torch.Tensor,  # (N, H, A)
    momentum: float,
    floor: torch.Tensor | float,
    ceiling: float,
) -> torch.Tensor:
    """Weighted mean and deviation of the elites, (2, N, H, A); `momentum` is the share of the mean before."""
    fresh = (weight * elites).sum(1)
    # The deviation is taken around the elites' own mean.
    std = (weight * (elites - fresh.unsqueeze(1)).square()).sum(1).sqrt()
    return torch.stack([mean * momentum + fresh * (1.0 - momentum), std.clamp(min=floor).clamp(max=ceiling)])


class NormalSearch:
    """Independent normals for every step and part of an action, cut off at ±1."""

    def __init__(
        self,
        action: ActionSpec,
        horizon: int,
        *,
        max_std: float = 2.0,
        momentum: float = 0.0,
        uniform: bool = False,
    ) -> None:
        self.horizon = horizon
        self.memory_width = action.size
        self.max_std = max_std
        self.momentum = momentum
        self.uniform = uniform  # random shooting: everything in [-1, 1] is equally likely
        self.noise = NoiseSpec((horizon, action.size), "uniform" if uniform else "normal")
        self.choice_noise = NoiseSpec((action.size,), "normal")

    def blank(self, num_envs: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(num_envs, self.horizon, self.memory_width, device=device)

    def start(self, memory: torch.Tensor, is_first: torch.Tensor) -> Parameters:
        moved = torch.cat([memory[:, 1:], torch.zeros_like(memory[:, :1])], 1)
        mean = moved.masked_fill(is_first.view(-1, 1, 1), 0.0)
        return mean, torch.full_like(mean, self.max_std)

    def sample(self, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        if self.uniform:
            return noise * 2.0 - 1.0
        mean, std = parameters
        return draw_normal(mean.unsqueeze(1), std.unsqueeze(1), noise)

    def refit(
        self, parameters: Parameters, elites: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor | float
    ) -> Parameters:
        weight = weight[..., None, None]
        mean, std = refit_normal(elites, weight, parameters[0], self.momentum, floor, self.max_std)
        return mean, std

    def choose(
        self,
        parameters: Parameters,
        first: torch.Tensor,
        noise: torch.Tensor,
        explore: torch.Tensor | float,
    ) -> torch.Tensor:
        return (first + explore * noise * parameters[1][:, 0]).clamp(-1.0, 1.0)


class CategoricalSearch:
    """Independent categoricals for every step and choice; `floor` is the share of the uniform distribution in them."""

    def __init__(self, action: ActionSpec, horizon: int, *, momentum: float = 0.0) -> None:
        self.horizon = horizon
        self.choices = action.choices
        self.memory_width = action.size
        self.momentum = momentum
        self.noise = NoiseSpec((horizon, len(action.choices)), "uniform")
        self.choice_noise = NoiseSpec((len(action.choices),), "uniform")

    def blank(self, num_envs: int, device: torch.device | str) -> torch.Tensor:
        uniform = torch.cat([torch.full((count,), 1.0 / count, device=device) for count in self.choices])
        return uniform.expand(num_envs, self.horizon, -1).clone()

    def start(self, memory: torch.Tensor, is_first: torch.Tensor) -> Parameters:
        blank = self.blank(len(memory), memory.device)
        moved = torch.cat([memory[:, 1:], blank[:, :1]], 1)
        return (torch.where(is_first.view(-1, 1, 1), blank, moved),)

    def sample(self, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        return self._draw(parameters[0].unsqueeze(1), noise)

    def refit(
        self, parameters: Parameters, elites: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor | float
    ) -> Parameters:
        fresh = (weight[..., None, None] * elites).sum(1)
        fresh = parameters[0] * self.momentum + fresh * (1.0 - self.momentum)
        blank = self.blank(1, fresh.device)
        return (fresh * (1.0 - floor) + blank * floor,)

    def choose(
        self,
        parameters: Parameters,
        first: torch.Tensor,
        noise: torch.Tensor,
        explore: torch.Tensor | float,
    ) -> torch.Tensor:
        """Exploring draws from the refined distribution; else the likeliest choices of it are taken."""
        probabilities = parameters[0][:, 0]
        drawn = self._draw(probabilities, noise)
        parts = [one_hot(part.argmax(-1), part.shape[-1]) for part in probabilities.split(self.choices, -1)]
        best = torch.cat(parts, -1)
        return drawn * explore + best * (1.0 - explore)

    def _draw(self, probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(…, A) probabilities, (…, k) uniform -> (…, A) one-hot."""
        parts = zip(probabilities.split(self.choices, -1), noise.unbind(-1))
        return torch.cat([one_hot(sample_index(p, u), p.shape[-1]) for p, u in parts], -1)
