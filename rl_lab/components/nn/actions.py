"""Action distributions of policy networks, and the encoding of actions as network inputs.

A distribution has `width` (number of raw outputs) and `noise_kind`, `noise_shape` (the random values of one
sample). It maps raw outputs (…, width) to stored actions. Log probabilities and entropies are float32 (…),
summed over an action's parts.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.kernels.sampling import bounded_normal, limit_action, sample_normal
from rl_lab.components.nn.categorical import sample_index, straight_through, unimix_probs
from rl_lab.errors import require_choice
from rl_lab.records import ActionSpec


class CategoricalPolicy(nn.Module):
    """One or several independent categorical variables. `unimix` is the weight of the uniform distribution.

    DreamerV3's published code sets unimix 0.01 here, but the current version ignores it (danijar/dreamerv3 @
    e3f0224); the versions of 2023 and 2024 did not.
    """

    noise_kind: Literal["uniform", "normal"] = "uniform"

    def __init__(self, action: ActionSpec, *, unimix: float = 0.0) -> None:
        super().__init__()
        self.choices = action.choices
        self.single = action.kind == "discrete"  # stored as (…), not (…, 1)
        self.unimix = unimix
        self.width = sum(action.choices)
        self.noise_shape = (len(action.choices),)

    def _log_probs(self, raw: torch.Tensor) -> list[torch.Tensor]:
        parts = [raw] if self.single else raw.split(self.choices, -1)
        if self.unimix == 0.0:
            return [torch.log_softmax(part.float(), -1) for part in parts]
        return [unimix_probs(part, self.unimix).log() for part in parts]

    def _join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return parts[0] if self.single else torch.stack(parts, -1)

    def sample(self, raw: torch.Tensor, noise: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """noise: (…, k) uniform -> (…) or (…, k) int64."""
        raw = raw if temperature == 1.0 else raw / temperature
        parts = [raw] if self.single else raw.split(self.choices, -1)
        draws = zip(parts, noise.unbind(-1))
        return self._join([sample_index(unimix_probs(part, self.unimix), u) for part, u in draws])

    def sample_one_hot(self, raw: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """As `sample`, as one-hot vectors (…, width) with the gradient of the probabilities."""
        parts = [raw] if self.single else raw.split(self.choices, -1)
        draws = zip(parts, noise.unbind(-1))
        return torch.cat([straight_through(unimix_probs(part, self.unimix), u) for part, u in draws], -1)

    def log_prob_of_one_hot(self, raw: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Log probability (…) of one-hot vectors (…, width), which may have a gradient."""
        parts = zip(self._log_probs(raw), action.split(self.choices, -1))
        return torch.stack([(log_p * part).sum(-1) for log_p, part in parts]).sum(0)

    def mode(self, raw: torch.Tensor) -> torch.Tensor:
        return self._join([log_p.argmax(-1) for log_p in self._log_probs(raw)])

    def log_prob_and_entropy(
        self, raw: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probability of the action and entropy of the policy, each (…)."""
        log_probs = self._log_probs(raw)
        chosen = [action] if self.single else action.unbind(-1)
        picked = [lp.gather(-1, index.unsqueeze(-1)).squeeze(-1) for lp, index in zip(log_probs, chosen)]
        entropies = [-(lp.exp() * lp).sum(-1) for lp in log_probs]
        if self.single:
            return picked[0], entropies[0]
        return torch.stack(picked).sum(0), torch.stack(entropies).sum(0)

    def random(self, noise: torch.Tensor) -> torch.Tensor:
        """A uniformly random action from uniform noise (…, k)."""
        # One variable at a time: no tensor is copied from the host, so a CUDA graph can capture it. Clamped,
        # because noise × count may round up to count.
        draws = zip(noise.unbind(-1), self.choices)
        return self._join([(u * count).long().clamp(max=count - 1) for u, count in draws])


class NormalPolicy(nn.Module):
    """Independent normals with mean tanh(raw) and bounded standard deviation; samples are not squashed.

    The environment clips them to [-1, 1]. DreamerV3 (danijar/dreamerv3 heads.py, `bounded_normal`).
    """

    fast = False  # samples in one kernel; see fast_path.py
    noise_kind: Literal["uniform", "normal"] = "normal"

    def __init__(self, action: ActionSpec, *, min_std: float = 0.1, max_std: float = 1.0) -> None:
        super().__init__()
        self.width = 2 * action.size
        self.noise_shape = (action.size,)
        self.min_std = min_std
        self.max_std = max_std

    def _mean_std(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return bounded_normal(raw, self.min_std, self.max_std)

    def sample(self, raw: torch.Tensor, noise: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """noise: (…, d) standard normal -> (…, d) float32."""
        return sample_normal(raw, noise, self.min_std, self.max_std, temperature, fast=self.fast)

    def mode(self, raw: torch.Tensor) -> torch.Tensor:
        return self._mean_std(raw)[0]

    def log_prob_and_entropy(
        self, raw: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log density of the action and entropy of the policy, each (…)."""
        mean, std = self._mean_std(raw)
        log_std = std.log()
        log_prob = -0.5 * ((action - mean) / std).square() - log_std - 0.5 * math.log(2 * math.pi)
        entropy = log_std + 0.5 * (1.0 + math.log(2 * math.pi))
        return log_prob.sum(-1), entropy.sum(-1)

    def random(self, noise: torch.Tensor) -> torch.Tensor:
        """A uniformly random action in [-1, 1] from uniform noise (…, d)."""
        return noise * 2.0 - 1.0


class TanhNormalPolicy(nn.Module):
    """tanh of independent normals with mean s·tanh(m / s) (DreamerV1: danijar/dreamer models.py, `ActionDecoder`).

    init_std: standard deviation before the tanh for a raw output of 0
    """

    noise_kind: Literal["uniform", "normal"] = "normal"
    nodes: torch.Tensor
    weights: torch.Tensor
    quantiles: torch.Tensor

    def __init__(
        self, action: ActionSpec, *, min_std: float = 1e-4, init_std: float = 5.0, mean_scale: float = 5.0
    ) -> None:
        super().__init__()
        self.width = 2 * action.size
        self.noise_shape = (action.size,)
        self.min_std, self.mean_scale = min_std, mean_scale
        self.shift = init_std + math.log(-math.expm1(-init_std)) if init_std > 0.0 else 0.0  # softplus⁻¹
        nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.float32), persistent=False)
        weights = weights / math.sqrt(2.0 * math.pi)
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32), persistent=False)
        places = (torch.arange(QUANTILES, dtype=torch.float64) + 0.5) / QUANTILES
        self.register_buffer("quantiles", torch.special.ndtri(places).float(), persistent=False)

    def _mean_std(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = raw.float().chunk(2, -1)
        mean = self.mean_scale * torch.tanh(mean / self.mean_scale)
        return mean, F.softplus(spread + self.shift) + self.min_std

    def sample(self, raw: torch.Tensor, noise: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """noise: (…, d) standard normal -> (…, d) float32, with gradients of mean and deviation."""
        mean, std = self._mean_std(raw)
        return torch.tanh(mean + std * temperature * noise)

    def mode(self, raw: torch.Tensor) -> torch.Tensor:
        """The most probable of 99 quantiles of each part (the original: of 100 samples)."""
        mean, std = self._mean_std(raw)
        inner = mean.unsqueeze(-1) + std.unsqueeze(-1) * self.quantiles
        density = -0.5 * self.quantiles.square() - log_tanh_slope(inner)
        best = inner.gather(-1, density.argmax(-1, keepdim=True)).squeeze(-1)
        return torch.tanh(best)

    def log_prob_and_entropy(
        self, raw: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log density of the action and entropy of the policy (by Gauss-Hermite quadrature), each (…)."""
        mean, std = self._mean_std(raw)
        inner = torch.atanh(action.float().clamp(-ALMOST_ONE, ALMOST_ONE))
        log_prob = normal_log_prob(inner, mean, std) - log_tanh_slope(inner)
        slopes = log_tanh_slope(mean.unsqueeze(-1) + std.unsqueeze(-1) * self.nodes)
        entropy = std.log() + 0.5 * (1.0 + LOG_2_PI) + (slopes * self.weights).sum(-1)
        return log_prob.sum(-1), entropy.sum(-1)

    def random(self, noise: torch.Tensor) -> torch.Tensor:
        """A uniformly random action in [-1, 1] from uniform noise (…, d)."""
        return noise * 2.0 - 1.0


QUADRATURE = 32  # nodes
QUANTILES = 99
LOG_2_PI = math.log(2.0 * math.pi)
ALMOST_ONE = 0.999999  # tanh⁻¹ of float32's largest number below 1 is 8.7


def normal_log_prob(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    return -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * LOG_2_PI


def log_tanh_slope(x: torch.Tensor) -> torch.Tensor:
    """log(1 - tanh²(x)), also for large x."""
    return 2.0 * (math.log(2.0) - x - F.softplus(-2.0 * x))


class TruncatedNormalPolicy(nn.Module):
    """Independent normals with mean tanh(m), truncated to [-1, 1] (DreamerV2: common/nets.py, `trunc_normal`).

    The standard deviation before the truncation is 2 sigmoid((s + init_std) / 2) + min_std.
    """

    noise_kind: Literal["uniform", "normal"] = "uniform"

    def __init__(self, action: ActionSpec, *, min_std: float = 0.1, init_std: float = 0.0) -> None:
        super().__init__()
        self.width = 2 * action.size
        self.noise_shape = (action.size,)
        self.min_std, self.init_std = min_std, init_std

    def _mean_std(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = raw.float().chunk(2, -1)
        return torch.tanh(mean), 2.0 * torch.sigmoid((spread + self.init_std) / 2.0) + self.min_std

    def sample(self, raw: torch.Tensor, noise: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """noise: (…, d) uniform -> (…, d) float32, by the inverse of the cumulative distribution."""
        mean, std = self._mean_std(raw)
        std = std * temperature
        low, high = torch.special.ndtr((-1.0 - mean) / std), torch.special.ndtr((1.0 - mean) / std)
        place = (low + noise * (high - low)).clamp(LEAST, 1.0 - LEAST)
        sample = mean + std * torch.special.ndtri(place)
        # Rounding may leave the interval: the gradient passes, as in the original.
        limited = sample.detach().clamp(-ALMOST_ONE, ALMOST_ONE)
        return sample + (limited - sample.detach())

    def mode(self, raw: torch.Tensor) -> torch.Tensor:
        return self._mean_std(raw)[0]

    def log_prob_and_entropy(
        self, raw: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log density of the action and entropy of the policy, each (…)."""
        mean, std = self._mean_std(raw)
        low, high = (-1.0 - mean) / std, (1.0 - mean) / std
        mass = torch.special.ndtr(high) - torch.special.ndtr(low)
        log_prob = normal_log_prob(action, mean, std) - mass.log()
        density_low, density_high = (torch.exp(-0.5 * x.square() - 0.5 * LOG_2_PI) for x in (low, high))
        entropy = std.log() + mass.log() + 0.5 * (1.0 + LOG_2_PI)
        entropy = entropy + (low * density_low - high * density_high) / (2.0 * mass)
        return log_prob.sum(-1), entropy.sum(-1)

    def random(self, noise: torch.Tensor) -> torch.Tensor:
        """A uniformly random action in [-1, 1] from uniform noise (…, d)."""
        return noise * 2.0 - 1.0


LEAST = 1e-7
Policy = CategoricalPolicy | NormalPolicy | TanhNormalPolicy | TruncatedNormalPolicy
DISTRIBUTIONS = ("bounded_normal", "tanh_normal", "truncated_normal")


def make_policy(
    action: ActionSpec,
    *,
    unimix: float = 0.0,
    distribution: str = "bounded_normal",
    min_std: float | None = None,
    max_std: float = 1.0,
    init_std: float | None = None,
) -> Policy:
    """The distribution for an action space. None: the default of the distribution."""
    require_choice("controllers.actor.distribution", distribution, DISTRIBUTIONS)
    if action.kind != "continuous":
        return CategoricalPolicy(action, unimix=unimix)
    limits = {} if min_std is None else {"min_std": min_std}
    if distribution == "bounded_normal":
        return NormalPolicy(action, max_std=max_std, **limits)
    if init_std is not None:
        limits["init_std"] = init_std
    if distribution == "tanh_normal":
        return TanhNormalPolicy(action, **limits)
    return TruncatedNormalPolicy(action, **limits)


# --- Actions as network inputs ---


class ActionEncoder(nn.Module):
    """Concatenated one-hot vectors of discrete actions; continuous actions limited to [-1, 1]."""

    fast = False  # limits in one kernel; see fast_path.py
    variable: torch.Tensor
    choice: torch.Tensor

    def __init__(self, action: ActionSpec) -> None:
        super().__init__()
        self.kind = action.kind
        self.out_features = action.size
        # Output i of a discrete encoding is 1 if variable[i] of the action equals choice[i].
        pairs = [(v, c) for v, count in enumerate(action.choices) for c in range(count)]
        self.register_buffer(
            "variable", torch.tensor([v for v, _ in pairs], dtype=torch.int64), persistent=False
        )
        self.register_buffer(
            "choice", torch.tensor([c for _, c in pairs], dtype=torch.int64), persistent=False
        )

    def forward(self, action: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """action: (…), (…, k) integers or (…, d) floats, as stored -> (…, size) of `dtype`."""
        if self.kind == "continuous":
            return limit_action(action, dtype, fast=self.fast)
        if self.kind == "discrete":
            return (action.unsqueeze(-1) == self.choice).to(dtype)
        return (action[..., self.variable] == self.choice).to(dtype)


def stored_action(action: torch.Tensor, spec: ActionSpec) -> torch.Tensor:
    """Inverse of `ActionEncoder`: (…, A) -> (…, d) floats, (…, k) or (…) integers."""
    if spec.kind == "continuous":
        return action
    chosen = [part.argmax(-1) for part in action.split(spec.choices, -1)]
    return chosen[0] if spec.kind == "discrete" else torch.stack(chosen, -1)
