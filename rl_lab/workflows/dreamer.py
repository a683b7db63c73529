"""DreamerV3 in its current form (Hafner et al. 2025, Nature; danijar/dreamerv3 @ e3f0224).

A recurrent world model is learned from replay; actor and critic are learned in dreams that start from the states just
inferred. The fast path is one fused hook, `update`: one step for all parts; the critic's loss on replayed rewards
reaches the world model. `update_world_model` and `update_controller` do the halves apart, for curricula.
docs/algorithms/dreamer.md has what differs from the original.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rl_lab.components.nn.fast_path import fast_path
from rl_lab.components.nn.guard import NonFiniteGuard
from rl_lab.components.nn.precision import autocast
from rl_lab.components.nn.side_stream import Aside
from rl_lab.components.nn.training_step import (
    AverageGradients,
    Gradients,
    find_gradients,
    join_gradients,
    keep_gradients,
    optimizer_step,
)
from rl_lab.records import (
    Batch,
    BatchSpec,
    Hook,
    NoiseSpec,
    UpdateResult,
)
from rl_lab.workflows.base import PhaseConfig
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer_acting import DreamerActing, State
from rl_lab.workflows.dreamer_losses import (
    Dreams,
    Losses,
    actor_critic_losses,
    kl_losses,
    mean_losses,
    replay_value_loss,
    total_loss,
    value_dreams,
)
from rl_lab.workflows.dreamer_report import dreamer_report

Tensors = Mapping[str, torch.Tensor]
WORLD_MODEL = ("encoder", "rssm", "decoder", "reward_head", "continue_head")
CONTROLLER_LOSSES = ("actor", "critic", "replay_value")


class Learned(NamedTuple):
    """What actor and critic learn from dreams."""

    gradients: Gradients
    losses: Losses
    metrics: dict[str, torch.Tensor]


class DreamerWorkflow(DreamerActing):
    """Components encoder, rssm, decoder, reward_head, continue_head, return_computer; controllers actor, critic."""

    phase_settings = ("algorithm.entropy", "algorithm.learning_rate")

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.optimizers = list(context.optimizers.values())
        modules = {name: getattr(self, name) for name in (*WORLD_MODEL, "actor", "critic")}
        self.parts = {name: list(module.parameters()) for name, module in modules.items()}
        context.check_trained(self.parts, context.optimizers)
        self.guard = NonFiniteGuard().to(self.device)
        self.average_gradients: AverageGradients = keep_gradients

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, Hook]:
        s = self.settings
        batch = BatchSpec(s.batch_size, s.batch_length, context=s.replay_context, sampler=s.sampler)
        dreams = s.batch_size * s.starts
        posterior = {"posterior": NoiseSpec((s.batch_size, s.batch_length, self.rssm.stoch))}
        imagination = {
            "prior": NoiseSpec((s.imagination_horizon, dreams, self.rssm.stoch)),
            "action": self.actor.noise_spec(s.imagination_horizon, dreams),
        }
        both = {**posterior, **imagination}
        return {
            "update": Hook(self._fused_step, batch=batch, scalars=self._scalars, noise=both),
            "update_world_model": Hook(
                self._world_model_step, batch=batch, scalars=self._scalars, noise=posterior
            ),
            "update_controller": Hook(
                self._controller_step, batch=batch, scalars=self._scalars, noise=both, prefix="controller"
            ),
        }

    def _scalars(self, phase: PhaseConfig, counters: Mapping[str, int]) -> dict[str, float]:
        learning_rate = self.phase_value(phase, "algorithm.learning_rate")
        return {
            "entropy": self.phase_value(phase, "algorithm.entropy"),
            # Every optimizer keeps its own rate; a phase that changes the base rate scales them all alike.
            "learning_rate_scale": learning_rate / self.settings.learning_rate,
        }

    def _fused_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self.autocast():
            states, posterior = self.infer(batch, noise["posterior"])
            feature = self.rssm.feature(states)
            # A GPU dreams while it looks at reconstructions, and learns from the dreams while it goes back through the
            # sequence, whose small steps leave most of it idle.
            dreaming = Aside(self._valued_dreams, states, noise, device=self.device)
            losses, metrics = self._world_model_losses(batch, states, posterior, feature)
            dreams = dreaming.join()
            learning = Aside(self._learn_from_dreams, dreams, scalars, device=self.device)
            losses["replay_value"] = self._replay_value_loss(batch, feature, dreams.returns)
        return self._finish(losses, scalars, metrics, batch, states, beside=learning)

    def _world_model_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self.autocast():
            states, posterior = self.infer(batch, noise["posterior"])
            losses, metrics = self._world_model_losses(batch, states, posterior, self.rssm.feature(states))
        return self._finish(losses, scalars, metrics, batch, states)

    def _controller_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self.autocast():
            with torch.no_grad():
                states, _ = self.infer(batch, noise["posterior"])
                feature = self.rssm.feature(states)
            # Both on one lane: what is dreamed there goes backward there.
            dreams = Aside(self._valued_dreams, states, noise, device=self.device).join()
            learning = Aside(self._learn_from_dreams, dreams, scalars, device=self.device)
            losses = {"replay_value": self._replay_value_loss(batch, feature, dreams.returns)}
        return self._finish(losses, scalars, {}, batch, None, beside=learning)

    # ---------------------------------------------------------------- the two halves

    def _world_model_losses(
        self,
        batch: Batch,
        states: State,  # posterior, (B, T, …)
        posterior: torch.Tensor,  # (B, T, S, C) log probabilities
        feature: torch.Tensor,  # (B, T, F)
    ) -> tuple[Losses, dict[str, torch.Tensor]]:
        """Losses (0-d each), metrics."""
        context = self.settings.replay_context
        kl, metrics = kl_losses(posterior, self.rssm.prior(states["deter"]), self.settings.free_nats)
        obs = {key: value[:, context:] for key, value in batch.obs.items()}
        decoded = self.decoder.losses(self.decoder(states, feature), obs)
        alive = (~batch.terminated[:, context:]).float() * self.settings.discount
        losses = {
            **{f"reconstruction/{key}": loss for key, loss in decoded.items()},
            "reward": self.reward_head.loss(self.reward_head(feature), batch.reward[:, context:]),
            "continue": self.continue_head.loss(self.continue_head(feature), alive),
            **kl,
        }
        return mean_losses(losses), metrics

    def _valued_dreams(self, states: State, noise: Tensors) -> Dreams:
        """Dreams from the last `starts` states of every sequence, with their returns."""
        s = self.settings
        start = {key: value[:, -s.starts :].detach().flatten(0, 1) for key, value in states.items()}
        # Without autocast's cache, which would give other streams this one's casts of the weights.
        with autocast(self.precision, self.device, cache=False):
            with torch.set_grad_enabled(self.through_dynamics):
                feature, action = self._dream(start, noise["prior"], noise["action"])
                reward, cont = self.reward_head.predict(feature), self.continue_head.predict(feature)
            return value_dreams(
                self.critic, self.return_computer, feature=feature, action=action, reward=reward, cont=cont
            )

    def _dream_losses(self, dreams: Dreams, scalars: Tensors) -> tuple[Losses, dict[str, torch.Tensor]]:
        """Losses (0-d) of actor and critic, metrics. Nothing here reaches the world model."""
        with autocast(self.precision, self.device, cache=False):
            losses, metrics = actor_critic_losses(
                self.actor, self.critic, dreams, entropy_scale=scalars["entropy"]
            )
        return mean_losses(losses), {f"controller/{name}": value for name, value in metrics.items()}

    def _learn_from_dreams(self, dreams: Dreams, scalars: Tensors) -> Learned:
        losses, metrics = self._dream_losses(dreams, scalars)
        with torch.autocast(self.device.type, enabled=False):  # as any backward pass
            # Each by its own loss: through a dream with gradient the actor's would reach the critic, too.
            found = [find_gradients(self._total({name: losses[name]}), self.parts[name]) for name in losses]
            return Learned(join_gradients(found), losses, metrics)

    def _replay_value_loss(
        self,
        batch: Batch,
        feature: torch.Tensor,  # (B, T, F)
        returns: torch.Tensor,  # (N, H) of the dreams
    ) -> torch.Tensor:
        """The critic on the replayed rewards (0-d); its gradient may go on into the world model."""
        starts = self.settings.starts
        last = batch.terminated | batch.truncated
        # A stream that was cut off (a restarted environment) shows only in the row that follows.
        last = torch.cat([last[:, :-1] | batch.is_first[:, 1:], last[:, -1:]], 1)
        loss = replay_value_loss(
            self.critic,
            self.return_computer,
            feature=feature[:, -starts:],
            reward=batch.reward[:, -starts:],
            terminated=batch.terminated[:, -starts:],
            last=last[:, -starts:],
            bootstrap=returns[:, 0].detach().unflatten(0, (-1, starts)),
            discount=self.settings.discount,
        )
        return loss.mean()

    def _finish(
        self,
        losses: Losses,
        scalars: Tensors,
        metrics: dict[str, torch.Tensor],
        batch: Batch,
        states: State | None,  # latents to write back
        *,
        beside: Aside[Learned] | None = None,  # what else is to be learned, found meanwhile
    ) -> UpdateResult:
        with fast_path(self.fast):
            step_metrics, masked = optimizer_step(
                self._total(losses),
                self.optimizers,
                self.parts,
                guard=self.guard,
                learning_rate_scale=scalars["learning_rate_scale"],
                max_grad_norm=self.settings.max_grad_norm or None,
                average_gradients=self.average_gradients,
                beside=None if beside is None else lambda: beside.join().gradients,
            )
        if beside is not None:
            losses = {**losses, **beside.join().losses}
            metrics = {**metrics, **beside.join().metrics}
        if "critic" in losses:
            self.critic.update_slow(self.settings.slow_critic_rate)
        for name, value in losses.items():
            part = "controller/" if name in CONTROLLER_LOSSES else ""
            metrics[f"{part}loss/{name}"] = value.detach()
        metrics = {**metrics, **step_metrics}
        return UpdateResult(metrics, self._latents_to_store(batch, states, masked))

    def _total(self, losses: Losses) -> torch.Tensor:
        return total_loss(losses, {name: self.settings.loss_scales[name.split("/")[0]] for name in losses})

    def _latents_to_store(
        self, batch: Batch, states: State | None, masked: torch.Tensor
    ) -> dict[str, torch.Tensor] | None:
        if states is None or "deter" not in batch:
            return None
        context = self.settings.replay_context
        fresh = self._latent_columns({key: value.detach() for key, value in states.items()})
        # A masked update may have met values that are not finite: leave the stored latents as they were.
        return {key: torch.where(masked > 0, batch[key][:, context:], value) for key, value in fresh.items()}

    def report(self, batch: Batch) -> dict[str, Any]:
        return dreamer_report(self, batch)

    def get_state(self) -> dict[str, Any]:
        return {"guard": self.guard.state_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if "guard" in state:
            self.guard.load_state_dict(state["guard"])
