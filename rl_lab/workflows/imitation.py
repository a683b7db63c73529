"""What imitation learning shares: windows of demonstrations, limits of the data, acting in chunks, scripted experts.

An action sequence of `horizon` actions begins at the first of `observation_horizon` observations. The policy executes
`action_horizon` actions of it, from the last observation on, and then plans again:

    observations     o_0  o_1
    predicted        a_0  a_1  a_2  …  a_15        horizon 16
    executed              a_1  a_2  …  a_8         action_horizon 8
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rl_lab.components.nn.normalizer import LimitsNormalizer
from rl_lab.components.nn.training_step import NonFiniteGuard, mean_of_parts, optimizer_step, split_noise
from rl_lab.errors import ConfigError
from rl_lab.records import (
    OBS_PREFIX,
    ActMode,
    AnyHook,
    Batch,
    BatchSpec,
    CollectResult,
    Hook,
    NoiseSpec,
    TransformHook,
    UpdateResult,
)
from rl_lab.utils.device import autocast, resolve_precision, tensor_float
from rl_lab.utils.ranks import mean_over_ranks
from rl_lab.workflows.base import PhaseConfig, PolicyState, WorldModelWorkflow
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.settings import Settings, check_parts

Tensors = Mapping[str, torch.Tensor]
HISTORY = "history/"  # prefix of the last observations in the policy state


@dataclass(frozen=True)
class ImitationSettings(Settings):
    """Keys that every algorithm of this kind has."""

    learning_rate: float
    warmup_updates: int
    updates: int
    batch_size: int
    horizon: int
    observation_horizon: int
    action_horizon: int
    average_power: float
    average_limit: float
    grad_acc_steps: int = field(default=1, kw_only=True)

    def check(self) -> None:
        if min(self.observation_horizon, self.action_horizon, self.updates, self.batch_size) < 1:
            raise ConfigError(
                "algorithm.observation_horizon, action_horizon, updates and batch_size must be at least 1"
            )
        check_parts(self.grad_acc_steps, self.batch_size)
        needed = self.observation_horizon - 1 + self.action_horizon
        if self.horizon < needed:
            raise ConfigError(
                f"algorithm.horizon is {self.horizon}: it must be at least {needed}, observation_horizon - 1 + action_horizon"
            )


@dataclass(frozen=True)
class Windows:
    """A batch of B windows."""

    obs: dict[str, torch.Tensor]  # name -> (B · To, …)
    action: torch.Tensor  # (B, T, A), normalized
    weight: torch.Tensor  # (B,), mean 1

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """(B,) -> 0-d"""
        return (self.weight * loss).mean()

    def split(self, parts: int) -> list[Windows]:
        """Equal parts; the weights of all together have mean 1."""
        obs = {name: value.chunk(parts) for name, value in self.obs.items()}
        action, weight = self.action.chunk(parts), self.weight.chunk(parts)
        return [Windows({k: v[i] for k, v in obs.items()}, action[i], weight[i]) for i in range(parts)]


class ImitationWorkflow(WorldModelWorkflow):
    """Components encoder and normalizer (of actions); controller `policy`; `expert`, if a phase collects with it.

    A subclass has `settings_type`, `_loss`, `_noise` and `_plan`.
    """

    settings_type: type[ImitationSettings] = ImitationSettings
    countdown = (
        "left"  # of the policy state: only where it is 0, or at a first observation, `act` draws numbers
    )
    collect_policies = ("agent", "expert")

    def _bind_context(self, context: WorkflowContext) -> None:
        self.spec = context.spec
        self.device = torch.device(context.device)
        self.settings = self.settings_type.from_config(context.config.algorithm)
        if self.spec.action.kind != "continuous":
            raise ConfigError(
                f"{type(self).__name__} needs continuous actions, not the {self.spec.action.kind} ones of {self.spec.name}"
            )
        self.encoder = context.component("encoder", "forward", "measure", "update_slow")
        self.normalizer = context.component("normalizer", "forward", "inverse", "measure")
        self.policy: Any = context.controller("policy", "forward", "update_slow")
        self.expert = context.controller_manager.get("expert")
        context.use_fast_path()
        precision = str(context.config.training.precision)
        # `auto` on CUDA: float32 with TensorFloat-32 products.
        auto = precision == "auto"
        dtype = torch.float32 if auto else resolve_precision(precision, self.device)
        self.autocast = partial(autocast, dtype, self.device)
        self.products = partial(tensor_float, auto and self.device.type == "cuda")

    def initialize(self, context: WorkflowContext) -> None:
        self._bind_context(context)
        self.optimizer = context.optimizer("model")
        # The averages are buffers; these are the weights that are trained.
        self.parts = {
            name: parameters
            for name, module in (("encoder", self.encoder), ("policy", self.policy))
            if (parameters := list(module.parameters()))
        }
        context.check_trained(self.parts, {"model": self.optimizer})
        self.guard = NonFiniteGuard().to(self.device)
        self._updates = 0
        self._measured = False

    # ---------------------------------------------------------------- hooks

    def hooks(self) -> dict[str, AnyHook]:
        s = self.settings
        noise = {"start": NoiseSpec((s.batch_size,)), **self._noise()}
        if s.grad_acc_steps > 1 and "dropout" in noise:
            noise["dropout"] = NoiseSpec((s.grad_acc_steps, *noise["dropout"].shape))
        if self.encoder.images:
            shape = (len(self.encoder.images), s.batch_size * s.observation_horizon, 2)
            noise["crop"] = NoiseSpec(shape)
        columns = [OBS_PREFIX + name for name in self.spec.observations]
        batch = BatchSpec(
            s.batch_size,
            s.horizon + 1,
            boundary="pad",
            # As published: at most action_horizon - 1 actions are padding. One more row is the last observation.
            least=s.horizon - s.action_horizon + 2,
            keys=(*columns, "action", "terminated", "truncated", "is_first"),
        )
        return {
            "update": Hook(self._update, batch=batch, scalars=self._scalars, noise=noise),
            "measure": TransformHook(self._measure),
        }

    def resolve_hook(self, name: str, phase: str) -> str:
        return "update" if name in ("update_world_model", "update_controller") else name

    @torch.no_grad()
    def _measure(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Widen the limits of observations and actions to these rows. The last row of an episode has no action."""
        self.encoder.measure({name: value.flatten(0, 1) for name, value in batch.obs.items()})
        self.normalizer.measure(batch.action[~(batch.terminated | batch.truncated)])
        return {}

    def _scalars(self, phase: PhaseConfig, counters: Mapping[str, int]) -> dict[str, float]:
        if not self._measured:
            for part in (*self.normalizer.modules(), *self.encoder.modules()):
                if isinstance(part, LimitsNormalizer):
                    part.share()
            if not (self.normalizer.measured and self.encoder.measured):
                raise ConfigError(
                    "training.phases: the hook `measure` must run before `update`, in a phase of type offline"
                )
            self._measured = True
        s, count = self.settings, self._updates
        self._updates += 1
        return {
            "learning_rate_scale": cosine_schedule(count, s.warmup_updates, s.updates),
            "average_rate": 1.0 - average_decay(count, s.average_power, s.average_limit),
        }

    def _update(self, batch: Batch, scalars: Tensors, noise: Tensors) -> UpdateResult:
        parts = self.settings.grad_acc_steps
        with self.products():
            windows = self._windows(batch, noise["start"]).split(parts)
            shares = split_noise(noise, parts, {"crop": 1})
            if parts > 1 and "dropout" in noise:  # seeds for each part
                shares = [{**share, "dropout": share["dropout"][0]} for share in shares]
            losses = [partial(self._loss_of_part, *share) for share in zip(windows, shares)]
            loss, _ = mean_of_parts(losses, [p for part in self.parts.values() for p in part])
            metrics, _ = optimizer_step(
                loss,
                [self.optimizer],
                self.parts,
                guard=self.guard,
                learning_rate_scale=scalars["learning_rate_scale"],
            )
            self.encoder.update_slow(scalars["average_rate"])
            self.policy.update_slow(scalars["average_rate"])
        return UpdateResult({**metrics, "learning_rate_scale": scalars["learning_rate_scale"].clone()})

    def _loss_of_part(self, windows: Windows, noise: Tensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with self.autocast():
            features = self._features(windows.obs, noise.get("crop"))
            return windows.mean(self._loss(windows, features, noise)), {}

    @abc.abstractmethod
    def _loss(self, windows: Windows, features: torch.Tensor, noise: Tensors) -> torch.Tensor:
        """Loss of each window, (B,). features: (B, To, F)"""

    def _noise(self) -> dict[str, NoiseSpec]:
        """Noise of `_loss`."""
        return {}

    def _windows(self, batch: Batch, start: torch.Tensor) -> Windows:
        """Rows -> windows, with the first and the last step of an episode repeated where a window exceeds it.

        start: (B,) uniform

        Published windows begin up to To - 1 steps before the episode. Rows cannot: a batch that begins with the first
        row stands for all To of these windows, one of which is chosen, and weighs To times as much.
        """
        s = self.settings
        has_action = batch.mask & ~(batch.terminated | batch.truncated)  # type: ignore[operator]
        last = has_action.sum(1, keepdim=True) - 1  # (B, 1)
        first = batch.is_first[:, 0]
        shift = (start * s.observation_horizon).long() * first
        step = torch.arange(s.horizon, device=self.device)
        rows = (step - shift[:, None]).clamp(min=0).minimum(last)  # (B, T)
        which = torch.arange(len(rows), device=self.device)[:, None]
        seen = rows[:, : s.observation_horizon]
        weight = torch.where(first, float(s.observation_horizon), 1.0)
        return Windows(
            {name: value[which, seen].flatten(0, 1) for name, value in batch.obs.items()},
            self.normalizer(batch.action[which, rows]),
            weight / mean_over_ranks(weight.mean()),
        )

    def _features(
        self, obs: Tensors, places: torch.Tensor | None = None, *, slow: bool = False
    ) -> torch.Tensor:
        """Name -> (B · To, …) -> (B, To, F)"""
        features: torch.Tensor = self.encoder(obs, places, slow=slow)
        return features.unflatten(0, (-1, self.settings.observation_horizon))

    # ---------------------------------------------------------------- acting

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """history/<name>: (N, To, …); plan: (N, Ta, A) in [-1, 1]; left: (N,) actions of it to execute."""
        s = self.settings
        state = {
            HISTORY + name: torch.zeros(
                num_envs,
                s.observation_horizon,
                *array.shape,
                dtype=getattr(torch, array.dtype),
                device=self.device,
            )
            for name, array in self.spec.observations.items()
        }
        state["plan"] = torch.zeros(num_envs, s.action_horizon, self.spec.action.size, device=self.device)
        state["left"] = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        return state

    def act_variant(self, policy_state: PolicyState, is_first: torch.Tensor) -> int:
        """Environments that plan in this step, rounded up to a power of two, at most N. Reads from the device."""
        count = int(((policy_state["left"] == 0) | is_first).sum())
        return min(len(is_first), 1 << (count - 1).bit_length()) if count else 0

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        count = self.act_variant(policy_state, is_first) if mode.variant is None else mode.variant
        s = self.settings
        state: PolicyState = {}
        for name, value in obs.items():
            history = torch.cat([policy_state[HISTORY + name][:, 1:], value[:, None]], 1)
            repeated = value[:, None].expand_as(history)
            state[HISTORY + name] = torch.where(_like(is_first, history), repeated, history)
        left = torch.where(is_first, 0, policy_state["left"])
        plan = policy_state["plan"]
        if count:
            # Those that need a plan first, in their order; the others keep theirs.
            needs = left == 0
            rank = torch.arange(len(left), device=self.device) + len(left) * needs.logical_not()
            chosen = rank.topk(count, largest=False).indices
            seen = {name: state[HISTORY + name][chosen].flatten(0, 1) for name in obs}
            with self.products(), self.autocast():
                sequence = self._plan(self._features(seen, slow=True), mode, needs[chosen])
            begin = s.observation_horizon - 1
            new = self.normalizer.inverse(sequence.float())[:, begin : begin + s.action_horizon].clamp(
                -1.0, 1.0
            )
            new = torch.where(_like(needs[chosen], new), new, plan[chosen])
            plan = plan.index_copy(0, chosen, new)
            left = torch.where(needs, s.action_horizon, left)
        which = torch.arange(len(left), device=self.device)
        action = plan[which, s.action_horizon - left]
        return action, {**state, "plan": plan, "left": left - 1}, {}

    @abc.abstractmethod
    def _plan(self, features: torch.Tensor, mode: ActMode, needed: torch.Tensor) -> torch.Tensor:
        """Features (M, To, F) -> a normalized action sequence (M, horizon, A), by the averaged weights.

        needed: (M,) bool; the sequences of the others are not used
        """

    def collect_step(self, step: int, *, phase: PhaseConfig) -> CollectResult | None:
        """With `collect: {policy: expert}` the expert acts."""
        if phase.get("collect", {}).get("policy") != "expert":
            return super().collect_step(step, phase=phase)
        if self.expert is None:
            raise ConfigError(
                f"phase '{phase['name']}' collects with the policy `expert`: add one as controllers.expert"
            )
        assert self.collector is not None
        return self.collector.step(self.expert, self.collect_mode(phase))

    # ---------------------------------------------------------------- checkpoint

    def weights_loaded(self) -> None:
        """The averages are saved with the weights: nothing to refresh."""

    def get_state(self) -> dict[str, Any]:
        return {"guard": self.guard.state_dict(), "updates": self._updates}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.guard.load_state_dict(state["guard"])
        self._updates = int(state["updates"])


def _like(flags: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(N,) -> (N, 1, …) with the dimensions of `values`."""
    return flags.view(-1, *[1] * (values.ndim - 1))


def cosine_schedule(count: int, warmup: int, total: int) -> float:
    """Factor of the learning rate after `count` updates: linear from 0, then half a cosine to 0.

    The schedule of diffusers' `get_scheduler("cosine")`, which real-stanford/diffusion_policy @ 5ba07ac uses.
    """
    if count < warmup:
        return count / max(1, warmup)
    progress = min(1.0, (count - warmup) / max(1, total - warmup))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def average_decay(count: int, power: float, limit: float) -> float:
    """Decay of the moving average of the weights: min(limit, 1 - (1 + t)^-power), with t = count - 1; 0 at first.

    real-stanford/diffusion_policy @ 5ba07ac, model/diffusion/ema_model.py (inv_gamma 1, update_after_step 0).
    """
    step = count - 1
    return 0.0 if step <= 0 else min(limit, 1.0 - (1.0 + step) ** -power)
