"""TD-MPC2 (Hansen, Su, Wang 2024; nicklashansen/tdmpc2) and, as a configuration, TD-MPC (2022).

A latent model without a decoder is trained on short replayed sequences. It predicts the next latent, the
reward and an ensemble of Q-values, all on latents of its own rollout (`_model_losses`). The policy maximizes
the Q-values (`_train_policy`) and proposes action sequences. Acting plans in the model with MPPI (acting.py).

The hook `update` does one step of the model, one of the policy and one of the target networks.
`update_world_model` and `update_controller` do the two halves separately.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from rl_lab.components.controllers.tdmpc import choose_pair
from rl_lab.components.nn.moving_averages import SlowCopy
from rl_lab.components.nn.normed_mlp import Weights
from rl_lab.components.nn.training_step import (
    NonFiniteGuard,
    mean_of_parts,
    optimizer_step,
    split_batch,
    split_noise,
)
from rl_lab.records import Batch, BatchSpec, Hook, NoiseSpec, UpdateResult
from rl_lab.workflows.base import PhaseConfig
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.tdmpc.acting import Observations, TaskRows, TDMPCActing, Tensors, batched
from rl_lab.workflows.tdmpc.losses import (
    Losses,
    RealRows,
    RunningScale,
    mean_over,
    over_time,
    policy_loss,
    td_target,
    total_loss,
)
from rl_lab.workflows.tdmpc.planning_model import control

Metrics = dict[str, torch.Tensor]
PRIORITY_LIMIT = 1e4  # nicklashansen/tdmpc src/algorithm/tdmpc.py


class TDMPCWorkflow(TDMPCActing):
    """TD-MPC with the parts of `TDMPCActing`. Optimizer `policy` trains the policy, all others the model."""

    phase_settings = ("algorithm.entropy", "algorithm.learning_rate")

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)
        s = self.settings
        steps = torch.arange(s.horizon + 1, device=self.device)
        self.policy_weights = s.rho**steps
        self.model_weights = self.policy_weights[:-1] / s.horizon
        names = ("encoder", "dynamics", "reward_head", "critic", "termination_head", "task_embedding")
        modules = {name: getattr(self, name) for name in names}
        self.model_parts = {
            name: list(module.parameters()) for name, module in modules.items() if module is not None
        }
        self.policy_parts = {"policy": list(self.policy.parameters())}
        model_optimizers = {name: o for name, o in context.optimizers.items() if name != "policy"}
        context.check_trained(self.model_parts, model_optimizers)
        self.model_optimizers = list(model_optimizers.values())
        self.policy_optimizer = context.optimizer("policy")
        context.check_trained(self.policy_parts, {"policy": self.policy_optimizer}, "policy")
        self.slow_encoder = SlowCopy(self.encoder).to(self.device) if s.target_encoder else None
        self.scale = RunningScale().to(self.device)
        self.guard = NonFiniteGuard().to(self.device)
        self.policy_guard = NonFiniteGuard().to(self.device)

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, Hook]:
        s = self.settings
        size, steps, members = s.batch_size, s.horizon, self.critic.members
        batch = BatchSpec(size, steps + 1, boundary=s.boundary, sampler=s.sampler, least=2)
        shift = {"shift": NoiseSpec((steps + 1, size, 2))} if self.encoder.augments else {}
        model = {
            **shift,
            "target_members": NoiseSpec((members,)),
            "target_action": batched(self.policy.noise, steps, size),
        }
        if self.critic.dropout > 0:
            model["dropout"] = NoiseSpec((members, steps * size, self.critic.online.units))
        policy = {
            "members": NoiseSpec((members,)),
            "action": batched(self.policy.noise, steps + 1, size),
        }
        make = partial(Hook, batch=batch, scalars=self._scalars)
        return {
            "update": make(self._update, noise={**model, **policy}),
            "update_world_model": make(self._update_world_model, noise=model),
            "update_controller": make(
                self._update_controller, noise={**shift, **policy}, prefix="controller"
            ),
        }

    def _scalars(self, phase: PhaseConfig, counters: Mapping[str, int]) -> dict[str, float]:
        self._env_steps = int(counters.get("env_steps", 0))
        learning_rate = self.phase_value(phase, "algorithm.learning_rate")
        return {
            "entropy": self.phase_value(phase, "algorithm.entropy"),
            # Each optimizer keeps its own rate; a phase that changes the base rate scales all of them.
            "learning_rate_scale": learning_rate / self.settings.learning_rate,
        }

    def _update(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self._products():
            latents, metrics, write_back = self._train_model(batch, scalars, noise)
            metrics |= self._train_policy(batch, latents, scalars, noise)
            self._update_targets()
        return UpdateResult(metrics, write_back)

    def _update_world_model(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self._products():
            _, metrics, write_back = self._train_model(batch, scalars, noise)
            self._update_targets()
        return UpdateResult(metrics, write_back)

    def _update_controller(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self._products():
            with torch.no_grad(), self.autocast():
                obs, task = self._rows(batch)
                latents = self._roll_out(self._encode(self.encoder, obs, task, noise, 0), batch, task)
            return UpdateResult(self._train_policy(batch, latents, scalars, noise))

    # ---------------------------------------------------------------- model

    def _train_model(
        self, batch: Batch, scalars: Tensors, noise: Tensors
    ) -> tuple[torch.Tensor, Metrics, dict[str, torch.Tensor] | None]:
        """One gradient step of encoder, dynamics, heads and critic.

        returns: detached latents of the rollout (H + 1, B, L); metrics; new priorities of the batch
        """
        s = self.settings
        rolled: list[torch.Tensor] = []
        errors: list[torch.Tensor] = []

        def loss_of(part: Batch, part_noise: Tensors) -> tuple[torch.Tensor, Metrics]:
            with self.autocast():
                losses, latents, error, metrics = self._model_losses(part, part_noise)
            rolled.append(latents.detach())
            errors.append(error)
            # The weights of prioritized replay are the same in every row of a sequence.
            weight = part["weight"][:, 0] if "weight" in part else None
            loss = total_loss(losses, s.loss_scales, limit=s.loss_limit, weight=weight)
            return loss, metrics | {f"loss/{name}": value.detach().mean() for name, value in losses.items()}

        shares = zip(split_batch(batch, s.grad_acc_steps), self._split_noise(noise))
        parameters = [p for part in self.model_parts.values() for p in part]
        loss, metrics = mean_of_parts([partial(loss_of, *share) for share in shares], parameters)
        latents, error = torch.cat(rolled, 1), torch.cat(errors)
        step_metrics, _ = optimizer_step(
            loss,
            self.model_optimizers,
            self.model_parts,
            guard=self.guard,
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=s.max_grad_norm or None,
        )
        metrics |= step_metrics
        priority = {"priority": error.clamp(max=PRIORITY_LIMIT).unsqueeze(1)} if "priority" in batch else None
        return latents, metrics, priority

    def _split_noise(self, noise: Tensors) -> list[dict[str, torch.Tensor]]:
        """The model's noise for each part of the batch (`algorithm.grad_acc_steps`)."""
        parts = self.settings.grad_acc_steps
        if parts == 1:
            return [dict(noise)]
        dims: dict[str, int | None] = {"shift": 1, "target_action": 1, "target_members": None, "dropout": 2}
        mine = {name: value for name, value in noise.items() if name in dims}
        if "dropout" in mine:  # (members, H · B, units)
            mine["dropout"] = mine["dropout"].unflatten(1, (self.settings.horizon, -1))
        shares = split_noise(mine, parts, dims)
        return [{k: v.flatten(1, 2) if k == "dropout" else v for k, v in share.items()} for share in shares]

    def _model_losses(
        self, batch: Batch, noise: Tensors
    ) -> tuple[Losses, torch.Tensor, torch.Tensor, Metrics]:
        """Model objective on a rollout from the first latent: Σ_t ρ^t (consistency + reward + value losses).

        returns: losses (B,) each; latents (H + 1, B, L) with gradient; |TD error| per sequence (B,); metrics
        """
        obs, task = self._rows(batch)
        reward, terminated = batch.reward.t()[1:], batch.terminated.t()[1:]
        rows = RealRows.of(batch)
        real = None if rows is None else rows.steps
        with torch.no_grad():
            next_latents = self._encode(self.encoder, obs, task, noise, slice(1, None))
            target_latents = next_latents
            if self.slow_encoder is not None:
                target_latents = self._encode(self.slow_encoder.network, obs, task, noise, slice(1, None))
            value = self._target_value(next_latents, task, noise)
            target = td_target(reward, terminated, value, task.discount)
        latents = self._roll_out(self._encode(self.encoder, obs, task, noise, 0), batch, task)
        controls = self._controls(batch, task)
        logits = self.critic(latents[:-1], controls, noise.get("dropout"))  # (E, H, B, bins)
        steps = {
            "consistency": (latents[1:].float() - target_latents.float()).square().mean(-1),
            "reward": self.reward_head.loss(self.reward_head(latents[:-1], controls), reward),
            "value": self.critic.loss(logits, target).mean(0),
        }
        losses = {name: over_time(loss, self.model_weights, real) for name, loss in steps.items()}
        if self.termination_head is not None:
            ends = self.termination_head(latents[1:], *task.spread(self.settings.horizon))
            end_loss = self.termination_head.loss(ends, terminated.float())
            losses["termination"] = (end_loss if real is None else end_loss * real).mean(0)
        with torch.no_grad():
            error = (self.critic.mean(logits) - target).abs().sum(0)  # over the members
            metrics = {
                "target_mean": mean_over(target, real),
                "td_error": mean_over(error, real) / self.critic.members,
            }
        return losses, latents, over_time(error, self.policy_weights[:-1], real), metrics

    def _rows(self, batch: Batch) -> tuple[Observations, TaskRows]:
        """Observations with time first, (T, B, …), and the task of each sequence."""
        obs = {key: value.transpose(0, 1) for key, value in batch.obs.items()}
        return obs, self._task({key: value[0] for key, value in obs.items()})

    def _encode(
        self, encoder: Any, obs: Observations, task: TaskRows, noise: Tensors, rows: int | slice
    ) -> torch.Tensor:
        """Latents of one row, (B, L), or of the H next rows, (H, B, L)."""
        selected = {key: value[rows] for key, value in obs.items()}
        steps = () if isinstance(rows, int) else (self.settings.horizon,)
        return encoder(
            selected, *task.spread(*steps), noise=noise["shift"][rows] if "shift" in noise else None
        )

    def _roll_out(self, latent: torch.Tensor, batch: Batch, task: TaskRows) -> torch.Tensor:
        """Latents (H + 1, B, L) of a rollout with the recorded actions, starting with `latent`."""
        latents = [latent]
        for step in self._controls(batch, task).unbind(0):
            latents.append(self.dynamics(latents[-1], step))
        return torch.stack(latents)

    def _controls(self, batch: Batch, task: TaskRows) -> torch.Tensor:
        """Encoded actions concatenated with the task embedding: (H, B, A + D)."""
        action = self.action_encoder(batch.action.transpose(0, 1)[:-1])
        return control(action, *task.spread(self.settings.horizon))

    def _target_value(self, next_latents: torch.Tensor, task: TaskRows, noise: Tensors) -> torch.Tensor:
        """Target Q of the policy's actions in the next latents, by two members of the slow critic: (H, B)."""
        tasks = task.spread(self.settings.horizon)
        action = self.policy.sample(next_latents, noise["target_action"], *tasks, mask=task.mask)
        return self.critic.target(next_latents, control(action, *tasks), choose_pair(noise["target_members"]))

    # ---------------------------------------------------------------- policy

    def _train_policy(self, batch: Batch, latents: torch.Tensor, scalars: Tensors, noise: Tensors) -> Metrics:
        """One gradient step of the policy on detached latents (H + 1, B, L); the critic gets no gradient."""
        s = self.settings
        with self.autocast():
            with torch.no_grad():
                _, task = self._rows(batch)
            tasks = task.spread(s.horizon + 1)
            pair = self.critic.online.select(choose_pair(noise["members"]))
            if getattr(self.policy, "options", None) is None:
                action, entropy = self.policy.explore(latents, noise["action"], *tasks, mask=task.mask)
                value = self.critic.value(latents, control(action, *tasks), pair)
            else:
                value, entropy = self._expected_value(latents, tasks, pair)
        # The first row of a sequence is real and has a next one, so no mask is needed here.
        scale = self.scale.update(value.detach()[0]) if s.scale_values else self.scale.value
        rows = RealRows.of(batch)
        real = None if rows is None else rows.states
        loss = policy_loss(value / scale, entropy, scalars["entropy"], self.policy_weights, real)
        step_metrics, _ = optimizer_step(
            loss,
            [self.policy_optimizer],
            self.policy_parts,
            guard=self.policy_guard,
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=s.max_grad_norm or None,
        )
        metrics = {
            "loss": step_metrics["loss"],
            "entropy": mean_over(entropy.detach(), real),
            "value_mean": mean_over(value.detach(), real),
            "value_scale": scale.clone(),
            "grad_norm": step_metrics["grad_norm"],
            "nonfinite": step_metrics["nonfinite"],
        }
        return {f"controller/{name}": item for name, item in metrics.items()}

    def _expected_value(
        self, latents: torch.Tensor, tasks: tuple[torch.Tensor, ...], pair: Weights
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Expected Q over all discrete actions, and entropy, (H + 1, B) each.

        The gradient is exact. With a sampled action the critic would be evaluated between one-hot actions.
        """
        (probabilities,) = self.policy.probabilities(latents, *tasks)
        options = probabilities.shape[-1]
        one_hot = torch.eye(options, device=latents.device).view(options, 1, 1, options)
        one_hot = one_hot.expand(-1, *latents.shape[:-1], -1)  # (A, H + 1, B, A)
        with torch.no_grad():
            states, *context = (part.expand(options, *part.shape) for part in (latents, *tasks))
            values = self.critic.value(states, control(one_hot, *context), pair)  # (A, H + 1, B)
        entropy = -(probabilities * probabilities.log()).sum(-1)
        return (probabilities.movedim(-1, 0) * values).sum(0), entropy

    def _update_targets(self) -> None:
        """Update the target networks; project the task embeddings to norm ≤ 1."""
        self.critic.update_slow(self.settings.target_rate)
        if self.slow_encoder is not None:
            self.slow_encoder.update(self.encoder, self.settings.target_rate)
        if self.task_embedding is not None:
            self.task_embedding.project()

    # ---------------------------------------------------------------- report and checkpoint

    @torch.no_grad()
    def report(self, batch: Batch) -> dict[str, Any]:
        """Open-loop error of latent and reward H steps after the first row of each sequence that has them."""
        obs, task = self._rows(batch)
        latents = self._roll_out(self._encode(self.encoder, obs, task, {}, 0), batch, task)
        truth = self._encode(self.encoder, obs, task, {}, slice(1, None))
        rewards = self.reward_head.predict(latents[:-1], self._controls(batch, task))
        rows = RealRows.of(batch)
        real = None if rows is None else rows.steps[-1]
        errors = {
            "latent": (latents[-1] - truth[-1]).square().mean(-1),
            "reward": (rewards[-1] - batch.reward[:, -1]).square(),
        }
        return {f"open_loop_error/{name}": float(mean_over(error, real)) for name, error in errors.items()}

    def weights_loaded(self) -> None:
        if self.slow_encoder is not None:
            self.slow_encoder.update(self.encoder, 1.0)

    def _stateful(self) -> dict[str, torch.nn.Module]:
        names = ("guard", "policy_guard", "scale", "slow_encoder")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def get_state(self) -> dict[str, Any]:
        modules = {name: module.state_dict() for name, module in self._stateful().items()}
        return {**modules, "env_steps": self._env_steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        for name, module in self._stateful().items():
            if name in state:
                module.load_state_dict(state[name])
        self._env_steps = int(state.get("env_steps", 0))
