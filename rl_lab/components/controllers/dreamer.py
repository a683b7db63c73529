"""Actor and critic of Dreamer: MLPs on the latent features of a world model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rl_lab.components.nn.actions import CategoricalPolicy, make_policy
from rl_lab.components.nn.heads import TwoHotHead
from rl_lab.components.nn.mlp import MLP, FrozenMLP, layer_style
from rl_lab.components.nn.moving_averages import ReturnNormalizer, SlowCopy, make_normalizer
from rl_lab.errors import ConfigError, require_choice
from rl_lab.records import ActMode, NoiseSpec, Spec

GRADIENTS = ("reinforce", "dynamics", "both", "auto")


class DreamerActorController(nn.Module):
    """Policy for discrete, multi-discrete and continuous actions, with its return normalizer.

    gradient:     estimator of the policy gradient: reinforce (2024, today) | dynamics: backpropagation through the
                  imagined rollout, straight through discrete actions | both (v2): `gradient_mix` × dynamics and the
                  rest × reinforce | auto (v2, 2023): dynamics for continuous actions, reinforce for others
    return_debias: divide the averages of the return normalizer by the weights given so far (`retnorm.debias`)
    advantage_norm: of advantages, after the scale of returns: none | meanstd | perc (`advnorm`), with reinforce only
    distribution: of continuous actions: bounded_normal (2023 and later) | tanh_normal (v1) | truncated_normal (v2)
    min_std, max_std, init_std: of that distribution; None: its default. max_std: of bounded_normal only
    noise:        exploration while actions are sampled: deviation of normal noise that is added to a continuous
                  action and clipped (v1: 0.3), probability of a random action for discrete ones
    layer, init, bias: see LayerStyle
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
        return_debias: bool = False,
        advantage_norm: str = "none",
        gradient: str = "reinforce",
        gradient_mix: float = 0.1,  # danijar/dreamerv2 configs.yaml: actor_grad_mix
        distribution: str = "bounded_normal",
        min_std: float | None = None,
        max_std: float = 1.0,
        init_std: float | None = None,
        noise: float = 0.0,
        layer: str = "rms+silu",
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        require_choice("controllers.actor.gradient", gradient, GRADIENTS)
        if not 0.0 <= gradient_mix <= 1.0:
            raise ConfigError(
                f"controllers.actor.gradient_mix is {gradient_mix}: set it to a value from 0 to 1"
            )
        continuous = spec.action.kind == "continuous"
        if gradient == "auto":
            gradient = "dynamics" if continuous else "reinforce"
        self.gradient, self.gradient_mix = gradient, gradient_mix
        if advantage_norm != "none" and self.through_dynamics:
            raise ConfigError(
                f"controllers.actor.advantage_norm is {advantage_norm}: set it to none, or controllers.actor.gradient="
                f"reinforce; the gradient is {gradient}, which has no advantage of its own"
            )
        self.noise, self.continuous = noise, continuous
        self.policy = make_policy(
            spec.action,
            unimix=unimix,
            distribution=distribution,
            min_std=min_std,
            max_std=max_std,
            init_std=init_std,
        )
        self.mlp = MLP(
            features,
            units,
            layers,
            outputs=self.policy.width,
            out_scale=out_scale,
            float_out=True,
            style=layer_style(layer, init, bias),
            # V1 has one output layer for mean and deviation, V2 and the 2023 version two.
            out_parts=2 if continuous and distribution != "tanh_normal" else 1,
        )
        self.return_normalizer = ReturnNormalizer(
            rate=return_rate, low=return_low, high=return_high, limit=return_limit, debias=return_debias
        )
        self.advantage_normalizer = make_normalizer("controllers.actor.advantage_norm", advantage_norm)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> raw outputs (…, width)."""
        return self.mlp(feature)

    @property
    def through_dynamics(self) -> bool:
        """Whether rollouts need gradients."""
        return self.gradient in ("dynamics", "both")

    @property
    def has_fast_form(self) -> bool:
        """Whether `frozen` and the fused imagination can use this policy."""
        return self.mlp.style.fused and (self.continuous or not self.through_dynamics)

    def noise_spec(self, *batch: int) -> NoiseSpec:
        """Random values of one sampled action per element: (*batch, k)."""
        return NoiseSpec((*batch, *self.policy.noise_shape), self.policy.noise_kind)

    def sample(self, feature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """feature: (…, features), noise: (…, k) as in `noise_spec` -> action as stored."""
        return self.policy.sample(self.mlp(feature), noise)

    def sample_encoded(self, feature: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """As `sample`, as vectors (…, A) with gradients: one-hot choices have that of their probabilities."""
        if isinstance(self.policy, CategoricalPolicy):
            return self.policy.sample_one_hot(self.mlp(feature), noise)
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

    def log_prob_of_encoded(
        self, feature: torch.Tensor, action: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `log_prob_and_entropy`, of actions as `sample_encoded` returns them, through which gradients flow."""
        raw = self.mlp(feature)
        if not isinstance(self.policy, CategoricalPolicy):
            return self.policy.log_prob_and_entropy(raw, action)
        _, entropy = self.policy.log_prob_and_entropy(raw, self.policy.mode(raw))
        return self.policy.log_prob_of_one_hot(raw, action), entropy

    @torch.no_grad()
    def act(self, feature: torch.Tensor, mode: ActMode) -> torch.Tensor:
        """feature: (N, features) -> actions (N, …) for the environments."""
        raw = self.mlp(feature)
        if mode.sample:
            action = self.policy.sample(raw, self._draw(raw, self.policy.noise_kind, mode), mode.temperature)
        else:
            action = self.policy.mode(raw)
        if mode.sample and self.noise and self.continuous:
            action = (action + self.noise * self._draw(raw, "normal", mode)).clamp(-1.0, 1.0)
        random = self.noise if mode.sample and not self.continuous else 0.0
        if max(mode.epsilon, random) > 0.0:
            probability = max(mode.epsilon, random)
            explore = torch.rand(len(raw), generator=mode.generator, device=raw.device) < probability
            uniform = self.policy.random(self._draw(raw, "uniform", mode))
            action = torch.where(explore.view(-1, *[1] * (action.ndim - 1)), uniform, action)
        return action

    def _draw(self, raw: torch.Tensor, kind: str, mode: ActMode) -> torch.Tensor:
        draw = torch.rand if kind == "uniform" else torch.randn
        return draw(len(raw), *self.policy.noise_shape, generator=mode.generator, device=raw.device)


class DreamerCriticController(nn.Module):
    """State value by two-hot regression, with a target network. Initial values are zero.

    bins:         of the two-hot code; 0: squared error (v1, v2)
    slow_targets: returns and baselines use the target network's values (v2; `slowtar` in danijar/dreamerv3)
    slow_weight:  weight of the loss to the target network's value (`slowreg`); 0 in v1 and v2
    value_norm:   the head predicts normalized returns: none | meanstd | perc (`valnorm`); `slow_value` is normalized, too
    slow_every:   updates between two updates of the target network; 100 in v2, which then copies
    layer, init, bias: see LayerStyle
    """

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
        slow_targets: bool = False,
        slow_weight: float = 1.0,
        slow_every: int = 1,
        value_norm: str = "none",
        layer: str = "rms+silu",
        init: str = "fan_in",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if slow_every < 1:
            raise ConfigError(f"controllers.critic.slow_every is {slow_every}: set it to 1 or more")
        self.slow_targets, self.slow_weight = slow_targets, slow_weight
        self.head = TwoHotHead(
            features=features,
            units=units,
            layers=layers,
            bins=bins,
            limit=limit,
            space=space,
            out_scale=out_scale,
            layer=layer,
            init=init,
            bias=bias,
        )
        self.slow = SlowCopy(self.head, every=slow_every)
        self.value_normalizer = make_normalizer("controllers.critic.value_norm", value_norm)

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        """feature: (…, features) -> logits (…, bins)."""
        return self.head(feature)

    def mean(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits (…, bins) -> value (…)."""
        mean = self.head.mean(logits)
        return mean if self.value_normalizer is None else self.value_normalizer.restore(mean)

    def value(self, feature: torch.Tensor) -> torch.Tensor:
        if self.value_normalizer is None:
            return self.head.predict(feature)
        return self.value_normalizer.restore(self.head.predict(feature))

    def target_value(self, feature: torch.Tensor) -> torch.Tensor:
        """Value of the target network (…), with gradients of the feature."""
        return self.mean(self.slow(feature))

    @torch.no_grad()
    def slow_value(self, feature: torch.Tensor) -> torch.Tensor:
        """Value of the target network (…) as `loss` takes it, without gradients."""
        return self.head.mean(self.slow(feature))

    def loss(self, logits: torch.Tensor, target: torch.Tensor, slow_target: torch.Tensor) -> torch.Tensor:
        """Loss to the return, plus `slow_weight` × loss to the target network's value: each (…) -> (…).

        With `value_norm` the returns are first counted in its averages.
        """
        if self.value_normalizer is not None:
            self.value_normalizer.update(target)
            target = self.value_normalizer.normalize(target)
        if self.slow_weight == 1.0:
            return self.head.loss(logits, target, slow_target)
        loss = self.head.loss(logits, target)
        return loss + self.slow_weight * self.head.loss(logits, slow_target) if self.slow_weight else loss

    def update_slow(self, rate: float) -> None:
        self.slow.update(self.head, rate)
