"""Dreamer without training: inference of latent states, acting, and imagined rollouts. Training is in workflow.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, ArraySpec, Batch, ImaginedStep, Spec
from rl_lab.utils.device import autocast, product_dtype, resolve_precision
from rl_lab.workflows.base import PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer.settings import DreamerSettings

State = dict[str, torch.Tensor]


class DreamerActing(WorldModelWorkflow):
    """Dreamer without training: inference, acting and imagination.

    Components encoder, rssm, decoder, reward_head, continue_head, return_computer; controllers actor, critic.
    """

    settings_type: type[DreamerSettings] = DreamerSettings
    has_temperature = True

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = self.settings_type.from_config(context.config.algorithm)
        training = context.config.training
        self.precision = resolve_precision(str(training.precision), self.device)
        self.fast = context.use_fast_path()
        self.encoder = context.component("encoder", "forward")
        self.rssm = context.component(
            "rssm",
            "observe",
            "observe_sequence",
            "imagine_step",
            "prior",
            "feature",
            "noise_spec",
            "draw_noise",
        )
        self.decoder = context.component("decoder", "forward", "losses", "observations")
        self.reward_head = context.component("reward_head", "predict", "loss")
        self.continue_head = context.component("continue_head", "predict", "loss")
        self.return_computer = context.component("return_computer", "__call__")
        self.actor = context.controller("actor", "sample", "log_prob_and_entropy", "act")
        self.through_dynamics = getattr(self.actor, "through_dynamics", False)
        if self.settings.actor_critic_gradient and self.through_dynamics:
            raise ConfigError(
                "algorithm.actor_critic_gradient=true needs controllers.actor.gradient=reinforce: with gradients through "
                "the dynamics the states of a rollout already have one"
            )
        # Earlier versions have layers without fused kernels; imagination then runs step by step, with plain modules.
        self.fused = self.fast and bool(getattr(self.rssm, "fast", False))
        self.critic = context.controller("critic", "value", "slow_value", "loss", "update_slow")
        # Both of its losses change the averages of its values: they are computed one after the other.
        self.value_norm = getattr(self.critic, "value_normalizer", None) is not None
        if self.encoder.embed_dim != self.rssm.embed_dim:
            raise ConfigError(
                f"components.rssm.embed_dim is {self.rssm.embed_dim}, but the encoder's output has width "
                f"{self.encoder.embed_dim}: set components.rssm.embed_dim={self.encoder.embed_dim}"
            )

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Run networks in the configured precision."""
        with autocast(self.precision, self.device):
            yield

    def infer(self, batch: Batch, noise: torch.Tensor) -> tuple[State, torch.Tensor]:
        """Posterior states (B, T, …) of the rows after the replay context, and their statistics."""
        context = self.settings.replay_context
        obs = {key: value[:, context:] for key, value in batch.obs.items()}
        state, action, is_first = self.rssm.initial_state(len(batch.reward)), batch.action, batch.is_first
        if context:
            # The context row provides the initial state (its stored latent) and the first previous action.
            if "deter" in batch:
                stoch = self.rssm.latent.from_column(batch["stoch"][:, 0])
                state = {"deter": batch["deter"][:, 0].float(), "stoch": stoch}
            action, is_first = action[:, :-1], is_first[:, 1:]
        else:
            action, is_first = previous_actions(action, is_first)
        states, statistics = self.rssm.observe_sequence(state, action, self.encoder(obs), is_first, noise)
        return states, statistics

    def rollout(
        self, state: State, prior_noise: torch.Tensor, action_noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (N, H+1, F) and actions (N, H, …) of imagined rollouts with the actor; noise is (H, N, …).

        If gradients are enabled, they flow from states to the previous actions and from these to the actor; discrete
        actions are then one-hot vectors (N, H, A).
        """
        return self.rollout_of(self.actor, state, prior_noise, action_noise)

    def rollout_of(
        self, actor: Any, state: State, prior_noise: torch.Tensor, action_noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rollout` with any actor."""
        gradients = torch.is_grad_enabled()
        encoded = gradients and self.spec.action.kind != "continuous"
        if self.fused and getattr(actor, "has_fast_form", True) and not encoded:
            from rl_lab.components.representation_learners.rssm_fast import (
                FrozenDynamics,
                imagine,
                imagine_with_gradient,
            )

            if gradients:
                return imagine_with_gradient(self.rssm, actor, state, prior_noise, action_noise)
            policy = actor.frozen(product_dtype(self.device))
            return imagine(FrozenDynamics(self.rssm), policy, state, prior_noise, action_noise)
        sample = actor.sample_encoded if encoded else actor.sample
        features, actions = [self.rssm.feature(state)], []
        for prior_t, action_t in zip(prior_noise.unbind(0), action_noise.unbind(0)):
            actions.append(sample(features[-1].detach(), action_t))
            state = self.rssm.imagine_step(state, actions[-1], prior_t, encoded=encoded)
            features.append(self.rssm.feature(state))
        return torch.stack(features, 1), torch.stack(actions, 1)

    def continues(self, feature: torch.Tensor) -> torch.Tensor:
        """Discount × probability of continuing: (…, features) -> (…)."""
        predicted: torch.Tensor = self.continue_head.predict(feature)
        return predicted if self.settings.discount_in_continue else predicted * self.settings.discount

    def _latent_columns(self, state: State) -> dict[str, torch.Tensor]:
        return {
            "deter": state["deter"].to(torch.bfloat16),
            "stoch": self.rssm.latent.to_column(state["stoch"]),
        }

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        dtype = torch.float32 if self.spec.action.kind == "continuous" else torch.int64
        action = torch.zeros(num_envs, *self.spec.action.shape, dtype=dtype, device=self.device)
        return {**self.rssm.initial_state(num_envs), "action": action}

    def policy_columns(self) -> dict[str, ArraySpec]:
        if not self.settings.replay_context:
            return {}
        return {
            "deter": ArraySpec((self.rssm.deter,), "bfloat16"),
            "stoch": self.rssm.latent.column,
        }

    def acting(self, mode: ActMode) -> Any:
        """The actor that chooses the actions."""
        return self.actor

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        noise = self.rssm.draw_noise(len(is_first), generator=mode.generator)
        with self.autocast():
            state, _ = self.rssm.observe(
                policy_state, policy_state["action"], self.encoder(obs), is_first, noise
            )
            action = self.acting(mode).act(self.rssm.feature(state), mode)
        extras = self._latent_columns(state) if self.settings.replay_context else {}
        return action, {**state, "action": action}, extras

    @torch.no_grad()
    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        size, rows = batch.reward.shape
        noise = self.rssm.draw_noise(size, rows, generator=generator)
        action, is_first = previous_actions(batch.action, batch.is_first)
        with self.autocast():
            states, _ = self.rssm.observe_sequence(
                self.rssm.initial_state(size), action, self.encoder(batch.obs), is_first, noise
            )
        return {key: value[:, -1] for key, value in states.items()}

    @torch.no_grad()
    def dream_observation(self, state: PolicyState) -> dict[str, torch.Tensor]:
        with self.autocast():
            decoded = self.decoder(state, self.rssm.feature(state))
            return dict(self.decoder.observations(decoded))

    def dreamed_observations(self, spec: Spec) -> list[str]:
        predicted = getattr(self.decoder, "keys", spec.observations)
        return [name for name in spec.observations if name in predicted]

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        with self.autocast():
            return self.actor.act(self.rssm.feature(state), mode), state

    @torch.no_grad()
    def inspect_policy(self, state: PolicyState) -> dict[str, torch.Tensor]:
        with self.autocast():
            feature = self.rssm.feature(state)
            action = self.actor.act(feature, ActMode(sample=False))
            _, entropy = self.actor.log_prob_and_entropy(feature, action)
            return {"value": self.critic.value(feature), "entropy": entropy}

    @torch.no_grad()
    def dream_step(
        self, state: PolicyState, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[PolicyState, ImaginedStep]:
        noise = self.rssm.draw_noise(len(action), generator=generator)
        with self.autocast():
            state = self.rssm.imagine_step(state, action, noise)
            feature = self.rssm.feature(state)
            alive = self.continues(feature) / self.settings.discount
            reward = self.reward_head.predict(feature)
        return state, ImaginedStep(reward, (1.0 - alive).clamp(0.0, 1.0), self.dream_observation(state))


def previous_actions(action: torch.Tensor, is_first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions taken before each row, (B, T, …), and `is_first` with a true first column."""
    action = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
    return action, torch.cat([torch.ones_like(is_first[:, :1]), is_first[:, 1:]], 1)
