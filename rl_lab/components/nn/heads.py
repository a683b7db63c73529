"""Prediction heads on latent states: rewards and values by regression, and whether the episode continues."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from rl_lab.components.nn.mlp import MLP, layer_style
from rl_lab.components.nn.normed_mlp import NormedMLP
from rl_lab.components.nn.two_hot import SquaredError, TwoHot, make_regression
from rl_lab.errors import require_choice
from rl_lab.records import Spec


class TwoHotHead(nn.Module):
    """MLP with a two-hot distribution over scalars as output: reward or value.

    The output layer starts at zero by default, so that the initial predictions are exactly 0.

    bins: of the two-hot code; 0: one output with squared error (v1, v2)
    layer, init, bias: see LayerStyle
    """

    def __init__(
        self,
        *,
        features: int,
        units: int,
        layers: int,
        bins: int = 255,
        limit: float = 20.0,
        space: str = "numbers",
        out_scale: float = 0.0,
        layer: str = "rms+silu",
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        style = layer_style(layer, init, bias)
        outputs = bins or 1
        self.mlp = MLP(
            features, units, layers, outputs=outputs, out_scale=out_scale, float_out=True, style=style
        )
        self.two_hot: TwoHot | SquaredError = (
            TwoHot(bins, limit=limit, space=space) if bins else SquaredError()
        )

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> logits (…, bins)."""
        return self.mlp(feature)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        return self.two_hot.mean(logits)

    def predict(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> expected value (…)."""
        return self.two_hot.mean(self.mlp(feature))

    def loss(
        self, logits: torch.Tensor, target: torch.Tensor, second: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (…, bins), target (…) -> cross entropy (…), plus that to a second target (…)."""
        return self.two_hot.loss(logits, target, second)


ESTIMATES = ("mean", "mode")


class ContinueHead(nn.Module):
    """MLP that predicts the probability that the episode continues, times the discount if trained on it.

    estimate: mean: the probability; mode (2023): 1 if it is above 1/2, else 0
    layer, init, bias: see LayerStyle
    """

    def __init__(
        self,
        *,
        features: int,
        units: int,
        layers: int,
        out_scale: float = 1.0,
        estimate: str = "mean",
        layer: str = "rms+silu",
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        require_choice("components.continue_head.estimate", estimate, ESTIMATES)
        self.estimate = estimate
        style = layer_style(layer, init, bias)
        self.mlp = MLP(features, units, layers, outputs=1, out_scale=out_scale, float_out=True, style=style)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> logit (…)."""
        return self.mlp(feature).squeeze(-1)

    def predict(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> probability (…)."""
        logit = self(feature)
        return torch.sigmoid(logit) if self.estimate == "mean" else (logit > 0.0).float()

    def loss(self, logit: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logit (…), target (…) in [0, 1] -> binary cross entropy (…)."""
        return F.binary_cross_entropy_with_logits(logit, target, reduction="none")


class ConstantContinue(nn.Module):
    """A continue head that is not trained: every episode goes on (DeepMind Control in DreamerV1 and V2)."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> (…)."""
        return torch.ones(feature.shape[:-1], device=feature.device)

    def predict(self, feature: torch.Tensor) -> torch.Tensor:
        return self(feature)

    def loss(self, ones: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Zeros (…)."""
        return torch.zeros_like(ones)


# --- Heads of TD-MPC ---


class LatentRewardHead(nn.Module):
    """Reward of an action in a latent state. The last layer, and so the initial prediction, is zero.

    bins:     two-hot bins; 0 regresses the reward directly
    context:  width of the task embedding that is concatenated to the action
    """

    def __init__(
        self,
        *,
        spec: Spec,
        latent: int,
        units: int,
        bins: int = 101,
        limit: float = 10.0,
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
    ) -> None:
        super().__init__()
        self.regression = make_regression(bins, limit)
        inputs = [latent, spec.action.size + context]
        self.mlp = NormedMLP(inputs, units, self.regression.width, hidden=hidden, init=init, zero=True)

    def forward(self, latent: torch.Tensor, control: torch.Tensor) -> torch.Tensor:
        """latent: (…, L), control: (…, A + context) -> logits (…, bins)."""
        return self.mlp(latent, control)

    def predict(self, latent: torch.Tensor, control: torch.Tensor) -> torch.Tensor:
        """-> reward (…)."""
        return self.regression.mean(self.mlp(latent, control))

    def loss(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logits (…, bins), target (…) -> (…)."""
        return self.regression.loss(logits, target)


class TerminationHead(nn.Module):
    """Probability that the episode terminates in a latent state; only for tasks that terminate."""

    def __init__(
        self,
        *,
        latent: int,
        units: int,
        context: int = 0,
        hidden: Sequence[str] = ("norm+mish", "norm+mish"),
        init: str = "normal",
    ) -> None:
        super().__init__()
        self.mlp = NormedMLP([latent, context] if context else [latent], units, 1, hidden=hidden, init=init)

    def forward(self, latent: torch.Tensor, *task: torch.Tensor) -> torch.Tensor:
        """latent: (…, L), task: (…, context) if `context` > 0 -> logit (…)."""
        return self.mlp(latent, *task).squeeze(-1).float()

    def predict(self, latent: torch.Tensor, *task: torch.Tensor) -> torch.Tensor:
        """-> probability (…)."""
        return torch.sigmoid(self(latent, *task))

    def loss(self, logit: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Logit (…), target (…) in [0, 1] -> (…)."""
        return F.binary_cross_entropy_with_logits(logit, target, reduction="none")
