"""TD-MPC's critic: an ensemble of action values with a slow copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.ensemble import EnsembleMLP, Weights
from rl_lab.components.nn.slow_copy import SlowCopy
from rl_lab.components.nn.symlog_two_hot import make_regression
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

REDUCTIONS = ("mean", "min")
PAIR = 2  # members that a value is taken from, drawn anew for each use (nicklashansen/tdmpc2 world_model.py)


def choose_pair(noise: torch.Tensor) -> torch.Tensor:
    """Two different members, every pair equally likely: noise (members,) uniform -> (2,) int64."""
    return torch.topk(noise, PAIR, sorted=False).indices


class QEnsembleController(nn.Module):
    """`members` values of (latent, action), regressed two-hot in symlog space (bins 0: squared error).

    reduce:   how the two drawn members become one value where a policy or a planner asks; targets take the least
    dropout:  on the first layer, in training only; its random numbers are an argument
    context:  width of what stands beside the action (a task's embedding)
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
            raise ConfigError(f"a value is taken from {PAIR} members, so there must be at least as many")
        if reduce not in REDUCTIONS:
            raise ConfigError(f"reduce is '{reduce}'; it can be {' or '.join(REDUCTIONS)}")
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
        """Latent (…, L), control (…, A + context), dropout (E, rows, units) uniform -> logits (E, …, bins)."""
        return self.online(latent, control, dropout=dropout, rate=self.dropout)

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits (E, …, bins), target (…) -> (E, …)."""
        return self.regression.loss(logits, target)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (…, bins) -> value (…)."""
        return self.regression.mean(logits)

    def value(self, latent: torch.Tensor, control: torch.Tensor, weights: Weights) -> torch.Tensor:
        """What a policy or planner maximises: (…), from two members' weights (`online.select`)."""
        values = self.regression.mean(self.online(latent, control, weights=weights))
        return self.combine(values)

    def combine(self, values: torch.Tensor) -> torch.Tensor:
        """(2, …) -> (…)."""
        return values.mean(0) if self.reduce == "mean" else values.amin(0)

    @torch.no_grad()
    def target(self, latent: torch.Tensor, control: torch.Tensor, pair: torch.Tensor) -> torch.Tensor:
        """The lesser of two slow members' values, without dropout: (…)."""
        slow: Any = self.slow.network
        logits = slow(latent, control, weights=slow.select(pair))
        return self.regression.mean(logits).amin(0)

    def update_slow(self, rate: float) -> None:
        self.slow.update(self.online, rate)
