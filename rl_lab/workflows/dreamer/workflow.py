"""Dreamer: DreamerV3 (Hafner et al. 2025, Nature; danijar/dreamerv3 @ e3f0224) and, by configuration, its earlier
versions.

The world model (an RSSM with decoder, reward and continue heads) is trained on replayed sequences. Actor and
critic are trained on imagined rollouts that start from the posterior states of those sequences. The hook
`update` trains all parts in one step; the critic's loss on replayed rewards also reaches the world model.
`update_world_model` and `update_controller` train the two halves separately, for curricula. The loss
functions are in `losses.py`, acting and imagination in `acting.py`. docs/algorithms/dreamer.md lists the
differences from the original.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from rl_lab.components.nn.fast_path import SideStream
from rl_lab.components.nn.losses import reward_share
from rl_lab.components.nn.moving_averages import RunningNormalizer
from rl_lab.components.nn.training_step import (
    Gradients,
    NonFiniteGuard,
    find_gradients,
    join_gradients,
    optimizer_step,
    split_batch,
    split_noise,
)
from rl_lab.errors import reject_unknown
from rl_lab.records import (
    Batch,
    BatchSpec,
    Hook,
    UpdateResult,
)
from rl_lab.utils.device import autocast
from rl_lab.workflows.base import PhaseConfig
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer.acting import DreamerActing, State
from rl_lab.workflows.dreamer.losses import (
    ActorCriticGradients,
    Computed,
    ImaginedRollouts,
    Losses,
    actor_critic_losses,
    evaluate_rollouts,
    kl_losses,
    mean_losses,
    replay_value_loss,
    total_loss,
)
from rl_lab.workflows.dreamer.report import dreamer_report

Tensors = Mapping[str, torch.Tensor]
WORLD_MODEL = ("encoder", "rssm", "decoder", "reward_head", "continue_head")
CONTROLLER_LOSSES = ("actor", "critic", "replay_value")


# Dimension of the batch in noise, where it is not the first.
NOISE_DIMS: Mapping[str, int | None] = {"prior": 1, "action": 1}


class DreamerWorkflow(DreamerActing):
    """Dreamer with the parts of `DreamerActing`, and any optimizers that together train all of them."""

    phase_settings = ("algorithm.entropy", "algorithm.learning_rate")
    trained_parts: tuple[str, ...] = (*WORLD_MODEL, "actor", "critic")

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.optimizers = list(context.optimizers.values())
        self.clip_norms = self._clip_norms(context)
        modules = {name: getattr(self, name) for name in self.trained_parts}
        self.parts = {name: list(module.parameters()) for name, module in modules.items()}
        context.check_trained(self.parts, context.optimizers)
        self.guard = NonFiniteGuard().to(self.device)

    def _clip_norms(self, context: WorkflowContext) -> list[float]:
        """The limit of each optimizer's gradient norm; 0: none."""
        limits = self.settings.clip_norms or {}
        if context.trains:
            reject_unknown("algorithm.clip_norms", limits, context.optimizers)
        return [limits.get(name, 0.0) for name in context.optimizers]

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, Hook]:
        s = self.settings
        batch = BatchSpec(s.batch_size, s.batch_length, context=s.replay_context, sampler=s.sampler)
        rollouts = s.batch_size * s.starts
        posterior = {"posterior": self.rssm.noise_spec(s.batch_size, s.batch_length)}
        imagination = {
            "prior": self.rssm.noise_spec(s.imagination_horizon, rollouts),
            "action": self.actor.noise_spec(s.imagination_horizon, rollouts),
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
            # Each optimizer keeps its own rate; a phase that changes the base rate scales all of them.
            "learning_rate_scale": learning_rate / self.settings.learning_rate,
        }

    def _fused_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        return self._update(self._compute_both, batch, scalars, noise)

    def _world_model_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        return self._update(self._compute_world_model, batch, scalars, noise)

    def _controller_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        return self._update(self._compute_controller, batch, scalars, noise)

    def _compute_both(self, batch: Batch, scalars: Tensors, noise: Tensors) -> Computed:
        side_stream = partial(SideStream, fast=self.fast, device=self.device)
        with self.autocast():
            states, posterior = self.infer(batch, noise["posterior"])
            feature = self.rssm.feature(states)
            # Imagination runs on a side stream during the decoder losses; actor and critic gradients overlap
            # the RSSM's backward pass, which is too small to fill the GPU.
            imagination = side_stream(self._imagine_rollouts, states, noise, batch.terminated)
            losses, metrics = self._world_model_losses(batch, states, posterior, feature)
            rollouts = imagination.join()
            starts = leaf = None
            if self.settings.actor_critic_gradient:
                starts = feature[:, -self.settings.starts :].flatten(0, 1)
                leaf = starts.detach().requires_grad_()
            actor_critic = side_stream(self._actor_critic_gradients, rollouts, scalars, leaf)
            if self.value_norm:
                actor_critic.join()
            losses.update(self._replay_value_loss(batch, feature, rollouts.returns))
        return Computed(losses, metrics, states, actor_critic, starts)

    def _compute_world_model(self, batch: Batch, scalars: Tensors, noise: Tensors) -> Computed:
        with self.autocast():
            states, posterior = self.infer(batch, noise["posterior"])
            losses, metrics = self._world_model_losses(batch, states, posterior, self.rssm.feature(states))
        return Computed(losses, metrics, states)

    def _compute_controller(self, batch: Batch, scalars: Tensors, noise: Tensors) -> Computed:
        side_stream = partial(SideStream, fast=self.fast, device=self.device)
        with self.autocast():
            with torch.no_grad():
                states, _ = self.infer(batch, noise["posterior"])
                feature = self.rssm.feature(states)
            # Same stream for both: a rollout must be backpropagated on the stream that produced it.
            rollouts = side_stream(self._imagine_rollouts, states, noise, batch.terminated).join()
            actor_critic = side_stream(self._actor_critic_gradients, rollouts, scalars)
            if self.value_norm:
                actor_critic.join()
            losses = self._replay_value_loss(batch, feature, rollouts.returns)
        return Computed(losses, {}, actor_critic=actor_critic)

    # ---------------------------------------------------------------- losses

    def _world_model_losses(
        self,
        batch: Batch,
        states: State,  # posterior, (B, T, …)
        posterior: torch.Tensor,  # statistics (B, T, S, …)
        feature: torch.Tensor,  # (B, T, F)
    ) -> tuple[Losses, dict[str, torch.Tensor]]:
        """Reconstruction, reward, continue, dynamics and representation losses (0-d each); metrics."""
        s, context = self.settings, self.settings.replay_context
        prior = self.rssm.prior(states["deter"])
        kl, metrics = kl_losses(posterior, prior, s.free_nats, latent=self.rssm.latent, free_mean=s.free_mean)
        obs = {key: value[:, context:] for key, value in batch.obs.items()}
        decoded = self.decoder.losses(self.decoder(states, feature), obs)
        alive = (~batch.terminated[:, context:]).float() * (s.discount if s.discount_in_continue else 1.0)
        rewarded = feature if s.reward_gradient else feature.detach()
        losses = {
            **{f"reconstruction/{key}": loss for key, loss in decoded.items()},
            "reward": self.reward_head.loss(self.reward_head(rewarded), self._rewards(batch)[:, context:]),
            "continue": self.continue_head.loss(self.continue_head(feature), alive),
            **kl,
        }
        return mean_losses(losses), {**metrics, "reward_share": reward_share(batch.reward[:, context:])}

    def _rewards(self, batch: Batch) -> torch.Tensor:
        """Rewards to learn, (B, rows)."""
        transform = self.settings.reward_transform
        if transform == "none":
            return batch.reward
        return torch.tanh(batch.reward) if transform == "tanh" else torch.sign(batch.reward)

    def _imagine_rollouts(
        self, states: State, noise: Tensors, terminated: torch.Tensor | None = None
    ) -> ImaginedRollouts:
        """Imagined rollouts from the last `starts` states of each sequence, with their λ-returns.

        terminated: (B, rows) of the batch; needed with `first_continue: real`
        """
        s = self.settings
        start = {key: value[:, -s.starts :].detach().flatten(0, 1) for key, value in states.items()}
        # No autocast cache: it would share the weight casts of this stream with other streams.
        with autocast(self.precision, self.device, cache=False):
            with torch.set_grad_enabled(self.through_dynamics):
                feature, action = self.rollout(start, noise["prior"], noise["action"])
                reward, cont = self.reward_head.predict(feature), self.continues(feature)
                if s.first_continue == "real" and terminated is not None:
                    cont = self._with_first_continue(cont, terminated)
            return evaluate_rollouts(
                self.critic,
                self.return_computer,
                feature=feature,
                action=action,
                reward=reward,
                cont=cont,
                own_reward=s.own_reward,
            )

    def _with_first_continue(self, cont: torch.Tensor, terminated: torch.Tensor) -> torch.Tensor:
        """Continue probabilities (N, H+1) with the real flag in the first state, where the rollouts start."""
        s = self.settings
        first = (~terminated[:, -s.starts :]).flatten().to(cont.dtype)
        # With `own_reward` it weights the value of the next state; else it only says whether the rollout counts.
        first = first * s.discount if s.own_reward else first
        return torch.cat([first.unsqueeze(1), cont[:, 1:]], 1)

    def _actor_critic_losses(
        self, rollouts: ImaginedRollouts, scalars: Tensors, start: torch.Tensor | None = None
    ) -> tuple[Losses, dict[str, torch.Tensor]]:
        """Losses of actor and critic (0-d each), metrics; no gradient reaches the world model but through `start`."""
        s = self.settings
        with autocast(self.precision, self.device, cache=False):
            losses, metrics = actor_critic_losses(
                self.actor,
                self.critic,
                rollouts,
                entropy_scale=scalars["entropy"],
                own_reward=s.own_reward,
                critic_start=s.critic_start,
                start=start,
            )
        return mean_losses(losses), {f"controller/{name}": value for name, value in metrics.items()}

    def _actor_critic_gradients(
        self, rollouts: ImaginedRollouts, scalars: Tensors, start: torch.Tensor | None = None
    ) -> ActorCriticGradients:
        """start: (N, F) a leaf with the features where rollouts start, whose gradient is also wanted."""
        losses, metrics = self._actor_critic_losses(rollouts, scalars, start)
        with torch.autocast(self.device.type, enabled=False):  # no autocast in a backward pass
            # One backward pass per loss: with gradients through a rollout, the actor's reaches the critic.
            leaves: list[Any] = [] if start is None else [start]
            found = [
                find_gradients(self._total({name: losses[name]}), [*self.parts[name], *leaves])
                for name in losses
            ]
            joint = join_gradients(found)
            if start is None:
                return ActorCriticGradients(joint, losses, metrics)
            of_start = [gradient for p, gradient in joint.found if p is start]
            trained = [(p, gradient) for p, gradient in joint.found if p is not start]
            total = torch.stack(of_start).sum(0) if of_start else None
            return ActorCriticGradients(Gradients(joint.loss, trained), losses, metrics, total)

    def _replay_value_loss(
        self,
        batch: Batch,
        feature: torch.Tensor,  # (B, T, F)
        returns: torch.Tensor,  # (N, H) of the imagined rollouts
    ) -> Losses:
        """`replay_value`: critic loss on replayed rewards (0-d), whose gradient may reach the world model.

        Nothing if its scale is 0.
        """
        if not self.settings.loss_scales["replay_value"]:
            return {}
        starts = self.settings.starts
        feature = feature if self.settings.replay_value_gradient else feature.detach()
        last = batch.terminated | batch.truncated
        # A stream that was interrupted (restarted environment) is visible only in `is_first` of the next row.
        last = torch.cat([last[:, :-1] | batch.is_first[:, 1:], last[:, -1:]], 1)
        loss = replay_value_loss(
            self.critic,
            self.return_computer,
            feature=feature[:, -starts:],
            reward=self._rewards(batch)[:, -starts:],
            terminated=batch.terminated[:, -starts:],
            last=last[:, -starts:],
            bootstrap=returns[:, 0].detach().unflatten(0, (-1, starts)),
            discount=self.settings.discount,
        )
        return {"replay_value": loss.mean()}

    def _update(
        self,
        compute: Callable[[Batch, Tensors, Tensors], Computed],
        batch: Batch,
        scalars: Tensors,
        noise: Tensors,
    ) -> UpdateResult:
        """One optimizer step with the gradients of a batch."""
        if self.settings.grad_acc_steps > 1:
            return self._accumulated_update(compute, batch, scalars, noise)
        computed = compute(batch, scalars, noise)
        losses, metrics, states, actor_critic = computed[:4]
        extra = None if actor_critic is None else lambda: actor_critic.join().gradients
        loss = computed.total(self._total(losses))
        step_metrics, masked = self._optimizer_step(loss, scalars, extra)
        if actor_critic is not None:
            losses = {**losses, **actor_critic.join().losses}
            metrics = {**metrics, **actor_critic.join().metrics}
        return self._finish(losses, {**metrics, **step_metrics}, batch, states, masked)

    def _accumulated_update(
        self,
        compute: Callable[[Batch, Tensors, Tensors], Computed],
        batch: Batch,
        scalars: Tensors,
        noise: Tensors,
    ) -> UpdateResult:
        """`_update` with the mean gradient of `grad_acc_steps` parts, each of which is freed before the next.

        The scale of the returns is that from before this update, and is updated with the returns of all parts.
        """
        parts = self.settings.grad_acc_steps
        parameters = [p for part in self.parts.values() for p in part]
        gradients: dict[int, tuple[torch.nn.Parameter, torch.Tensor]] = {}
        sums: dict[str, dict[str, torch.Tensor]] = {"losses": {}, "metrics": {}}
        loss = torch.zeros((), device=self.device)
        states: list[State] = []
        with ExitStack() as stack:
            for name in self.trained_parts:
                for module in getattr(self, name).modules():
                    if isinstance(module, RunningNormalizer):
                        stack.enter_context(module.one_update())
            for part, part_noise in zip(split_batch(batch, parts), split_noise(noise, parts, NOISE_DIMS)):
                computed = compute(part, scalars, part_noise)
                found = [find_gradients(computed.total(self._total(computed.losses)), parameters)]
                losses, metrics = dict(computed.losses), dict(computed.metrics)
                if computed.actor_critic is not None:
                    more = computed.actor_critic.join()
                    found.append(more.gradients)
                    losses, metrics = {**losses, **more.losses}, {**metrics, **more.metrics}
                for p, gradient in (pair for each in found for pair in each.found):
                    before = gradients.get(id(p))
                    gradients[id(p)] = (
                        p,
                        gradient / parts if before is None else before[1] + gradient / parts,
                    )
                loss = loss + torch.stack([each.loss for each in found]).sum() / parts
                for kind, values in (("losses", losses), ("metrics", metrics)):
                    for key, value in values.items():
                        sums[kind][key] = sums[kind].get(key, 0.0) + value.detach() / parts
                if computed.states is not None:
                    states.append({key: value.detach() for key, value in computed.states.items()})
        joint = Gradients(loss, list(gradients.values()))
        step_metrics, masked = self._optimizer_step(self._total({}), scalars, lambda: joint)
        joined = {key: torch.cat([state[key] for state in states]) for key in states[0]} if states else None
        return self._finish(sums["losses"], {**sums["metrics"], **step_metrics}, batch, joined, masked)

    def _optimizer_step(
        self, loss: torch.Tensor, scalars: Tensors, extra: Callable[[], Gradients] | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return optimizer_step(
            loss,
            self.optimizers,
            self.parts,
            guard=self.guard,
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=self.settings.max_grad_norm or None,
            clip_norms=self.clip_norms,
            extra_gradients=extra,
        )

    def _finish(
        self,
        losses: Losses,
        metrics: dict[str, torch.Tensor],
        batch: Batch,
        states: State | None,  # latents to write back
        masked: torch.Tensor,
    ) -> UpdateResult:
        """What follows an optimizer step: the slow critic, metrics, latents."""
        if "critic" in losses:
            self.critic.update_slow(self.settings.slow_critic_rate)
        for name, value in losses.items():
            part = "controller/" if name in CONTROLLER_LOSSES else ""
            metrics[f"{part}loss/{name}"] = value.detach()
        return UpdateResult(metrics, self._latents_to_store(batch, states, masked))

    def _total(self, losses: Losses) -> torch.Tensor:
        if not losses:
            return torch.zeros((), device=self.device)
        return total_loss(losses, {name: self.settings.loss_scales[name.split("/")[0]] for name in losses})

    def _latents_to_store(
        self, batch: Batch, states: State | None, masked: torch.Tensor
    ) -> dict[str, torch.Tensor] | None:
        if states is None or "deter" not in batch:
            return None
        context = self.settings.replay_context
        fresh = self._latent_columns({key: value.detach() for key, value in states.items()})
        # A masked update may contain non-finite values: keep the stored latents.
        return {key: torch.where(masked > 0, batch[key][:, context:], value) for key, value in fresh.items()}

    def report(self, batch: Batch) -> dict[str, Any]:
        return dreamer_report(self, batch)

    def get_state(self) -> dict[str, Any]:
        return {"guard": self.guard.state_dict()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        if "guard" in state:
            self.guard.load_state_dict(state["guard"])
