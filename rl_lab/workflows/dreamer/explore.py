"""Plan2Explore (Sekar et al. 2020): explore without rewards, then learn a task from what was seen.

An ensemble predicts the next latent state; where its members disagree, the world model has something to learn. A second
actor and critic are trained in imagination on this disagreement. The hook `explore` trains the world model without its
reward head, the ensemble, and these two; it never uses a task reward. `update` is Dreamer's own. Phases say who acts
(`collect: {policy: explore}`) and what is trained: docs/algorithms/dreamer.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rl_lab.components.nn.fast_path import SideStream
from rl_lab.components.nn.training_step import find_gradients, join_gradients
from rl_lab.records import ActMode, Batch, Hook, UpdateResult
from rl_lab.utils.device import autocast
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer.acting import State
from rl_lab.workflows.dreamer.losses import (
    ActorCriticGradients,
    Computed,
    ImaginedRollouts,
    actor_critic_losses,
    evaluate_rollouts,
    mean_losses,
)
from rl_lab.workflows.dreamer.settings import DreamerSettings, ExploreSettings
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow, Tensors


class ExploreWorkflow(DreamerWorkflow):
    """DreamerWorkflow with a component `disagreement` and the controllers `explorer`, `explorer_critic`."""

    settings_type: type[DreamerSettings] = ExploreSettings
    collect_policies = ("agent", "random", "explore")
    trained_parts = (*DreamerWorkflow.trained_parts, "disagreement", "explorer", "explorer_critic")

    def _bind_context(self, context: WorkflowContext) -> None:
        self.disagreement = context.component("disagreement", "reward", "loss")
        self.explorer = context.controller("explorer", "sample", "log_prob_and_entropy", "act")
        self.explorer_critic = context.controller(
            "explorer_critic", "value", "slow_value", "loss", "update_slow"
        )
        super()._bind_context(context)

    def acting(self, mode: ActMode) -> Any:
        return self.explorer if mode.policy == "explore" else self.actor

    def hooks(self) -> dict[str, Hook]:
        hooks = super().hooks()
        update, s = hooks["update"], self.settings
        rollouts = s.batch_size * s.starts
        noise = {**update.noise, "action": self.explorer.noise_spec(s.imagination_horizon, rollouts)}
        explore = Hook(self._explore_step, batch=update.batch, scalars=self._scalars, noise=noise)
        return {**hooks, "explore": explore}

    def _explore_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        result = self._update(self._compute_explorer, batch, scalars, noise)
        self.explorer_critic.update_slow(self.settings.slow_critic_rate)
        return result

    def _compute_explorer(self, batch: Batch, scalars: Tensors, noise: Tensors) -> Computed:
        side_stream = partial(SideStream, fast=self.fast, device=self.device)
        with self.autocast():
            states, posterior = self.infer(batch, noise["posterior"])
            feature = self.rssm.feature(states)
            imagination = side_stream(self._exploring_rollouts, states, noise, batch.terminated)
            losses, metrics = self._world_model_losses(batch, states, posterior, feature)
            # The task's rewards are for later.
            del losses["reward"], metrics["reward_share"]
            rollouts = imagination.join()
            explorer = side_stream(self._explorer_gradients, batch, states, feature, rollouts, scalars)
        return Computed(losses, metrics, states, explorer)

    def _exploring_rollouts(
        self, states: State, noise: Tensors, terminated: torch.Tensor
    ) -> ImaginedRollouts:
        """Rollouts of the explorer; the reward that arrives with a state is the disagreement about it."""
        s = self.settings
        start = {key: value[:, -s.starts :].detach().flatten(0, 1) for key, value in states.items()}
        with autocast(self.precision, self.device, cache=False):
            with torch.set_grad_enabled(getattr(self.explorer, "through_dynamics", False)):
                feature, action = self.rollout_of(self.explorer, start, noise["prior"], noise["action"])
                encoded = self._encoded(action)
                surprise = self.disagreement.reward(feature[:, :-1], encoded)
                reward = torch.cat([torch.zeros_like(surprise[:, :1]), surprise], 1)
                cont = self.continues(feature)
                if s.first_continue == "real":
                    cont = self._with_first_continue(cont, terminated)
            return evaluate_rollouts(
                self.explorer_critic,
                self.return_computer,
                feature=feature,
                action=action,
                reward=reward,
                cont=cont,
                own_reward=s.own_reward,
            )

    def _encoded(self, action: torch.Tensor) -> torch.Tensor:
        """Actions as the ensemble's input; those of a rollout with gradients may be one-hot already."""
        stored = self.spec.action.kind == "continuous" or not action.is_floating_point()
        encoded: torch.Tensor = self.rssm.action_encoder(action) if stored else action
        return encoded

    def _explorer_gradients(
        self,
        batch: Batch,
        states: State,
        feature: torch.Tensor,  # (B, T, F)
        rollouts: ImaginedRollouts,
        scalars: Tensors,
    ) -> ActorCriticGradients:
        """Gradients of ensemble, explorer and its critic; none reaches the world model."""
        s = self.settings
        with autocast(self.precision, self.device, cache=False):
            losses, metrics = actor_critic_losses(
                self.explorer,
                self.explorer_critic,
                rollouts,
                entropy_scale=scalars["entropy"],
                own_reward=s.own_reward,
                critic_start=s.critic_start,
            )
            losses = mean_losses(losses)
            losses["disagreement"] = self._disagreement_loss(batch, states, feature)
        parts = {"actor": "explorer", "critic": "explorer_critic", "disagreement": "disagreement"}
        scales = {**s.loss_scales, "disagreement": 1.0}
        with torch.autocast(self.device.type, enabled=False):
            found = [find_gradients(losses[name] * scales[name], self.parts[parts[name]]) for name in losses]
        return ActorCriticGradients(
            join_gradients(found),
            {parts[name]: loss for name, loss in losses.items()},
            {f"explore/{name}": value for name, value in metrics.items()},
        )

    def _disagreement_loss(self, batch: Batch, states: State, feature: torch.Tensor) -> torch.Tensor:
        """Each state with the action that follows it predicts the next state of the same episode: 0-d."""
        context = self.settings.replay_context
        action = self.rssm.action_encoder(batch.action[:, context:][:, :-1])
        target = states["stoch"][:, 1:].flatten(-2).detach()
        same = ~batch.is_first[:, context + 1 :]
        loss: torch.Tensor = self.disagreement.loss(feature[:, :-1].detach(), action, target, same)
        return loss
