"""TD-MPC2 (Hansen, Su, Wang 2024; nicklashansen/tdmpc2) and, as a configuration, TD-MPC (2022).

A latent model without a decoder is trained on short replayed sequences. It predicts the next latent, the
reward and an ensemble of Q-values, all on latents of its own rollout (`_model_losses`). The policy maximizes
the Q-values (`_train_policy`) and proposes action sequences. Acting plans in the model with MPPI (`plan`).

The hook `update` does one step of the model, one of the policy and one of the target networks.
`update_world_model` and `update_controller` do the two halves separately.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from rl_lab.components.controllers.tdmpc import choose_pair
from rl_lab.components.nn.actions import ActionEncoder, make_policy, stored_action
from rl_lab.components.nn.ensemble import Weights
from rl_lab.components.nn.fast_path import compiling, fast_path, resolve_fast_path
from rl_lab.components.nn.moving_averages import SlowCopy
from rl_lab.components.nn.precision import autocast, resolve_precision
from rl_lab.components.nn.training_step import (
    AverageGradients,
    NonFiniteGuard,
    keep_gradients,
    optimizer_step,
)
from rl_lab.launch.runtime import tensor_float
from rl_lab.records import ActMode, Batch, BatchSpec, Hook, Imagined, ImaginedStep, NoiseSpec, UpdateResult
from rl_lab.workflows.base import PhaseConfig, PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.tdmpc.losses import Losses, RunningScale, over_time, policy_loss, td_target, total_loss
from rl_lab.workflows.tdmpc.planning_model import CastCopy, LatentModel, control
from rl_lab.workflows.tdmpc.settings import TDMPCSettings

Tensors = Mapping[str, torch.Tensor]
Observations = Mapping[str, torch.Tensor]
Acted = tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class TaskRows:
    """Tasks of B rows. With a single task there is only a discount."""

    embedding: tuple[torch.Tensor, ...]  # empty, or one (B, D)
    mask: torch.Tensor | None  # (B, A): dimensions of the action that the task uses
    discount: torch.Tensor  # 0-d, or (B,)

    def spread(self, *steps: int) -> tuple[torch.Tensor, ...]:
        """The embedding repeated for each step, (*steps, B, D)."""
        return tuple(part.expand(*steps, *part.shape) for part in self.embedding)


# ---------------------------------------------------------------- acting and imagination


class TDMPCActing(WorldModelWorkflow):
    """TD-MPC without training: planning, acting and imagination.

    Components encoder, dynamics, reward_head and, if needed, termination_head and task_embedding; controllers
    critic, policy, planner.
    """

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = s = TDMPCSettings.from_config(context.config.algorithm)
        self.encoder = context.component("encoder", "forward")
        self.dynamics = context.component("dynamics", "forward")
        self.reward_head = context.component("reward_head", "predict", "loss")
        self.critic = context.controller("critic", "forward", "loss", "value", "target", "update_slow")
        self.policy = context.controller("policy", "sample", "explore")
        self.planner = context.controller("planner", "plan", "noise", "memory")
        self.termination_head = context.component("termination_head", "loss") if s.episodic else None
        self.multi_task = "task" in self.spec.observations
        self.task_embedding = context.component("task_embedding", "project") if self.multi_task else None
        self.action_encoder = ActionEncoder(self.spec.action).to(self.device)
        tasks = self.spec.observations["task"].shape[0] if self.multi_task else 1
        self.discounts = torch.tensor(s.discounts(tasks), device=self.device)
        self.fast = resolve_fast_path(context.config.training.get("fast_path", "auto"), self.device)
        self._set_precision(str(context.config.training.precision))
        self._env_steps = 0  # time of the planner's schedule
        self._written: dict[str, float] = {}  # values of `_act_scalars`, to skip unchanged ones
        self._act_scalars: dict[str, torch.Tensor] = {}

    def _set_precision(self, precision: str) -> None:
        """`auto` on CUDA: updates in float32 with TensorFloat-32 matrix products, planning in bfloat16."""
        dtype = resolve_precision(precision, self.device)
        auto = precision == "auto"
        self.tensor_float = auto and self.device.type == "cuda"
        self.autocast = partial(autocast, torch.float32 if auto else dtype, self.device)
        parts: dict[str, nn.Module] = {
            "dynamics": self.dynamics,
            "reward_head": self.reward_head,
            "policy": self.policy,
            "online": self.critic.online,
        }
        if self.termination_head is not None:
            parts["termination_head"] = self.termination_head
        self.planning_parts = CastCopy(parts, dtype)

    @contextlib.contextmanager
    def _fast(self) -> Iterator[None]:
        with fast_path(self.fast), tensor_float(self.tensor_float):
            yield

    @contextlib.contextmanager
    def _fast_plan(self) -> Iterator[None]:
        """Fast path with torch.compile for the pointwise functions of the planner, which have no kernels."""
        with self._fast(), compiling(self.fast and self.device.type == "cuda"):
            yield

    def _task(self, obs: Observations) -> TaskRows:
        """The tasks of rows (B, …), from their observations or from the state of a dream."""
        if self.task_embedding is None:
            return TaskRows((), None, self.discounts[0])
        one_hot = obs["task"].float()
        return TaskRows((self.task_embedding(one_hot),), obs["action_mask"], one_hot @ self.discounts)

    # ---------------------------------------------------------------- acting

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return {"plan": self.planner.memory(num_envs, self.device)}

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> Acted:
        n = len(is_first)
        if mode.epsilon >= 1.0:  # random actions need no plan
            return self._random(n, mode), self.initial_policy_state(n), {}
        noise = self._draw(self.act_noise(n), mode.generator)
        action, state, extras = self.act_step(obs, policy_state, is_first, noise, self._device_scalars(mode))
        if mode.epsilon > 0.0:
            explore = torch.rand(n, generator=mode.generator, device=self.device) < mode.epsilon
            explore = explore.view(-1, *[1] * (action.ndim - 1))
            action = torch.where(explore, self._random(n, mode), action)
        return action, state, extras

    def act_noise(self, num_envs: int) -> dict[str, NoiseSpec]:
        """Specs of the noise that `act_step` needs."""
        rows = {"policy": self.policy.noise, "value": self.policy.noise}
        return {**self.planner.noise(num_envs, rows), "members": NoiseSpec((self.critic.members,))}

    def act_scalars(self, mode: ActMode) -> dict[str, float]:
        """Scalars of `act_step` that change from call to call."""
        scalars = {"explore": 1.0 if mode.sample else 0.0}
        if self.settings.plan_schedule is not None:
            scalars |= self.settings.plan_schedule.at(self._env_steps)
        return scalars

    @torch.no_grad()
    def act_step(
        self,
        obs: Observations,
        policy_state: PolicyState,
        is_first: torch.Tensor,
        noise: Tensors,
        scalars: Tensors,
    ) -> Acted:
        """A pure function of tensors with fixed shapes: it can be captured as a CUDA graph."""
        with self._fast():
            task = self._task(obs)
            latent = self.encoder(obs, *task.embedding)
        with self._fast_plan():
            action, memory = self.plan(latent, task, policy_state["plan"], is_first, noise, scalars)
        return action, {"plan": memory}, {}

    def plan(
        self,
        latent: torch.Tensor,  # (N, L)
        task: TaskRows,
        memory: torch.Tensor,
        is_first: torch.Tensor,
        noise: Tensors,
        scalars: Tensors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan with MPPI: actions (N, …) in the stored format, and the planner memory for the next step."""
        self.planning_parts.refresh()
        dtype = self.planning_parts.dtype
        parts: dict[str, Any] = self.planning_parts.parts
        model = LatentModel(
            **parts,
            critic=self.critic,
            # Chosen once per plan, so that all iterations of the planner maximize the same value.
            pair=parts["online"].select(choose_pair(noise["members"])),
            task=task.embedding[0] if task.embedding else None,
            mask=task.mask,
            dtype=dtype,
        )
        plan = self.planner.plan(
            model,
            latent.to(dtype),
            memory,
            is_first,
            noise,
            discount=task.discount,
            explore=scalars["explore"],
            mask=task.mask,
            min_std=scalars.get("min_std"),
            horizon=scalars["horizon"].long() if "horizon" in scalars else None,
        )
        return stored_action(plan.action, self.spec.action), plan.memory

    def _random(self, n: int, mode: ActMode) -> torch.Tensor:
        policy = make_policy(self.spec.action)
        noise = torch.rand(n, *policy.noise_shape, generator=mode.generator, device=self.device)
        return policy.random(noise)

    def _draw(
        self, specs: Mapping[str, NoiseSpec], generator: torch.Generator | None
    ) -> dict[str, torch.Tensor]:
        draw = {"normal": torch.randn, "uniform": torch.rand}
        return {
            name: draw[spec.kind](spec.shape, generator=generator, device=self.device)
            for name, spec in specs.items()
        }

    def before_act(self, mode: ActMode) -> None:
        for name, value in self.act_scalars(mode).items():
            if name not in self._act_scalars:
                self._act_scalars[name] = torch.zeros((), device=self.device)
            if self._written.get(name) != value:
                self._act_scalars[name].fill_(value)
                self._written[name] = value

    def _device_scalars(self, mode: ActMode) -> dict[str, torch.Tensor]:
        """`act_scalars` on the device. During CUDA graph capture, `before_act` has already written them."""
        if not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self.before_act(mode)
        return self._act_scalars

    # ---------------------------------------------------------------- imagination

    @torch.no_grad()
    def imagine(
        self,
        *,
        horizon: int,
        batch: Batch | None = None,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> Imagined:
        """An imagined rollout from the last row of each sequence, with the policy's actions (no planning)."""
        if batch is None:
            raise ValueError("imagine() needs a batch to start from")
        state = self.dream_start(batch, generator=generator)
        task = self._task(state)
        latents, actions, rewards, ends = [state["latent"]], [], [], []
        for _ in range(horizon):
            spec = batched(self.policy.noise, len(state["latent"]))
            noise = self._draw({"action": spec}, generator)["action"]
            action = self.policy.sample(state["latent"], noise, *task.embedding, mask=task.mask)
            actions.append(stored_action(action, self.spec.action))
            state, dreamed = self.dream_step(state, actions[-1])
            latents.append(state["latent"])
            rewards.append(dreamed.reward)
            ends.append(dreamed.terminated)
        zeros = torch.zeros_like(rewards[0])
        return Imagined(
            {"latent": torch.stack(latents, 1)},
            torch.stack(actions, 1),
            reward=torch.stack([zeros, *rewards], 1),
            cont=1.0 - torch.stack([zeros, *ends], 1),
        )

    @torch.no_grad()
    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        obs = {key: value[:, -1] for key, value in batch.obs.items()}
        task = {key: obs[key] for key in ("task", "action_mask") if self.multi_task}
        latent = self.encoder(obs, *self._task(obs).embedding)
        return {"latent": latent, **self.initial_policy_state(len(latent)), **task}

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        n = len(state["latent"])
        is_first = torch.zeros(n, dtype=torch.bool, device=self.device)
        noise = self._draw(self.act_noise(n), mode.generator)
        with self._fast_plan():
            action, memory = self.plan(
                state["latent"], self._task(state), state["plan"], is_first, noise, self._device_scalars(mode)
            )
        return action, {**state, "plan": memory}

    @torch.no_grad()
    def dream_step(
        self, state: PolicyState, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[PolicyState, ImaginedStep]:
        task = self._task(state).embedding
        step = control(self.action_encoder(action), *task)
        reward = self.reward_head.predict(state["latent"], step)
        latent = self.dynamics(state["latent"], step)
        ends = torch.zeros_like(reward)
        if self.termination_head is not None:
            ends = self.termination_head.predict(latent, *task)
        return {**state, "latent": latent}, ImaginedStep(reward, ends)


def batched(spec: NoiseSpec, *batch: int) -> NoiseSpec:
    """`spec` with batch dimensions in front of its shape."""
    return NoiseSpec((*batch, *spec.shape), spec.kind)


# ---------------------------------------------------------------- training

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
        self.average_gradients: AverageGradients = keep_gradients

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, Hook]:
        s = self.settings
        size, steps, members = s.batch_size, s.horizon, self.critic.members
        batch = BatchSpec(size, steps + 1, boundary="within", sampler=s.sampler)
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
        with self._fast():
            latents, metrics, write_back = self._train_model(batch, scalars, noise)
            metrics |= self._train_policy(batch, latents, scalars, noise)
            self._update_targets()
        return UpdateResult(metrics, write_back)

    def _update_world_model(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self._fast():
            _, metrics, write_back = self._train_model(batch, scalars, noise)
            self._update_targets()
        return UpdateResult(metrics, write_back)

    def _update_controller(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        with self._fast():
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
        with self.autocast():
            losses, latents, error, metrics = self._model_losses(batch, noise)
        # The weights of prioritized replay are the same in every row of a sequence.
        weight = batch["weight"][:, 0] if "weight" in batch else None
        loss = total_loss(losses, s.loss_scales, limit=s.loss_limit, weight=weight)
        step_metrics, _ = optimizer_step(
            loss,
            self.model_optimizers,
            self.model_parts,
            guard=self.guard,
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=s.max_grad_norm or None,
            average_gradients=self.average_gradients,
        )
        metrics |= {f"loss/{name}": value.detach().mean() for name, value in losses.items()}
        metrics |= step_metrics
        priority = {"priority": error.clamp(max=PRIORITY_LIMIT).unsqueeze(1)} if "priority" in batch else None
        return latents.detach(), metrics, priority

    def _model_losses(
        self, batch: Batch, noise: Tensors
    ) -> tuple[Losses, torch.Tensor, torch.Tensor, Metrics]:
        """Model objective on a rollout from the first latent: Σ_t ρ^t (consistency + reward + value losses).

        returns: losses (B,) each; latents (H + 1, B, L) with gradient; |TD error| per sequence (B,); metrics
        """
        obs, task = self._rows(batch)
        reward, terminated = batch.reward.t()[1:], batch.terminated.t()[1:]
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
        losses = {name: over_time(loss, self.model_weights) for name, loss in steps.items()}
        if self.termination_head is not None:
            ends = self.termination_head(latents[1:], *task.spread(self.settings.horizon))
            losses["termination"] = self.termination_head.loss(ends, terminated.float()).mean(0)
        with torch.no_grad():
            error = (self.critic.mean(logits) - target).abs().sum(0)  # over the members
            metrics = {"target_mean": target.mean(), "td_error": error.mean() / self.critic.members}
        return losses, latents, over_time(error, self.policy_weights[:-1]), metrics

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
        scale = self.scale.update(value.detach()[0]) if s.scale_values else self.scale.value
        loss = policy_loss(value / scale, entropy, scalars["entropy"], self.policy_weights)
        step_metrics, _ = optimizer_step(
            loss,
            [self.policy_optimizer],
            self.policy_parts,
            guard=self.policy_guard,
            learning_rate_scale=scalars["learning_rate_scale"],
            max_grad_norm=s.max_grad_norm or None,
            average_gradients=self.average_gradients,
        )
        metrics = {
            "loss": step_metrics["loss"],
            "entropy": entropy.detach().mean(),
            "value_mean": value.detach().mean(),
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
        """Open-loop error of latent and reward at the end of a sequence, predicted from its first row."""
        obs, task = self._rows(batch)
        latents = self._roll_out(self._encode(self.encoder, obs, task, {}, 0), batch, task)
        truth = self._encode(self.encoder, obs, task, {}, slice(1, None))
        rewards = self.reward_head.predict(latents[:-1], self._controls(batch, task))
        return {
            "open_loop_error/latent": float((latents[-1] - truth[-1]).square().mean()),
            "open_loop_error/reward": float((rewards[-1] - batch.reward[:, -1]).square().mean()),
        }

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
