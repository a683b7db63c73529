"""Disagreement of an ensemble of one-step predictions, as an intrinsic reward (Plan2Explore, Sekar et al. 2020)."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.components.nn.normed_mlp import EnsembleMLP
from rl_lab.errors import ConfigError
from rl_lab.records import Spec
from rl_lab.utils.ranks import count_over_ranks


class LatentDisagreement(nn.Module):
    """Members predict the next stochastic state from the present feature and the action.

    What every member has learned has no disagreement, also if it is random: each predicts its mean. As in
    danijar/dreamerv2 expl.py and danijar/dreamerv3 @ 8fa35f8 expl.py (`Disag`).

    features: width of the feature; target: width of the flat stochastic state
    """

    def __init__(
        self, *, spec: Spec, features: int, target: int, units: int, layers: int = 2, members: int = 8
    ) -> None:
        super().__init__()
        if members < 2:
            raise ConfigError(f"algorithm.explore.members is {members}: a disagreement needs at least 2")
        self.ensemble = EnsembleMLP(
            members,
            [features, spec.action.size],
            units,
            target,
            hidden=["norm+elu"] * layers,
            init="orthogonal",
            zero=False,
        )

    def forward(self, feature: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """feature: (…, F), action: (…, A) encoded -> predictions (members, …, target)."""
        return self.ensemble(feature, action)

    def reward(self, feature: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """Standard deviation over the members, mean over the target: (…)."""
        predictions = self(feature, action).float()
        return predictions.std(0, unbiased=False).mean(-1)

    def loss(
        self, feature: torch.Tensor, action: torch.Tensor, target: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Squared error, summed over members and target, mean over the rows where mask (…) is True: 0-d."""
        error = (self(feature, action).float() - target).square().sum(-1).sum(0)
        return (error * mask).sum() / count_over_ranks(mask.sum().to(error.dtype))
