"""Dreamer without its training: the parts, acting with them, dreaming with them. dreamer.py adds how they learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from rl_lab.components.nn.categorical import one_hot
from rl_lab.components.nn.fast_path import fast, fast_path, resolve_fast_path
from rl_lab.components.nn.precision import autocast, product_dtype, resolve_precision
from rl_lab.components.representation_learners.rssm_dream import FrozenDynamics, dream
from rl_lab.components.representation_learners.rssm_dream_gradient import dream_with_gradient
from rl_lab.errors import ConfigError
from rl_lab.records import ActMode, ArraySpec, Batch, Dreamed, Imagined, Spec
from rl_lab.workflows.base import PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer_settings import DreamerSettings

State = dict[str, torch.Tensor]


class DreamerActing(WorldModelWorkflow):
    """Components encoder, rssm, decoder, reward_head, continue_head, return_computer; controllers actor, critic."""

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = DreamerSettings.from_config(context.config.algorithm)
        training = context.config.training
        self.precision = resolve_precision(str(training.precision), self.device)
        self.fast = resolve_fast_path(training.get("fast_path", "auto"), self.device)
        self.encoder = context.component("encoder", "forward")
        self.rssm = context.component(
            "rssm", "observe", "observe_sequence", "imagine_step", "prior", "feature"
        )
        self.decoder = context.component("decoder", "forward", "losses", "observations")
        self.reward_head = context.component("reward_head", "predict", "loss")
        self.continue_head = context.component("continue_head", "predict", "loss")
        self.return_computer = context.component("return_computer", "__call__")
        self.actor = context.controller("actor", "sample", "log_prob_and_entropy", "act")
        self.through_dynamics = getattr(self.actor, "gradient", "reinforce") == "dynamics"
        self.critic = context.controller("critic", "value", "slow_value", "loss", "update_slow")
        if self.encoder.embed_dim != self.rssm.embed_dim:
            raise ConfigError(
                f"the encoder gives embeddings of width {self.encoder.embed_dim}, the RSSM expects "
                f"{self.rssm.embed_dim}: set components.rssm.embed_dim={self.encoder.embed_dim}"
            )

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """How networks compute here: in which precision, and whether by their fast forms."""
        with autocast(self.precision, self.device), fast_path(self.fast):
            yield

    def infer(self, batch: Batch, noise: torch.Tensor) -> tuple[State, torch.Tensor]:
        """Posterior states (B, T, …) of the rows after the context, and their log probabilities."""
        context = self.settings.replay_context
        obs = {key: value[:, context:] for key, value in batch.obs.items()}
        state, action, is_first = self.rssm.initial_state(len(batch.reward)), batch.action, batch.is_first
        if context:
            # The row before gives its stored latent as memory, and its action as the first previous action.
            if "deter" in batch:
                stoch = one_hot(batch["stoch"][:, 0].long(), self.rssm.classes)
                state = {"deter": batch["deter"][:, 0].float(), "stoch": stoch}
            action, is_first = action[:, :-1], is_first[:, 1:]
        else:
            action, is_first = previous_actions(action, is_first)
        states, log_probs = self.rssm.observe_sequence(state, action, self.encoder(obs), is_first, noise)
        return states, log_probs

    def _dream(
        self, state: State, prior_noise: torch.Tensor, action_noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (N, H+1, F) and actions (N, H, …) of a dream under the current policy; noise is (H, N, …).

        Where gradients are wanted they go from states to the actions before them, and from these to the policy.
        """
        if fast() and torch.is_grad_enabled():
            return dream_with_gradient(self.rssm, self.actor, state, prior_noise, action_noise)
        if fast():
            policy = self.actor.frozen(product_dtype(self.device))
            return dream(FrozenDynamics(self.rssm), policy, state, prior_noise, action_noise)
        features, actions = [self.rssm.feature(state)], []
        for prior_t, action_t in zip(prior_noise.unbind(0), action_noise.unbind(0)):
            actions.append(self.actor.sample(features[-1].detach(), action_t))
            state = self.rssm.imagine_step(state, actions[-1], prior_t)
            features.append(self.rssm.feature(state))
        return torch.stack(features, 1), torch.stack(actions, 1)

    @staticmethod
    def _latent_columns(state: State) -> dict[str, torch.Tensor]:
        return {
            "deter": state["deter"].to(torch.bfloat16),
            "stoch": state["stoch"].argmax(-1).to(torch.uint8),
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
            "stoch": ArraySpec((self.rssm.stoch,), "uint8"),
        }

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        noise = torch.rand(len(is_first), self.rssm.stoch, generator=mode.generator, device=self.device)
        with self.autocast():
            state, _ = self.rssm.observe(
                policy_state, policy_state["action"], self.encoder(obs), is_first, noise
            )
            action = self.actor.act(self.rssm.feature(state), mode)
        extras = self._latent_columns(state) if self.settings.replay_context else {}
        return action, {**state, "action": action}, extras

    @torch.no_grad()
    def imagine(
        self,
        *,
        horizon: int,
        batch: Batch | None = None,
        state: State | None = None,
        decode: bool = False,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Imagined:
        """A dream of `horizon` steps from `state` (B, …), or from the end of each sequence of `batch`."""
        draw = partial(torch.rand, generator=generator, device=self.device)
        with self.autocast():
            if state is None:
                if batch is None:
                    raise ValueError("imagine() needs a batch or a state to start from")
                rows = batch.reward.shape[1] - self.settings.replay_context
                states, _ = self.infer(batch, draw(len(batch.reward), rows, self.rssm.stoch))
                state = {key: value[:, -1] for key, value in states.items()}
            count = len(state["deter"])
            spec = self.actor.noise_spec(horizon, count)
            action_noise = (torch.rand if spec.kind == "uniform" else torch.randn)(
                spec.shape, generator=generator, device=self.device
            )
            feature, action = self._dream(state, draw(horizon, count, self.rssm.stoch), action_noise)
            deter, stoch = feature.split([self.rssm.deter, self.rssm.stoch * self.rssm.classes], -1)
            states = {"deter": deter, "stoch": stoch.unflatten(-1, (self.rssm.stoch, self.rssm.classes))}
            decoded = self.decoder.observations(self.decoder(states, feature)) if decode else None
            reward, cont = self.reward_head.predict(feature), self.continue_head.predict(feature)
        return Imagined(states, action, reward=reward, cont=cont, obs=decoded)

    @torch.no_grad()
    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        size, rows = batch.reward.shape
        noise = torch.rand(size, rows, self.rssm.stoch, generator=generator, device=self.device)
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
    ) -> tuple[PolicyState, Dreamed]:
        noise = torch.rand(len(action), self.rssm.stoch, generator=generator, device=self.device)
        with self.autocast():
            state = self.rssm.imagine_step(state, action, noise)
            feature = self.rssm.feature(state)
            # The continue head learns the discount with the ends: without it the rest is the chance of going on.
            alive = self.continue_head.predict(feature) / self.settings.discount
            reward = self.reward_head.predict(feature)
        return state, Dreamed(reward, (1.0 - alive).clamp(0.0, 1.0), self.dream_observation(state))


def previous_actions(action: torch.Tensor, is_first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Actions taken *before* each row, (B, T, …); each sequence starts as if it were an episode."""
    action = torch.cat([torch.zeros_like(action[:, :1]), action[:, :-1]], 1)
    return action, torch.cat([torch.ones_like(is_first[:, :1]), is_first[:, 1:]], 1)
