"""IRIS (Micheli, Alonso, Fleuret 2023) and, with other parts, Δ-IRIS (2024): world models on discrete tokens.

A tokenizer encodes frames as a few tokens, a transformer predicts the next tokens, rewards and ends from
tokens and actions, and an actor-critic learns from imagined trajectories only (policy_loss.py). Each part has
one hook:

    update_tokenizer · update_world_model · update_actor_critic (or update_controller)

The config selects the algorithm by its parts and values: configs/experiment/iris_*.yaml, delta_iris_*.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from rl_lab.components.dynamics.backbones import copy_state
from rl_lab.components.nn.losses import LossWithIntermediateLosses
from rl_lab.components.nn.moving_averages import SlowCopy
from rl_lab.components.nn.training_step import (
    NonFiniteGuard,
    accumulated_loss,
    optimizer_step,
)
from rl_lab.components.representation_learners.tokenizer import no_action, to_frames, to_pixels
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import (
    OBS_PREFIX,
    ActMode,
    Batch,
    BatchSpec,
    Hook,
    ImaginedStep,
    NoiseSpec,
    Spec,
    UpdateResult,
)
from rl_lab.utils.device import autocast, resolve_precision
from rl_lab.workflows.base import PhaseConfig, PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.iris.policy_loss import ImaginedPolicyLoss
from rl_lab.workflows.iris.published import published_weights
from rl_lab.workflows.iris.report import iris_report
from rl_lab.workflows.iris.settings import IrisSettings

Tensors = Mapping[str, torch.Tensor]
Acted = tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]


# ---------------------------------------------------------------- acting and imagination


class IrisActing(WorldModelWorkflow):
    """IRIS and Δ-IRIS without training: acting and imagination.

    Components tokenizer, world_model, return_computer; controller actor_critic.
    """

    settings_type: type[IrisSettings] = IrisSettings
    has_temperature = True
    dream_flush = 20  # frames, as in eloialonso/iris when a person plays
    imagined_state = ("frame",)

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = self.settings_type.from_config(context.config.algorithm)
        self.tokenizer = context.component(
            "tokenizer", "encode", "frame_features", "decode", "policy_view", "compute_loss"
        )
        self.world_model = context.component(
            "world_model", "begin", "advance", "read_pending", "step", "compute_loss"
        )
        self.return_computer = context.component("return_computer", "__call__")
        self.actor_critic = context.controller(
            "actor_critic", "observe", "observe_sequence", "value", "compute_loss"
        )
        precision, s = str(context.config.training.precision), self.settings
        explicit = precision != "auto"
        self.model_dtype = resolve_precision(precision if explicit else s.model_precision, self.device)
        policy_dtype = resolve_precision(precision if explicit else s.policy_precision, self.device)
        self.actor_critic.trunk_dtype = policy_dtype
        self.autocast = partial(autocast, self.model_dtype, self.device)
        self.fast = context.use_fast_path()
        if self.fast and self.device.type == "cuda":
            # CUDA convolutions and the fused kernels are fastest with channels last.
            for part in (self.tokenizer, self.world_model, self.actor_critic):
                part.to(memory_format=torch.channels_last)
        self._check_fit(context)

    def _check_fit(self, context: WorkflowContext) -> None:
        """Raise if tokenizer and world model disagree or imagination exceeds the world model's context."""
        tokenizer, model, s = self.tokenizer, self.world_model, self.settings
        captures = self.device.type == "cuda" and context.config.training.capture
        if captures and getattr(model, "on_host", False):
            raise ConfigError("training.capture must be false: the host steps the real environment")
        for name, theirs, ours in (
            ("tokens", tokenizer.num_tokens, model.tokens),
            ("vocab", tokenizer.vocab, model.vocab),
            ("code", 0 if tokenizer.vocab else tokenizer.quantizer.dim, getattr(model, "code", 0)),
        ):
            if theirs != ours:
                raise ConfigError(
                    f"components.world_model.{name} is {ours}, but the tokenizer has {theirs}: "
                    f"set components.world_model.{name}={theirs}"
                )
        if s.tokenizer.batch_length < getattr(tokenizer, "least_rows", 1):
            raise ConfigError(
                f"algorithm.tokenizer.batch_length is {s.tokenizer.batch_length}, but a loss of the tokenizer compares "
                f"{tokenizer.least_rows} rows: increase it"
            )
        if s.world_model.batch_length > model.blocks:
            raise ConfigError(
                f"algorithm.world_model.batch_length is {s.world_model.batch_length}, but the world model "
                f"has {model.blocks} blocks: increase components.world_model.blocks"
            )
        burn_in = 1 if model.context == 1 else s.actor_critic.batch_length + 1
        if burn_in + s.imagined_frames - 1 > model.blocks:
            raise ConfigError(
                f"algorithm.imagination_horizon is {s.imagination_horizon} after {burn_in} observed frames, "
                f"but the world model has {model.blocks} blocks: "
                "decrease it or increase components.world_model.blocks"
            )

    # ---------------------------------------------------------------- acting

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return dict(self.actor_critic.initial_state(num_envs))

    def collect_mode(self, phase: PhaseConfig) -> ActMode:
        mode = super().collect_mode(phase)
        return mode if mode.epsilon else replace(mode, epsilon=self.settings.collect_epsilon)

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> Acted:
        size = len(is_first)
        if mode.epsilon >= 1.0:  # random actions need no network
            return self._random(size, mode), self.initial_policy_state(size), {}
        keep = (~is_first).float().unsqueeze(-1)
        memory = {key: policy_state[key] * keep for key in ("h", "c")}
        with self.autocast():
            view = self.tokenizer.policy_view(to_frames(obs[self.tokenizer.key]))
        action, memory = self._choose(view.float(), memory, mode)
        return action, memory, {}

    def _choose(
        self, frames: torch.Tensor, memory: PolicyState, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState]:
        memory = self.actor_critic.observe(frames, memory)
        raw, policy = self.actor_critic.raw_policy(memory["h"]), self.actor_critic.policy
        if mode.sample:
            draw = torch.rand if policy.noise_kind == "uniform" else torch.randn
            noise = draw(len(raw), *policy.noise_shape, generator=mode.generator, device=self.device)
            action = policy.sample(raw, noise, mode.temperature)
        else:
            action = policy.mode(raw)
        if mode.epsilon > 0.0:
            explore = torch.rand(len(raw), generator=mode.generator, device=self.device) < mode.epsilon
            explore = explore.view(-1, *[1] * (action.ndim - 1))
            action = torch.where(explore, self._random(len(raw), mode), action)
        return action, memory

    def _random(self, size: int, mode: ActMode) -> torch.Tensor:
        policy = self.actor_critic.policy
        noise = torch.rand(size, *policy.noise_shape, generator=mode.generator, device=self.device)
        return policy.random(noise)

    @torch.no_grad()
    def inspect_policy(self, state: PolicyState) -> dict[str, torch.Tensor]:
        h = state["h"] if "h" in state else state["policy/h"]
        raw = self.actor_critic.raw_policy(h)
        _, entropy = self.actor_critic.policy.log_prob_and_entropy(raw, self.actor_critic.policy.mode(raw))
        return {"value": self.actor_critic.value(h), "entropy": entropy}

    # ---------------------------------------------------------------- imagination

    @torch.no_grad()
    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        """The policy memory in the state excludes the last row, because `dream_act` reads that row first."""
        if not getattr(self.world_model, "dreams", True):
            raise LabError(
                "components.world_model is the real environment, which cannot start from stored rows: "
                "choose another world model to dream"
            )
        rows = min(
            batch.reward.shape[1], self.world_model.context or self.settings.actor_critic.batch_length + 1
        )
        frames = to_frames(batch.obs[self.tokenizer.key])
        with self.autocast():
            view = self.tokenizer.policy_view(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).float()
            state = self.world_model.begin(
                self.tokenizer, frames[:, -rows:], batch.action[:, -rows:], view[:, -1]
            )
        memory = self.actor_critic.initial_state(len(frames))
        for t in range(frames.shape[1] - 1):
            memory = {key: value * (~batch.is_first[:, t, None]) for key, value in memory.items()}
            memory = self.actor_critic.observe(view[:, t], memory)
            if batch.mask is not None:
                memory = {key: value * batch.mask[:, t, None] for key, value in memory.items()}
        memory = {key: value * (~batch.is_first[:, -1, None]) for key, value in memory.items()}
        return {**state, **{f"policy/{key}": value for key, value in memory.items()}}

    @torch.no_grad()
    def dream_observation(self, state: PolicyState) -> dict[str, torch.Tensor]:
        return {self.tokenizer.key: to_pixels(state["frame"])}

    def dreamed_observations(self, spec: Spec) -> list[str]:
        return [self.tokenizer.key]

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        memory = {key: state[f"policy/{key}"] for key in ("h", "c")}
        action, memory = self._choose(state["frame"].float(), memory, mode)
        return action, {**state, **{f"policy/{key}": value for key, value in memory.items()}}

    @torch.no_grad()
    def dream_step(
        self, state: PolicyState, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[PolicyState, ImaginedStep]:
        """Dreams whose memory is full restart it from the current frame."""
        # The cache is written in place, and the caller may use the given state again.
        state = copy_state(state)
        with self.autocast():
            full = self.world_model.full(state)
            if bool(full.any()):
                state = self._restart_memory(state, full)
            noise = torch.rand(
                len(action), self.world_model.step_noise, generator=generator, device=self.device
            )
            state, outcome = self.world_model.step(self.tokenizer, state, action, noise)
        state = {**state, "frame": state["frame"].float()}
        return state, ImaginedStep(
            outcome.reward.float(), outcome.end_chance.float(), self.dream_observation(state)
        )

    def _restart_memory(self, state: PolicyState, which: torch.Tensor) -> PolicyState:
        frame = state["frame"]
        action = no_action(self.spec, (len(frame), 1), self.device)
        fresh = self.world_model.begin(self.tokenizer, frame.unsqueeze(1), action, frame)
        return {
            key: torch.where(which.view(-1, *[1] * (value.ndim - 1)), fresh[key].to(value.dtype), value)
            if key in fresh
            else value
            for key, value in state.items()
        }


# ---------------------------------------------------------------- training

LossAndMetrics = tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]
PARTS = ("tokenizer", "world_model", "actor_critic")


class IrisWorkflow(IrisActing):
    """IRIS or Δ-IRIS with the parts of `IrisActing`; optimizers tokenizer, world_model, actor_critic."""

    phase_settings = ("algorithm.entropy", "algorithm.learning_rate")

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)
        s = self.settings
        # A part without weights to train (a frozen tokenizer, the real environment) has no optimizer and no hook.
        parts = {name: getattr(self, name) for name in PARTS}
        self.modules = {name: part for name, part in parts.items() if any(True for _ in part.parameters())}
        self.optimizers = {name: context.optimizer(name) for name in self.modules}
        for name, module in self.modules.items():
            context.check_trained({name: module.parameters()}, {name: self.optimizers[name]}, name)
        self.guards = {name: NonFiniteGuard().to(self.device) for name in self.modules}
        self.slow = SlowCopy(self.actor_critic).to(self.device) if s.target_rate > 0.0 else None
        self.policy_loss = ImaginedPolicyLoss(
            returns=self.return_computer,
            discount=s.discount,
            entropy=s.entropy,
            mask_ended=s.mask_ended,
            autocast=self.autocast,
            fast=self.fast,
        )

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, Hook]:
        """The hook of the world model is first, because `report` gets a batch of the first hook."""
        s = self.settings
        part, seeds = s.tokenizer, self.world_model.seeds
        codes = self.tokenizer.noise_size(part.batch_size // part.grad_acc_steps, part.batch_length)
        size, frames = s.actor_critic.batch_size, s.imagined_frames
        policy = self.actor_critic.policy
        imagination = {
            "action": NoiseSpec((size, frames, *policy.noise_shape), policy.noise_kind),
            "model": NoiseSpec((size, frames - 1, self.world_model.step_noise)),
        }
        hooks = {
            "update_world_model": Hook(
                self._world_model_step,
                batch=self._batch("world_model", extra_rows=1),
                noise={"dropout": NoiseSpec((s.world_model.grad_acc_steps, seeds))} if seeds else {},
                scalars=self._scalars,
                prefix="train/world_model",
            ),
            "update_tokenizer": Hook(
                self._tokenizer_step,
                batch=self._batch("tokenizer"),
                noise={"codes": NoiseSpec((s.tokenizer.grad_acc_steps, codes))} if codes else {},
                scalars=self._scalars,
                prefix="train/tokenizer",
            ),
            "update_actor_critic": Hook(
                self._actor_critic_step,
                batch=self._batch("actor_critic", extra_rows=1),
                noise=imagination,
                scalars=self._scalars,
                prefix="controller",
            ),
        }
        return {name: hook for name, hook in hooks.items() if name.removeprefix("update_") in self.modules}

    def resolve_hook(self, name: str, phase: str) -> str:
        return "update_actor_critic" if name == "update_controller" else name

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
        def loss(part: Batch, part_noise: Tensors) -> LossAndMetrics:
            with self.autocast():
                return self.tokenizer.compute_loss(part, part_noise.get("codes"))

        return self._train("tokenizer", loss, batch, scalars, noise)

    def _world_model_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        def loss(part: Batch, part_noise: Tensors) -> LossAndMetrics:
            with self.autocast():
                return self.world_model.compute_loss(part, self.tokenizer, part_noise.get("dropout"))

        return self._train("world_model", loss, batch, scalars, noise)

    def _actor_critic_step(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        if self.slow is not None:
            self.slow.update(self.actor_critic, self.settings.target_rate)

        def loss(part: Batch, part_noise: Tensors) -> LossAndMetrics:
            return self.actor_critic.compute_loss(
                part,
                self.tokenizer,
                self.world_model,
                self.policy_loss,
                action_noise=part_noise["action"],
                model_noise=part_noise["model"],
                slow=None if self.slow is None else self.slow.network,
                entropy=scalars["entropy"],
            )

        return self._train("actor_critic", loss, batch, scalars, noise)

    def _train(
        self,
        name: str,
        compute_loss: Callable[[Batch, Tensors], LossAndMetrics],
        batch: Batch,
        scalars: Tensors,
        noise: Tensors,
    ) -> UpdateResult:
        """One gradient step of the part `name` with its loss."""
        settings = getattr(self.settings, name)
        parameters = list(self.modules[name].parameters())

        def total_loss(
            part: Batch, part_noise: dict[str, torch.Tensor]
        ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = compute_loss(part, part_noise)
            losses = {f"loss/{key}": value for key, value in loss.intermediate_losses.items()}
            return loss.loss_total, {**losses, **metrics}

        loss, metrics = accumulated_loss(total_loss, batch, noise, parameters, settings.grad_acc_steps)
        step_metrics, _ = optimizer_step(
            loss,
            [self.optimizers[name]],
            {name: parameters},
            guard=self.guards[name],
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=settings.max_grad_norm or None,
        )
        kept = {key: value for key, value in step_metrics.items() if "/" not in key}
        return UpdateResult({**metrics, **kept})

    # ---------------------------------------------------------------- report and checkpoint

    def report(self, batch: Batch) -> dict[str, Any]:
        return iris_report(self, batch)

    def published_weights(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Weights that the authors' code saved, as a checkpoint of ours; for `load.path` and `Agent.load`."""
        return dict(published_weights(state, self.tokenizer, self.world_model, self.actor_critic))

    def weights_loaded(self) -> None:
        if self.slow is not None:
            self.slow.update(self.actor_critic, 1.0)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"guards": {name: guard.state_dict() for name, guard in self.guards.items()}}
        if self.slow is not None:
            state["slow"] = self.slow.state_dict()
        if hasattr(self.world_model, "get_environment_state"):
            state["environments"] = self.world_model.get_environment_state()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        for name, guard in self.guards.items():
            if name in state.get("guards", {}):
                guard.load_state_dict(state["guards"][name])
        if self.slow is not None and "slow" in state:
            self.slow.load_state_dict(state["slow"])
        if "environments" in state:
            self.world_model.set_environment_state(state["environments"])
