"""IRIS (Micheli, Alonso, Fleuret 2023) and, with other parts, Δ-IRIS (2024): world models that speak in tokens.

A tokenizer turns frames into a few tokens, a transformer learns to continue the sequence of tokens and actions, and an
actor-critic learns only from what that transformer dreams. Three hooks, one for each part:

    update_tokenizer · update_world_model · update_actor_critic

Which of the two algorithms it is, is a matter of parts and numbers: configs/experiment/iris_*.yaml, delta_iris_*.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from rl_lab.components.controllers.imagined_policy_loss import ImaginedPolicyLoss
from rl_lab.components.nn.component_loss import LossWithIntermediateLosses
from rl_lab.components.nn.fast_path import fast_path
from rl_lab.components.nn.guard import NonFiniteGuard
from rl_lab.components.nn.micro_batches import accumulated
from rl_lab.components.nn.slow_copy import SlowCopy
from rl_lab.components.nn.training_step import AverageGradients, keep_gradients, optimizer_step
from rl_lab.records import OBS_PREFIX, Batch, BatchSpec, Hook, NoiseSpec, UpdateResult
from rl_lab.workflows.base import PhaseConfig
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.iris_acting import IrisActing
from rl_lab.workflows.iris_report import iris_report

Tensors = Mapping[str, torch.Tensor]
Found = tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]
PARTS = ("tokenizer", "world_model", "actor_critic")


class IrisWorkflow(IrisActing):
    """Parts as IrisActing says; optimizers tokenizer, world_model, actor_critic."""

    phase_settings = ("algorithm.entropy", "algorithm.learning_rate")

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)
        s = self.settings
        self.modules = {name: getattr(self, name) for name in PARTS}
        self.optimizers = {name: context.optimizer(name) for name in PARTS}
        for name, module in self.modules.items():
            context.check_trained({name: module.parameters()}, {name: self.optimizers[name]}, name)
        self.guards = {name: NonFiniteGuard().to(self.device) for name in PARTS}
        self.average_gradients: AverageGradients = keep_gradients
        self.slow = SlowCopy(self.actor_critic).to(self.device) if s.target_rate > 0.0 else None
        self.policy_loss = ImaginedPolicyLoss(
            returns=self.return_computer,
            discount=s.discount,
            entropy=s.entropy,
            mask_ended=s.mask_ended,
            autocast=self.autocast,
        )

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, Hook]:
        """The world model's comes first: a report is given a batch of the first hook."""
        s = self.settings
        codes, seeds = self.tokenizer.noise, self.world_model.seeds
        size, horizon = s.actor_critic.batch_size, s.imagination_horizon
        policy = self.actor_critic.policy
        dream = {
            "action": NoiseSpec((size, horizon, *policy.noise_shape), policy.noise_kind),
            "model": NoiseSpec((size, horizon - 1, self.world_model.step_noise)),
        }
        shares = s.world_model.grad_acc_steps, s.tokenizer.grad_acc_steps
        return {
            "update_world_model": Hook(
                self._world_model_step,
                batch=self._batch("world_model", extra_rows=1),
                noise={"dropout": NoiseSpec((shares[0], seeds))} if seeds else {},
                scalars=self._scalars,
                prefix="train/world_model",
            ),
            "update_tokenizer": Hook(
                self._tokenizer_step,
                batch=self._batch("tokenizer"),
                noise={"codes": NoiseSpec((shares[1], codes))} if codes else {},
                scalars=self._scalars,
                prefix="train/tokenizer",
            ),
            "update_actor_critic": Hook(
                self._actor_critic_step,
                batch=self._batch("actor_critic", extra_rows=1),
                noise=dream,
                scalars=self._scalars,
                prefix="controller",
            ),
        }

    def _batch(self, name: str, extra_rows: int = 0) -> BatchSpec:
        part = getattr(self.settings, name)
        rows = part.batch_length + extra_rows
        boundary: Literal["within", "pad"] = "within" if rows == 1 else "pad"
        keys = (OBS_PREFIX + self.tokenizer.key, "action", "reward", "terminated", "is_first")
        return BatchSpec(
            part.batch_size, rows, boundary=boundary, pad=part.pad, sampler=part.sampler, keys=keys
        )

    def _scalars(self, phase: PhaseConfig, counters: Mapping[str, int]) -> dict[str, float]:
        learning_rate = self.phase_value(phase, "algorithm.learning_rate")
        return {
            "entropy": self.phase_value(phase, "algorithm.entropy"),
            "learning_rate_scale": learning_rate / self.settings.learning_rate,
        }

    def _tokenizer_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        def loss(share: Batch, numbers: Tensors) -> Found:
            with self.autocast():
                return self.tokenizer.compute_loss(share, numbers.get("codes"))

        return self._train("tokenizer", loss, batch, scalars, noise)

    def _world_model_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        def loss(share: Batch, numbers: Tensors) -> Found:
            with self.autocast():
                return self.world_model.compute_loss(share, self.tokenizer, numbers.get("dropout"))

        return self._train("world_model", loss, batch, scalars, noise)

    def _actor_critic_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        if self.slow is not None:
            self.slow.update(self.actor_critic, self.settings.target_rate)

        def loss(share: Batch, numbers: Tensors) -> Found:
            return self.policy_loss.compute_loss(
                share,
                self.actor_critic,
                self.tokenizer,
                self.world_model,
                action_noise=numbers["action"],
                model_noise=numbers["model"],
                slow=None if self.slow is None else self.slow.network,
                entropy=scalars["entropy"],
            )

        return self._train("actor_critic", loss, batch, scalars, noise)

    def _train(
        self,
        name: str,
        compute_loss: Callable[[Batch, Tensors], Found],
        batch: Batch,
        scalars: Tensors,
        noise: Tensors,
    ) -> UpdateResult:
        """One step of one part, from its `compute_loss`."""
        part = getattr(self.settings, name)
        parameters = list(self.modules[name].parameters())

        def flat(
            share: Batch, numbers: dict[str, torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found, metrics = compute_loss(share, numbers)
            losses = {f"loss/{key}": value for key, value in found.intermediate_losses.items()}
            return found.loss_total, {**losses, **metrics}

        with fast_path(self.fast):
            loss, metrics = accumulated(flat, batch, noise, parameters, part.grad_acc_steps)
        step_metrics, _ = optimizer_step(
            loss,
            [self.optimizers[name]],
            {name: parameters},
            guard=self.guards[name],
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=part.max_grad_norm or None,
            average_gradients=self.average_gradients,
        )
        kept = {key: value for key, value in step_metrics.items() if "/" not in key}
        return UpdateResult({**metrics, **kept})

    # ---------------------------------------------------------------- looking, remembering

    def report(self, batch: Batch) -> dict[str, Any]:
        return iris_report(self, batch)

    def weights_loaded(self) -> None:
        if self.slow is not None:
            self.slow.update(self.actor_critic, 1.0)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"guards": {name: guard.state_dict() for name, guard in self.guards.items()}}
        if self.slow is not None:
            state["slow"] = self.slow.state_dict()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        for name, guard in self.guards.items():
            if name in state.get("guards", {}):
                guard.load_state_dict(state["guards"][name])
        if self.slow is not None and "slow" in state:
            self.slow.load_state_dict(state["slow"])
