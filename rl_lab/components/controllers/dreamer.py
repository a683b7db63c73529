"""Actor and critic of Dreamer: MLPs on the latent features of a world model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rl_lab.components.nn.actions import make_policy
from rl_lab.components.nn.heads import TwoHotHead
from rl_lab.components.nn.mlp import MLP, FrozenMLP
from rl_lab.components.nn.moving_averages import ReturnNormalizer, SlowCopy
from rl_lab.errors import ConfigError, require_choice
from rl_lab.records import ActMode, NoiseSpec, Spec

GRADIENTS = ("reinforce", "dynamics")


class DreamerActorController(nn.Module):
    """Policy for discrete, multi-discrete and continuous actions, with its return normalizer.

    gradient: estimator of the policy gradient: `reinforce`, or `dynamics`: backpropagation through the
              imagined rollout (continuous actions only)
    """

    def __init__(
        self,
        *,
        spec: Spec,
        features: int,
        units: int,
        layers: int = 3,
        out_scale: float = 0.01,  # nearly uniform initially: danijar/dreamerv3 configs.yaml
        unimix: float = 0.0,
        return_rate: float = 0.01,
        return_low: float = 0.05,
        return_high: float = 0.95,
        return_limit: float = 1.0,
        gradient: str = "reinforce",
    ) -> None:
        super().__init__()
        require_choice("controllers.actor.gradient", gradient, GRADIENTS)
        if gradient == "dynamics" and spec.action.kind != "continuous":
            raise ConfigError(
                f"controllers.actor.gradient=dynamics needs continuous actions, not {spec.action.kind} ones: "
                "set it to reinforce"
            )
        self.gradient = gradient
        self.policy = make_policy(spec.action, unimix=unimix)
        self.mlp = MLP(
            features, units, layers, outputs=self.policy.width, out_scale=out_scale, float_out=True
        )
        self.return_normalizer = ReturnNormalizer(
            rate=return_rate, low=return_low, high=return_high, limit=return_limit
        )

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> raw outputs (…, width)."""
        return self.mlp(feature)

    def noise_spec(self, *batch: int) -> NoiseSpec:
        """Random values of one sampled action per element: (*batch, k)."""
        return NoiseSpec((*batch, *self.policy.noise_shape), self.policy.noise_kind)

    def sample(self, feature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """feature: (…, features), noise: (…, k) as in `noise_spec` -> action as stored."""
        return self.policy.sample(self.mlp(feature), noise)

    def frozen(self, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """`sample` with the current weights, for many steps without gradients."""
        mlp = FrozenMLP(self.mlp, dtype)
        return lambda feature, noise: self.policy.sample(mlp(feature), noise)

    def log_prob_and_entropy(
        self, feature: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log probability and entropy, each (…), summed over the parts of an action."""
        return self.policy.log_prob_and_entropy(self.mlp(feature), action)

    @torch.no_grad()
    def act(self, feature: torch.Tensor, mode: ActMode) -> torch.Tensor:
        """feature: (N, features) -> actions (N, …) for the environments."""
        raw = self.mlp(feature)
        if mode.sample:
            action = self.policy.sample(raw, self._draw(raw, self.policy.noise_kind, mode), mode.temperature)
        else:
            action = self.policy.mode(raw)
        if mode.epsilon > 0.0:
            explore = torch.rand(len(raw), generator=mode.generator, device=raw.device) < mode.epsilon
            uniform = self.policy.random(self._draw(raw, "uniform", mode))
            action = torch.where(explore.view(-1, *[1] * (action.ndim - 1)), uniform, action)
        return action

    def _draw(self, raw: torch.Tensor, kind: str, mode: ActMode) -> torch.Tensor:
        draw = torch.rand if kind == "uniform" else torch.randn
        return draw(len(raw), *self.policy.noise_shape, generator=mode.generator, device=raw.device)


class DreamerCriticController(nn.Module):
    """State value by two-hot regression, with a target network. Initial values are zero."""

    def __init__(
        self,
        *,
        features: int,
        units: int,
        layers: int = 3,
        bins: int = 255,
        limit: float = 20.0,
        space: str = "numbers",
        out_scale: float = 0.0,
    ) -> None:
        super().__init__()
        self.head = TwoHotHead(
            features=features,
            units=units,
            layers=layers,
            bins=bins,
            limit=limit,
            space=space,
            out_scale=out_scale,
        )
        self.slow = SlowCopy(self.head)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> logits (…, bins)."""
        return self.head(feature)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (…, bins) -> value (…)."""
        return self.head.mean(logits)

    def value(self, feature: torch.Tensor) -> torch.Tensor:
        return self.head.predict(feature)

    @torch.no_grad()
    def slow_value(self, feature: torch.Tensor) -> torch.Tensor:
        """Value of the target network (…), without gradients."""
        return self.head.mean(self.slow(feature))

    def loss(self, logits: torch.Tensor, target: torch.Tensor, slow_target: torch.Tensor) -> torch.Tensor:
        """Cross entropy to the return, plus cross entropy to the target network's value: each (…) -> (…)."""
        return self.head.loss(logits, target, slow_target)

    def update_slow(self, rate: float) -> None:
        self.slow.update(self.head, rate)
