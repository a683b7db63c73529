"""Sampling-based planning with a learned model: MPPI, the cross-entropy method, random shooting.

A model is any object with these methods; latents are tensors (R, …) or dicts of them:

    next(latent, action, noise) -> latent           one step
    reward(latent, action, following) -> (R, H)     rewards of H steps at once; latents are (R, H, …)
    value(latent, noise) -> (R,)                    return after the horizon
    policy(latent, noise) -> (R, A)                 actions to propose

and optionally:

    alive(following) -> (R, …)                      probability that the episode continues
    noise                                           name -> NoiseSpec of one row, for next, value and policy;
                                                    a method without an entry gets None
    dtype                                           dtype of the actions
    rewards_on_arrival                              False: `reward` gets None for the following latents
    action_width                                    width to which actions are padded with zeros
    returns(latent, actions, weight, noise) -> (R,) a faster equivalent of `trajectory_values`: N latents, R
                                                    sequences (R, H, A) and their discounts (R, H + 1)

Actions are network inputs: values in [-1, 1], or concatenated one-hot vectors.

All functions are pure, with fixed shapes, noise as an argument and no device-to-host copies; the loop over
iterations is unrolled. One CUDA graph can capture a complete plan for any number of environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl_lab.components.kernels.topk import topk
from rl_lab.components.nn.categorical import one_hot, sample_index
from rl_lab.components.nn.fast_path import compiled_pointwise
from rl_lab.components.nn.normed_mlp import cast_wide
from rl_lab.errors import ConfigError, closest
from rl_lab.records import ActionSpec, NoiseSpec, Spec

# --- Distributions over action sequences ---

Parameters = tuple[torch.Tensor, ...]  # the first one is kept from step to step as the memory, (N, H, W)


class ActionSearch(Protocol):
    """A distribution over action sequences (N, S, H, A): environments, samples, steps, action inputs."""

    memory_width: int
    noise: NoiseSpec  # of one sampled sequence
    choice_noise: NoiseSpec  # of the executed action

    def blank(self, num_envs: int, device: torch.device | str) -> torch.Tensor:
        """Memory at the start of an episode: (N, H, W)."""

    def start(self, memory: torch.Tensor, is_first: torch.Tensor) -> Parameters:
        """Parameters from the previous plan, shifted by one step; from `blank` where `is_first` (N,)."""

    def sample(self, parameters: Parameters, noise: torch.Tensor) -> torch.Tensor:
        """noise: (N, S, H, k) -> (N, S, H, A)."""

    def refit(
        self, parameters: Parameters, elites: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor | float
    ) -> Parameters:
        """Fit to elites (N, E, H, A) with weight (N, E), summing to 1; `floor`: minimum spread."""

    def choose(
        self,
        parameters: Parameters,
        first: torch.Tensor,  # (N, A) first action of the sequence to be executed
        noise: torch.Tensor,  # (N, k)
        explore: torch.Tensor | float,  # 1: with exploration, 0: without
    ) -> torch.Tensor:
        """-> (N, A), the action to execute."""


@compiled_pointwise
def draw_normal(mean: torch.Tensor, std: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """mean, std (N, 1, H, A), noise (N, S, H, A) -> (N, S, H, A) within ±1."""
    return torch.addcmul(mean, noise, std).clamp(-1.0, 1.0)


@compiled_pointwise
def refit_normal(
    elites: torch.Tensor,  # (N, E, H, A)
    weight: torch.Tensor,  # (N, E, 1, 1)
    mean: torch.Tensor,  # (N, H, A)
    momentum: float,
    floor: torch.Tensor | float,
    ceiling: float,
) -> torch.Tensor:
    """Weighted mean and std of the elites, (2, N, H, A); `momentum`: weight of the previous mean."""
    fresh = (weight * elites).sum(1)
    # Around the mean of the elites, not around the averaged mean.
    std = (weight * (elites - fresh.unsqueeze(1)).square()).sum(1).sqrt()
    return torch.stack([mean * momentum + fresh * (1.0 - momentum), std.clamp(min=floor).clamp(max=ceiling)])


class NormalSearch:
    """Independent normals for each step and action dimension, clipped to ±1."""

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
        self.uniform = uniform  # random shooting: uniform in [-1, 1]
        self.noise = NoiseSpec((horizon, action.size), "uniform" if uniform else "normal")
        self.choice_noise = NoiseSpec((action.size,), "normal")

    def blank(self, num_envs: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(num_envs, self.horizon, self.memory_width, device=device)

    def start(self, memory: torch.Tensor, is_first: torch.Tensor) -> Parameters:
        shifted = torch.cat([memory[:, 1:], torch.zeros_like(memory[:, :1])], 1)
        mean = shifted.masked_fill(is_first.view(-1, 1, 1), 0.0)
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
    """Independent categoricals for each step and variable; `floor`: weight of the uniform distribution."""

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
        shifted = torch.cat([memory[:, 1:], blank[:, :1]], 1)
        return (torch.where(is_first.view(-1, 1, 1), blank, shifted),)

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
        """A sample of the fitted distribution with exploration, its mode without."""
        probabilities = parameters[0][:, 0]
        drawn = self._draw(probabilities, noise)
        parts = [one_hot(part.argmax(-1), part.shape[-1]) for part in probabilities.split(self.choices, -1)]
        best = torch.cat(parts, -1)
        return drawn * explore + best * (1.0 - explore)

    def _draw(self, probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(…, A) probabilities, (…, k) uniform -> (…, A) one-hot."""
        parts = zip(probabilities.split(self.choices, -1), noise.unbind(-1))
        return torch.cat([one_hot(sample_index(p, u), p.shape[-1]) for p, u in parts], -1)


# --- The planner ---

METHODS = ("mppi", "cem", "random_shooting")
MANY_ACTIONS = (
    20  # from this action width on, TD-MPC2 uses two more iterations (nicklashansen/tdmpc2 tdmpc2.py)
)
WORST = -1e9  # replaces a NaN value of a trajectory, so that it is never an elite
Latent = Any
Noise = Mapping[str, torch.Tensor]


@dataclass
class Plan:
    """Result of `MPCPlanner.plan`."""

    action: torch.Tensor  # (N, A) to execute
    memory: torch.Tensor  # (N, H, W) start of the next plan
    value: torch.Tensor  # (N,) value of the best sequence
    spread: (
        torch.Tensor
    )  # (N,) mean standard deviation of the final distribution (categorical: mean probability)


class MPCPlanner:
    """Samples action sequences, refits the distribution to the best ones, and executes the first action.

    method:          mppi: elites are weighted by exp(temperature · value), and a sampled elite is executed ·
                     cem: elites are weighted equally, and their mean is executed ·
                     random_shooting: one iteration, the best sequence is executed
    horizon:         steps of the model
    iterations:      of sampling and fitting; "auto": 6, or 8 with at least 20 action inputs (TD-MPC2)
    samples:         sequences per iteration, including those of the policy
    policy_samples:  sequences proposed by the policy; sampled once and used in every iteration
    elites:          sequences that the distribution is fitted to
    min_std:         minimum standard deviation; discrete: minimum weight of the uniform distribution
    momentum:        weight of the previous mean
    """

    fast = False  # elites in one kernel; see fast_path.py

    def __init__(
        self,
        *,
        spec: Spec,
        method: str = "mppi",
        horizon: int = 3,
        iterations: int | str = "auto",
        samples: int = 512,
        policy_samples: int = 24,
        elites: int = 64,
        temperature: float = 0.5,
        min_std: float = 0.05,
        max_std: float = 2.0,
        momentum: float = 0.0,
    ) -> None:
        if method not in METHODS:
            raise ConfigError(f"planner method is '{method}'.{closest(method, METHODS)}")
        if iterations == "auto":
            iterations = 8 if spec.action.size >= MANY_ACTIONS else 6
        shooting = method == "random_shooting"
        self.method = method
        self.horizon = horizon
        self.iterations = 1 if shooting else int(iterations)
        self.samples = samples
        self.policy_samples = policy_samples
        self.elites = 1 if shooting else elites
        self.temperature = temperature if method == "mppi" else 0.0
        self.min_std = min_std
        if not 1 <= self.elites <= samples or not 0 <= policy_samples < samples:
            raise ConfigError(
                f"planner elites={self.elites} must be between 1 and samples={samples}, and "
                f"policy_samples={policy_samples} must be fewer than samples"
            )
        if min(self.horizon, self.iterations) < 1:
            raise ConfigError(
                f"planner horizon={self.horizon} and iterations={self.iterations} must be at least 1"
            )
        self.search: ActionSearch
        if spec.action.kind == "continuous":
            self.search = NormalSearch(
                spec.action, horizon, max_std=max_std, momentum=momentum, uniform=shooting
            )
        else:
            self.search = CategoricalSearch(spec.action, horizon, momentum=momentum)

    def memory(self, num_envs: int, device: torch.device | str) -> torch.Tensor:
        """Memory before the first step, (N, H, W)."""
        return self.search.blank(num_envs, device)

    def noise(self, num_envs: int, model_noise: Mapping[str, NoiseSpec]) -> dict[str, NoiseSpec]:
        """Random values of one call of `plan`; model_noise: those of one row, by method of the model."""
        n, h, rounds = num_envs, self.horizon, self.iterations
        drawn = self.samples - self.policy_samples
        specs = {
            "samples": _widened(self.search.noise, rounds, n, drawn),
            "select": NoiseSpec((n,), "uniform"),
            "choice": _widened(self.search.choice_noise, n),
        }
        if "next" in model_noise:
            specs["next"] = _widened(model_noise["next"], rounds, h, n * self.samples)
        if "value" in model_noise:
            specs["value"] = _widened(model_noise["value"], rounds, n * self.samples)
        if self.policy_samples:
            if "policy" in model_noise:
                specs["propose"] = _widened(model_noise["policy"], h, n * self.policy_samples)
            if "next" in model_noise:
                specs["propose_next"] = _widened(model_noise["next"], h, n * self.policy_samples)
        return specs

    @torch.no_grad()
    def plan(
        self,
        model: Any,
        latent: Latent,  # (N, …)
        memory: torch.Tensor,  # (N, H, W)
        is_first: torch.Tensor,  # (N,) bool
        noise: Noise,
        *,
        discount: torch.Tensor | float,  # scalar or (N,)
        explore: torch.Tensor | float = 1.0,
        mask: torch.Tensor | None = None,  # (N, A): action inputs that each environment has
        min_std: torch.Tensor | float | None = None,
        horizon: torch.Tensor | None = None,  # 0-d int64 ≤ self.horizon: a shorter horizon
    ) -> Plan:
        n = len(is_first)
        floor = self.min_std if min_std is None else min_std
        if not isinstance(discount, torch.Tensor):
            discount = torch.full((n,), discount, device=memory.device)
        weights = discount_weights(discount.expand(n), self.horizon)
        weight = repeat(weights, self.samples)  # (R, H + 1), R = N · S
        has_returns = horizon is None and hasattr(model, "returns")
        start = latent if has_returns else repeat(latent, self.samples)
        proposals = self._propose(model, latent, n, noise) if self.policy_samples else None
        parameters = self.search.start(memory, is_first)
        for i in range(self.iterations):
            actions = self.search.sample(parameters, noise["samples"][i])  # (N, S − P, H, A)
            if mask is not None:
                actions = actions * mask[:, None, None]
            if proposals is not None:
                actions = torch.cat([proposals, actions], 1)
            value_noise = noise["value"][i] if "value" in noise else None
            if has_returns:
                values = model.returns(start, actions.flatten(0, 1), weight, value_noise)
            else:
                values = trajectory_values(
                    model,
                    start,
                    actions.flatten(0, 1),
                    weight=weight,
                    next_noise=noise["next"][i] if "next" in noise else None,
                    value_noise=value_noise,
                    horizon=horizon,
                )
            best, index = topk(values.view(n, self.samples), self.elites, fast=self.fast)
            chosen = index[..., None, None].expand(-1, -1, *actions.shape[2:])
            elites = actions.gather(1, chosen)  # (N, E, H, A)
            score = elite_weights(best, self.temperature)
            parameters = self.search.refit(parameters, elites, score, floor)
        first = self._first(parameters, elites, score, noise["select"])
        action = self.search.choose(parameters, first, noise["choice"], explore)
        action = action if mask is None else action * mask
        return Plan(action, parameters[0], best.amax(1), parameters[-1].mean((1, 2)))

    def _first(
        self,
        parameters: tuple[torch.Tensor, ...],
        elites: torch.Tensor,
        score: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        """First action (N, A): of a sampled elite for MPPI, else of the fitted mean."""
        if self.method != "mppi":
            return parameters[0][:, 0]
        index = sample_index(score, noise)  # (N,)
        return elites[:, :, 0].gather(1, index.view(-1, 1, 1).expand(-1, 1, elites.shape[-1])).squeeze(1)

    def _propose(self, model: Any, latent: Latent, n: int, noise: Noise) -> torch.Tensor:
        """Action sequences of the policy, (N, P, H, A)."""
        state = repeat(latent, self.policy_samples)
        actions = []
        for t in range(self.horizon):
            action = model.policy(state, noise["propose"][t] if "propose" in noise else None)
            actions.append(action.float())
            if t + 1 < self.horizon:
                step_noise = noise["propose_next"][t] if "propose_next" in noise else None
                state = model.next(state, _model_input(model, action), step_noise)
        return torch.stack(actions, 1).unflatten(0, (n, self.policy_samples))


@compiled_pointwise
def elite_weights(values: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights of MPPI: values (N, E) -> softmax(temperature · value); equal weights for temperature 0."""
    return torch.softmax(temperature * values, 1)


def discount_weights(discount: torch.Tensor, horizon: int) -> torch.Tensor:
    """1, γ, …, γᴴ for each environment: (N,) -> (N, H + 1)."""
    return discount.unsqueeze(1) ** torch.arange(horizon + 1, device=discount.device)


@compiled_pointwise
def discounted(
    rewards: torch.Tensor,  # (R, H)
    weight: torch.Tensor,  # (R, H)
    value: torch.Tensor,  # (R,)
    last: torch.Tensor,  # (R,)
) -> torch.Tensor:
    """Σ weight · reward + last · value, (R,); NaN becomes `WORST`."""
    total = (weight * rewards.float()).sum(1) + last * value.float()
    return total.nan_to_num(nan=WORST, neginf=WORST)


def trajectory_values(
    model: Any,
    latent: Latent,  # (R, …)
    actions: torch.Tensor,  # (R, H, A)
    *,
    weight: torch.Tensor,  # (R, H + 1) discounts
    next_noise: torch.Tensor | None = None,  # (H, R, …)
    value_noise: torch.Tensor | None = None,  # (R, …)
    horizon: torch.Tensor | None = None,
) -> torch.Tensor:
    """Σ γᵗ alive_t reward_t + γᴴ alive_H value(latent_H), (R,); `horizon` replaces H if given."""
    steps = actions.shape[1]
    inputs = _model_input(model, actions)
    terminates = hasattr(model, "alive")
    latents = [latent]
    for t in range(steps):
        latents.append(model.next(latents[-1], inputs[:, t], None if next_noise is None else next_noise[t]))
    # The rollout does not depend on rewards, so one call computes those of all steps.
    following = stack(latents[1:]) if terminates or getattr(model, "rewards_on_arrival", True) else None
    rewards = model.reward(stack(latents[:-1]), inputs, following)  # (R, H)
    if terminates:
        alive = model.alive(following).float().cumprod(1)  # (R, H)
        weight = torch.cat([weight[:, :1], weight[:, 1:] * alive], 1)
    if horizon is None:
        last, end = weight[:, -1], latents[-1]
    else:
        last, end = weight.index_select(1, horizon.view(1)).squeeze(1), pick(stack(latents), horizon)
        rewards = rewards * (torch.arange(steps, device=actions.device) < horizon)
    return discounted(rewards, weight[:, :-1], model.value(end, value_noise), last)


# --- Latents: a tensor, or a dict of tensors ---


def repeat(latent: Latent, count: int) -> Latent:
    """Repeat each row `count` times: (N, …) -> (N · count, …)."""
    if isinstance(latent, Mapping):
        return {key: repeat(value, count) for key, value in latent.items()}
    return latent.unsqueeze(1).expand(-1, count, *latent.shape[1:]).flatten(0, 1)


def stack(latents: list[Latent]) -> Latent:
    """T latents (R, …) -> (R, T, …)."""
    if isinstance(latents[0], Mapping):
        return {key: torch.stack([latent[key] for latent in latents], 1) for key in latents[0]}
    return torch.stack(latents, 1)


def pick(latents: Latent, index: torch.Tensor) -> Latent:
    """(R, T, …) and a 0-d index -> (R, …)."""
    if isinstance(latents, Mapping):
        return {key: pick(value, index) for key, value in latents.items()}
    return latents.index_select(1, index.view(1)).squeeze(1)


def _model_input(model: Any, action: torch.Tensor) -> torch.Tensor:
    """Actions in the dtype and width that the model takes."""
    dtype = getattr(model, "dtype", None) or action.dtype
    return cast_wide(action, dtype, getattr(model, "action_width", None) or action.shape[-1])


def _widened(spec: NoiseSpec, *batch: int) -> NoiseSpec:
    return NoiseSpec((*batch, *spec.shape), spec.kind)
