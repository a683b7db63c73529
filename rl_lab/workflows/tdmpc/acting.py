"""Acting and imagination of TD-MPC: planning in the latent model with MPPI (`TDMPCActing.plan`)."""

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
from rl_lab.components.nn.fast_path import compiling
from rl_lab.records import ActMode, Batch, ImaginedStep, NoiseSpec
from rl_lab.utils.device import autocast, resolve_precision, tensor_float
from rl_lab.workflows.base import PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
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


class TDMPCActing(WorldModelWorkflow):
    """TD-MPC without training: planning, acting and imagination.

    Components encoder, dynamics, reward_head and, if needed, termination_head and task_embedding; controllers
    critic, policy, planner.
    """

    settings_type: type[TDMPCSettings] = TDMPCSettings
    imagined_state = ("latent",)

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = s = self.settings_type.from_config(context.config.algorithm)
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
        self.fast = context.use_fast_path()
        self.action_encoder.fast = self.fast
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
    def _products(self) -> Iterator[None]:
        """The precision of float32 matrix products."""
        with tensor_float(self.tensor_float):
            yield

    @contextlib.contextmanager
    def _planning(self) -> Iterator[None]:
        """As `_products`, with torch.compile for the pointwise functions of the planner, which have no kernels."""
        with self._products(), compiling(self.fast and self.device.type == "cuda"):
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
        with self._products():
            task = self._task(obs)
            latent = self.encoder(obs, *task.embedding)
        with self._planning():
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
    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        rows = torch.arange(len(batch.reward), device=self.device)
        last = torch.full_like(rows, batch.reward.shape[1] - 1)
        if batch.mask is not None:  # padded on the right
            last = batch.mask.sum(1) - 1
        obs = {key: value[rows, last] for key, value in batch.obs.items()}
        task = {key: obs[key] for key in ("task", "action_mask") if self.multi_task}
        latent = self.encoder(obs, *self._task(obs).embedding)
        return {"latent": latent, **self.initial_policy_state(len(latent)), **task}

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        n = len(state["latent"])
        is_first = torch.zeros(n, dtype=torch.bool, device=self.device)
        noise = self._draw(self.act_noise(n), mode.generator)
        with self._planning():
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
