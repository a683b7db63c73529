"""Base class of all algorithms: the methods that the loop calls, and helpers for subclasses.

A plain workflow implements `initialize` and `update_world_model`, which returns a dict of floats. A fast one
declares `hooks()`: pure steps with fixed shapes that can be captured as CUDA graphs. Both run in the same loop.

Further methods are abilities: a workflow that has `dream_start`, `dream_act` and `dream_step` is a
`protocols.WorldModel` and can be imagined with, played and reported; see `rl_lab/protocols.py`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError, LabError, require_choice
from rl_lab.protocols import (
    ObservationDecoder,
    RowCollector,
    SelectsActions,
    UpdatesController,
    UpdatesWorldModel,
    WorldModel,
)
from rl_lab.records import (
    ActMode,
    AnyHook,
    ArraySpec,
    Batch,
    BatchSpec,
    CollectResult,
    Episode,
    EpisodeTracker,
    Imagined,
    PlainHook,
    Spec,
    Transitions,
    return_statistics,
)
from rl_lab.workflows.context import WorkflowContext

PhaseConfig = Mapping[str, Any]
PolicyState = dict[str, torch.Tensor]
Metrics = Mapping[str, Any]
# For the imports of workflows: what `collect_step` returns, and what plain updates receive.
__all__ = [
    "Batch",
    "CollectResult",
    "Metrics",
    "PhaseConfig",
    "PolicyState",
    "Transitions",
    "WorldModelWorkflow",
    "imagined_report",
]


class WorldModelWorkflow(ABC):
    """One algorithm: `act` maps observations to actions, and each hook maps a batch to an update."""

    # A dataclass with every key of `algorithm` (rl_lab.workflows.settings); other keys are refused. None: nothing is checked.
    settings_type: type[Any] | None = None
    # Config paths that a phase's `set:` may change; the workflow reads them with `phase_value`.
    phase_settings: tuple[str, ...] = ()
    # Whether `act` samples at `ActMode.temperature`. If not, a config with another temperature than 1 is refused.
    has_temperature = False
    # Values of a phase's `collect: {policy: …}`; those after the first two reach `act` as `ActMode.policy`.
    collect_policies: tuple[str, ...] = ("agent", "random")
    # Tensors of a dream's state that `imagine` returns; None: all of them.
    imagined_state: tuple[str, ...] | None = None
    # Steps after which play rebuilds a dream's memory from its last frames (for memory that grows each step).
    dream_flush: int | None = None

    def __init__(self) -> None:
        self.context: WorkflowContext | None = None
        self.collector: RowCollector | None = None
        self._tracker: EpisodeTracker | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make `initialize` of each subclass store the context first, whether or not it calls super()."""
        super().__init_subclass__(**kwargs)
        if "initialize" in cls.__dict__:
            setattr(cls, "initialize", _storing_context(cls.__dict__["initialize"]))  # noqa: B010

    # ---------------------------------------------------------------- required

    @abstractmethod
    def initialize(self, context: WorkflowContext) -> None:
        """Take the parts from the context and set up state. Called once, before all other methods.

        `self.context` and `self.collector` are set before the subclass's code runs.
        """

    # ---------------------------------------------------------------- updates

    def hooks(self) -> Mapping[str, AnyHook]:
        """Name -> hook. The default is a plain hook for each of update_world_model and update_controller."""
        hooks: dict[str, AnyHook] = {}
        if isinstance(self, UpdatesWorldModel):
            step = self.update_world_model
            hooks["update_world_model"] = PlainHook(step, batch=self.plain_batch(), prefix="train")
        if isinstance(self, UpdatesController):
            step = self.update_controller
            hooks["update_controller"] = PlainHook(step, batch=self.plain_batch(), prefix="controller")
        return hooks

    def resolve_hook(self, name: str, phase: str) -> str:
        """The hook that a phase means by a name that is no hook, or the name itself.

        It makes `update_world_model` and `update_controller` work in the phases of an algorithm whose hooks have
        other names. phase: its name
        """
        return name

    def plain_batch(self) -> BatchSpec:
        """Batch of the plain hooks: `batch_length` transitions that never cross the end of an episode.

        `debug.plain_batch` has upper limits: the episodes of debug=tiny are short.
        """
        config = self._bound().config
        algorithm, limits = config.algorithm, (config.get("debug") or {}).get("plain_batch") or {}
        size, length = int(algorithm.get("batch_size", 16)), int(algorithm.get("batch_length", 64))
        size, length = min(size, limits.get("size", size)), min(length, limits.get("length", length))
        return BatchSpec(size=size, length=length + 1, boundary="within")

    # ---------------------------------------------------------------- acting

    def act(
        self,
        obs: dict[str, torch.Tensor],  # name -> (N, …) on the training device
        policy_state: PolicyState,
        is_first: torch.Tensor,  # (N,) bool
        mode: ActMode,
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        """Actions for N environments, the next policy state, and extra columns to store with the rows.

        A policy that needs its last action keeps it as `action` in its state. When somebody else acts (play),
        the executed action is written there.

        The default calls `select_action(obs)` of a plain workflow, with name -> array (N, …), as its own
        `collect_step` would.
        """
        if not isinstance(self, SelectsActions):
            raise LabError(self.cannot_act)
        arrays = {name: value.cpu().numpy() for name, value in obs.items()}
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):  # evaluation must not change training's randomness
            if mode.generator is not None:
                seed = torch.randint(2**62, (), generator=mode.generator, device=mode.generator.device)
                torch.manual_seed(int(seed))
            action = self.select_action(arrays)
        return torch.as_tensor(action, device=is_first.device), policy_state, {}

    @property
    def can_act(self) -> bool:
        """Whether the agent can be evaluated, played and loaded: `act` or `select_action` is implemented."""
        return not self._acts_plainly or isinstance(self, SelectsActions)

    @property
    def act_captures(self) -> bool:
        """Whether `act` can be captured as a CUDA graph; `select_action` is host code."""
        return not self._acts_plainly

    @property
    def _acts_plainly(self) -> bool:
        return type(self).act is WorldModelWorkflow.act

    @property
    def cannot_act(self) -> str:
        """The message for a workflow that steps environments in `collect_step` and has no policy to call."""
        return (
            f"{type(self).__name__} has no act(obs, policy_state, is_first, mode) and no select_action(obs), so it "
            "cannot be evaluated, played or loaded as an agent: implement one of them"
        )

    def before_act(self, mode: ActMode) -> None:
        """Write values that change between calls to the device. Called before `act` or its CUDA graph."""

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """Policy state before the first step. `act` resets the rows where `is_first` is true."""
        return {}

    def policy_columns(self) -> dict[str, ArraySpec]:
        """Specs of the extra columns that `act` returns and the buffer stores with each row."""
        return {}

    def collect_step(self, step: int, *, phase: PhaseConfig) -> CollectResult | None:
        """One step of every environment. The default takes it with the Collector and the actions of `act`.

        A subclass that overrides it steps the environments itself, or calls super(). The loop does not call
        this default: it calls the Collector.
        """
        if self.collector is None:
            raise LabError(
                f"{type(self).__name__}.collect_step needs a Collector: it has no environments here"
            )
        return self.collector.step(self, self.collect_mode(phase))

    def collect_mode(self, phase: PhaseConfig) -> ActMode:
        """Exploration during collection; the Collector sets the generator.

        A phase with `collect: {policy: random}` takes uniformly random actions (epsilon 1). The temperature is
        that of the phase's `collect`, or else `training.collect.temperature`.
        """
        collect = phase.get("collect", {})
        policy = collect.get("policy", "agent")
        require_choice("collect: policy", policy, self.collect_policies)
        temperature = collect.get("temperature")
        if temperature is None and self.context is not None:
            # Runs saved before this setting existed have none.
            temperature = self.context.config.training.get("collect", {}).get("temperature")
        return ActMode(
            sample=True,
            temperature=1.0 if temperature is None else float(temperature),
            epsilon=1.0 if policy == "random" else 0.0,
            policy="agent" if policy == "random" else policy,
        )

    # ---------------------------------------------------------------- imagination

    @property
    def can_dream(self) -> bool:
        """Whether the world model of this workflow can be stepped (`protocols.WorldModel`)."""
        return isinstance(self, WorldModel)

    def dreamed_observations(self, spec: Spec) -> list[str]:
        """Names of the environment's observations that `dream_observation` returns."""
        return list(spec.observations) if isinstance(self, ObservationDecoder) else []

    @torch.no_grad()
    def imagine(
        self,
        *,
        horizon: int,
        batch: Batch | None = None,
        state: PolicyState | None = None,
        decode: bool = False,
        generator: torch.Generator | None = None,
    ) -> Imagined:
        """A rollout of `horizon` steps in the world model, with the actions that the agent would sample.

        It starts from `state` (B, …), as `dream_start` returns it, or from the end of each sequence of `batch`.
        decode: also return the decoded observations
        """
        if not isinstance(self, WorldModel):
            raise LabError(
                f"{type(self).__name__} has no world model that can be stepped: "
                "implement dream_start, dream_act and dream_step"
            )
        if state is None:
            if batch is None:
                raise ValueError("imagine() needs a batch or a state to start from")
            state = self.dream_start(batch, generator=generator)
        shown = (
            [dict(self.dream_observation(state))] if decode and isinstance(self, ObservationDecoder) else []
        )
        states, actions, rewards, ends = [self._imagined(state)], [], [], []
        for _ in range(horizon):
            action, state = self.dream_act(state, ActMode(generator=generator))
            state, predicted = self.dream_step(state, action, generator=generator)
            states.append(self._imagined(state))
            actions.append(action)
            rewards.append(predicted.reward)
            ends.append(predicted.terminated)
            if shown:
                shown.append(predicted.obs)
        zeros = torch.zeros_like(rewards[0])
        return Imagined(
            _stacked(states),
            torch.stack(actions, 1),
            reward=torch.stack([zeros, *rewards], 1),
            cont=1.0 - torch.stack([zeros, *ends], 1),
            obs=_stacked(shown) if shown else None,
        )

    def _imagined(self, state: PolicyState) -> PolicyState:
        return {name: value for name, value in state.items() if name in (self.imagined_state or state)}

    # ---------------------------------------------------------------- report and checkpoint

    def report(self, batch: Batch) -> dict[str, Any]:
        """Diagnostics to log: name -> float, uint8 image (C, H, W) or uint8 video (T, C, H, W)."""
        return {}

    def weights_loaded(self) -> None:
        """Refresh copies of the parts' weights. Called after weights were loaded into the parts."""

    def get_state(self) -> dict[str, Any]:
        """Checkpoint state that is not in the parts, controllers and optimizers."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `get_state`."""

    # ---------------------------------------------------------------- helpers for subclasses

    def _bound(self) -> WorkflowContext:
        if self.context is None:
            raise ConfigError(f"{type(self).__name__} is not initialized: call workflow.initialize(context)")
        return self.context

    def _bind_context(self, context: WorkflowContext) -> None:
        """Assign the parts that the workflow uses to attributes. Override this in a subclass."""

    def phase_value(self, phase: PhaseConfig, path: str) -> float:
        """The value at a config path, or the one that the phase's `set:` gives for it."""
        overrides = phase.get("set", {})
        if path in overrides:
            return float(overrides[path])
        node: Any = self._bound().config
        for key in path.split("."):
            node = node[key]
        return float(node)

    def _reset_rollout_state(self, *, initial_obs: Any, initial_dones: Any = None) -> None:
        """Set the observation that a custom `collect_step` continues from. Called again after a resume."""
        self.current_obs = initial_obs
        self.current_dones = initial_dones

    def _reset_episode_tracking(self, num_envs: int, *, clear_history: bool = False) -> None:
        if clear_history or self._tracker is None or self._tracker.num_envs != num_envs:
            self._tracker = EpisodeTracker(num_envs)
        else:
            self._tracker.returns[:] = 0.0
            self._tracker.lengths[:] = 0

    def _update_episode_stats(self, reward: Any, done: Any, info: Any = None) -> int:
        """Add one vector step; returns the number of episodes that ended."""
        if self._tracker is None:
            self._reset_episode_tracking(int(np.size(reward)))
        assert self._tracker is not None
        return self._tracker.update(np.asarray(reward).reshape(-1), np.asarray(done, dtype=bool).reshape(-1))

    def _snapshot_episode_tracking(self) -> dict[str, Any]:
        return self._tracker.get_state() if self._tracker else {}

    def _restore_episode_tracking(self, state: Mapping[str, Any]) -> None:
        if state:
            self._reset_episode_tracking(len(state["returns"]))
            assert self._tracker is not None
            self._tracker.set_state(state)

    def finished_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call: those of `_update_episode_stats`, or else the Collector's."""
        own = self._tracker.drain() if self._tracker is not None else []
        collected = self.collector.tracker.drain() if self.collector is not None else []
        return own or collected

    def return_statistics(self) -> dict[str, float]:
        """Mean, std, min and max of the recent episode returns."""
        tracker = self._tracker or (self.collector.tracker if self.collector is not None else None)
        return return_statistics(list(tracker.history)) if tracker else {}


def _storing_context(initialize: Callable[..., None]) -> Callable[..., None]:
    """Wrap a subclass's `initialize`, so that the base class has the context even without super()."""

    @functools.wraps(initialize)
    def wrapped(self: Any, context: WorkflowContext, *args: Any, **kwargs: Any) -> None:
        self.context, self.collector = context, context.collector
        initialize(self, context, *args, **kwargs)

    return wrapped


def _stacked(states: list[PolicyState]) -> PolicyState:
    """T dicts of (B, …) -> one of (B, T, …)."""
    return {name: torch.stack([state[name] for state in states], 1) for name in states[0]}


# ---------------------------------------------------------------- report of imagined rollouts

DARKENING = 4  # divides the pixel values of frames after the probable end of a rollout


def imagined_report(imagined: Imagined, *, discount: float = 1.0) -> dict[str, Any]:
    """Videos and mean return of decoded rollouts with the policy's actions, B starts and H steps.

    imagination/<name>   (H+1, C, h, B·w) uint8, per image: rollouts side by side, darkened after their end
    imagination_return   mean predicted undiscounted return until the end

    discount: the factor of `imagined.cont` that is not the probability of continuing
    """
    assert imagined.reward is not None and imagined.cont is not None and imagined.obs is not None
    alive = torch.cumprod((imagined.cont / discount).clamp(max=1.0), 1)  # (B, H+1)
    report: dict[str, Any] = {
        "imagination_return": float((imagined.reward[:, 1:] * alive[:, :-1]).sum(1).mean())
    }
    for key, frames in imagined.obs.items():
        if frames.dtype == torch.uint8 and frames.ndim == 5:
            shown = torch.where(alive[..., None, None, None] < 0.5, frames // DARKENING, frames)
            report[f"imagination/{key}"] = shown.permute(1, 2, 3, 0, 4).flatten(3, 4).cpu()
    return report
