"""Policy priors and the critic of TD-MPC.

Actions are network inputs (…, A): values in [-1, 1], or concatenated one-hot vectors. `mask` (…, A) marks the
action dimensions that a task has, if several tasks share one model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.categorical import straight_through, unimix_probs
from rl_lab.components.nn.fast_path import compiled_pointwise
from rl_lab.components.nn.moving_averages import SlowCopy
from rl_lab.components.nn.normed_mlp import EnsembleMLP, NormedMLP, Weights
from rl_lab.components.nn.two_hot import make_regression
from rl_lab.errors import ConfigError
from rl_lab.records import NoiseSpec, Spec

HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
Mask = torch.Tensor | None


@compiled_pointwise
def squash(raw: torch.Tensor, noise: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """(…, 2A) mean and raw log std, (…, A) standard normal -> tanh(mean + std · noise), float32."""
    mean, log_std = raw.float().chunk(2, -1)
    log_std = low + 0.5 * (high - low) * (torch.tanh(log_std) + 1.0)
    return torch.tanh(mean + noise * log_std.exp())


def scaled_entropy(
    raw: torch.Tensor, noise: torch.Tensor, mask: Mask, low: float, high: float
) -> torch.Tensor:
    """−(d · Σ log N(noise) − Σ log(1 − action²)) over the d unmasked action dimensions: (…, 2A) -> (…)."""
    mean, log_std = raw.float().chunk(2, -1)
    log_std = low + 0.5 * (high - low) * (torch.tanh(log_std) + 1.0)
    action = torch.tanh(mean + noise * log_std.exp())
    gauss = -0.5 * noise.square() - log_std - HALF_LOG_TWO_PI
    # The epsilon keeps the logarithm finite for actions near ±1.
    correction = torch.log(1.0 - action.square() + 1e-6)
    if mask is None:
        return correction.sum(-1) - noise.shape[-1] * gauss.sum(-1)
    return (correction * mask).sum(-1) - mask.sum(-1) * (gauss * mask).sum(-1)


class PolicyPrior(nn.Module):
    """Base class of the policies that propose actions to the planner and that the critic evaluates.

    noise: NoiseSpec of one sampled action
    """

    discrete = False  # whether it is for discrete actions
    options: int | None = None  # number of actions, if there is a single categorical variable
    deviations = (
        False  # whether the network outputs a standard deviation per action dimension, after the means
    )

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
    ) -> None:
        action = spec.action
        if (action.kind != "continuous") != self.discrete:
            other = "tdmpc_policy" if self.discrete else "tdmpc_categorical_policy"
            raise ConfigError(
                f"{type(self).__name__} needs {'discrete' if self.discrete else 'continuous'} actions, but "
                f"{spec.name} has {action.kind} ones: use controllers.policy={other}"
            )
        super().__init__()
        inputs = [latent, context] if context else [latent]
        outputs = action.size * (2 if self.deviations else 1)
        self.mlp = NormedMLP(inputs, units, outputs, hidden=hidden, init=init)
        # One random value for each categorical variable, or for each continuous dimension.
        self.noise = (
            NoiseSpec((len(action.choices),), "uniform")
            if self.discrete
            else NoiseSpec((action.size,), "normal")
        )

    def forward(self, latent: torch.Tensor, *task: torch.Tensor) -> torch.Tensor:
        """latent: (…, L), task: (…, context) if `context` > 0 -> raw outputs (…, width)."""
        return self.mlp(latent, *task)

    def sample(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> torch.Tensor:
        """-> actions (…, A)."""
        raise NotImplementedError

    def explore(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> actions (…, A) with gradients, and the entropy of the bonus (…)."""
        raise NotImplementedError


class GaussianPrior(PolicyPrior):
    """tanh of a normal with learned standard deviation (TD-MPC2).

    The entropy is that of the published runs: the log density before the tanh is multiplied by the number d
    of action dimensions, the correction for the tanh is not. The usual entropy has d = 1; the factor keeps
    the bonus effective in large action spaces.
    """

    deviations = True

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
        log_std_min: float = -10.0,
        log_std_max: float = 2.0,
    ) -> None:
        super().__init__(spec=spec, latent=latent, units=units, context=context, hidden=hidden, init=init)
        self.limits = (log_std_min, log_std_max)

    def sample(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> torch.Tensor:
        action = squash(self.mlp(latent, *task), noise, *self.limits)
        return action if mask is None else action * mask

    def explore(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raw = self.mlp(latent, *task)
        action = squash(raw, noise, *self.limits)
        entropy = scaled_entropy(raw, noise, mask, *self.limits)
        return action if mask is None else action * mask, entropy


class DeterministicPrior(PolicyPrior):
    """tanh(mean) plus noise clipped to ±`noise_limit` (the first TD-MPC). Its entropy is 0."""

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        context: int = 0,
        hidden: Sequence[str] = ("elu", "elu"),
        init: str = "orthogonal",
        std: float = 0.05,
        noise_limit: float = 0.3,
    ) -> None:
        super().__init__(spec=spec, latent=latent, units=units, context=context, hidden=hidden, init=init)
        self.std = std
        self.noise_limit = noise_limit

    def sample(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> torch.Tensor:
        mean = torch.tanh(self.mlp(latent, *task).float())
        noisy = mean + (noise * self.std).clamp(-self.noise_limit, self.noise_limit)
        # Clipping passes the gradient through, so that the mean is trained even where the action is clipped.
        action = noisy - noisy.detach() + noisy.detach().clamp(-1.0, 1.0)
        return action if mask is None else action * mask

    def explore(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        action = self.sample(latent, noise, *task, mask=mask)
        return action, torch.zeros_like(action[..., 0])


class CategoricalPrior(PolicyPrior):
    """One or several categorical variables, concatenated one-hot vectors with straight-through gradients."""

    discrete = True

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
        unimix: float = 0.01,
    ) -> None:
        super().__init__(spec=spec, latent=latent, units=units, context=context, hidden=hidden, init=init)
        self.choices = spec.action.choices
        self.options = self.choices[0] if len(self.choices) == 1 else None
        self.unimix = unimix

    def probabilities(self, latent: torch.Tensor, *task: torch.Tensor) -> list[torch.Tensor]:
        """Probabilities of each variable, (…, options)."""
        return [unimix_probs(part, self.unimix) for part in self.mlp(latent, *task).split(self.choices, -1)]

    def sample(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> torch.Tensor:
        parts = zip(self.probabilities(latent, *task), noise.unbind(-1))
        return torch.cat([straight_through(probs, u) for probs, u in parts], -1)

    def explore(
        self, latent: torch.Tensor, noise: torch.Tensor, *task: torch.Tensor, mask: Mask = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        probabilities = self.probabilities(latent, *task)
        action = torch.cat([straight_through(p, u) for p, u in zip(probabilities, noise.unbind(-1))], -1)
        return action, torch.stack([-(p * p.log()).sum(-1) for p in probabilities]).sum(0)


# --- Critic ---

REDUCTIONS = ("mean", "min")
PAIR = 2  # members used for a value, sampled for each use (nicklashansen/tdmpc2 world_model.py)


def choose_pair(noise: torch.Tensor) -> torch.Tensor:
    """A uniformly random pair of different members: noise (members,) uniform -> (2,) int64."""
    return torch.topk(noise, PAIR, sorted=False).indices


class QEnsembleController(nn.Module):
    """Ensemble of Q functions, two-hot in symlog space (bins 0: squared error), with a target network.

    reduce:   how the values of two members are combined for policy and planner; targets use the minimum
    dropout:  of the first layer, in training only; its noise is an argument
    context:  width of the task embedding that is concatenated to the action
    """

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        members: int = 5,
        bins: int = 101,
        limit: float = 10.0,
        dropout: float = 0.01,
        reduce: str = "mean",
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
    ) -> None:
        super().__init__()
        if members < PAIR:
            raise ConfigError(
                f"critic members={members} must be at least {PAIR}, because a value is computed from {PAIR} members"
            )
        if reduce not in REDUCTIONS:
            raise ConfigError(f"critic reduce is '{reduce}': set it to {' or '.join(REDUCTIONS)}")
        self.members = members
        self.dropout = dropout
        self.reduce = reduce
        self.regression = make_regression(bins, limit)
        inputs = [latent, spec.action.size + context]
        self.online = EnsembleMLP(members, inputs, units, self.regression.width, hidden=hidden, init=init)
        self.slow = SlowCopy(self.online)

    def forward(
        self, latent: torch.Tensor, control: torch.Tensor, dropout: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Latent (…, L), control (…, A + context), dropout noise (E, rows, units) -> logits (E, …, bins)."""
        return self.online(latent, control, dropout=dropout, rate=self.dropout)

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits (E, …, bins), target (…) -> (E, …)."""
        return self.regression.loss(logits, target)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (…, bins) -> value (…)."""
        return self.regression.mean(logits)

    def value(self, latent: torch.Tensor, control: torch.Tensor, weights: Weights) -> torch.Tensor:
        """The value (…) that policy and planner maximise, from two members (`online.select`)."""
        values = self.regression.mean(self.online(latent, control, weights=weights))
        return self.combine(values)

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """(2, …) -> (…)."""
        return values.mean(0) if self.reduce == "mean" else values.amin(0)

    @torch.no_grad()
    def target(self, latent: torch.Tensor, control: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        """Minimum of two target-network members (…), without dropout."""
        slow: Any = self.slow.network
        logits = slow(latent, control, weights=slow.select(pair))
        return self.regression.mean(logits).amin(0)

    def update_slow(self, rate: float) -> None:
        self.slow.update(self.online, rate)
