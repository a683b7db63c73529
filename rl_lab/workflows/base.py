"""Base class of all algorithms: the methods that the Orchestrator calls, and helpers for subclasses.

A plain workflow implements `initialize` and one update that returns a dict of floats. A fast one declares
`hooks()`: pure steps with fixed shapes that can be captured as CUDA graphs. Both run in the same loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError, LabError
from rl_lab.records import (
    ActMode,
    ArraySpec,
    Batch,
    BatchSpec,
    CollectResult,
    Episode,
    EpisodeTracker,
    Hook,
    Imagined,
    ImaginedStep,
    Spec,
    return_statistics,
)
from rl_lab.workflows.context import WorkflowContext

PhaseConfig = Mapping[str, Any]
PolicyState = dict[str, torch.Tensor]
Metrics = Mapping[str, Any]


class WorldModelWorkflow(ABC):
    """One algorithm: `act` maps observations to actions, and each hook maps a batch to an update."""

    # Config paths that a phase's `set:` may change; the workflow reads them with `phase_value`.
    phase_settings: tuple[str, ...] = ()
    # Whether `act` samples at `ActMode.temperature`. If not, a config with another temperature than 1 is refused.
    has_temperature = False

    def __init__(self) -> None:
        self.context: WorkflowContext | None = None
        self.collector: Any = None
        self._tracker: EpisodeTracker | None = None

    # ---------------------------------------------------------------- required

    @abstractmethod
    def initialize(self, context: WorkflowContext) -> None:
        """Take the parts from the context and set up state. Called once, before all other methods."""

    # ---------------------------------------------------------------- updates, acting, imagination

    def update_world_model(self, batch: Batch, *, phase: PhaseConfig) -> Metrics:
        """One gradient step on the world model; returns metrics."""
        raise NotImplementedError

    def update_controller(self, batch: Batch, *, phase: PhaseConfig) -> Metrics:
        """One gradient step on the controller; returns metrics."""
        raise NotImplementedError

    def hooks(self) -> dict[str, Hook]:
        """Name -> Hook. The default is one plain hook for each update method that the subclass overrides."""
        hooks: dict[str, Hook] = {}
        for name, prefix in (("update_world_model", "train"), ("update_controller", "controller")):
            if getattr(type(self), name) is not getattr(WorldModelWorkflow, name):
                hooks[name] = Hook(getattr(self, name), batch=self.plain_batch(), prefix=prefix, plain=True)
        return hooks

    def resolve_hook(self, name: str, phase: str) -> str:
        """The hook that a phase means by a name that is no hook, or the name itself.

        It makes `update_world_model` and `update_controller` work in the phases of an algorithm whose hooks have
        other names. phase: its name
        """
        return name

    def plain_batch(self) -> BatchSpec:
        """Batch of the plain hooks: `batch_length` transitions that never cross the end of an episode."""
        algorithm = self._bound().config.algorithm
        return BatchSpec(
            size=int(algorithm.batch_size), length=int(algorithm.batch_length) + 1, boundary="within"
        )

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
        if not self.can_act:
            raise LabError(self.cannot_act)
        arrays = {name: value.cpu().numpy() for name, value in obs.items()}
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):  # evaluation must not change training's randomness
            if mode.generator is not None:
                seed = torch.randint(2**62, (), generator=mode.generator, device=mode.generator.device)
                torch.manual_seed(int(seed))
            action = self.select_action(arrays)  # type: ignore[attr-defined]
        return torch.as_tensor(action, device=is_first.device), policy_state, {}

    @property
    def can_act(self) -> bool:
        """Whether the agent can be evaluated, played and loaded: `act` or `select_action` is implemented."""
        return not self._acts_plainly or hasattr(self, "select_action")

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
        """Take one vector step with the Collector and the actions of `act`."""
        result: CollectResult = self.collector.step(self, self.collect_mode(phase))
        return result

    def collect_mode(self, phase: PhaseConfig) -> ActMode:
        """Exploration during collection; the Collector sets the generator.

        A phase with `collect: {policy: random}` takes uniformly random actions (epsilon 1). The temperature is
        that of the phase's `collect`, or else `training.collect.temperature`.
        """
        collect = phase.get("collect", {})
        temperature = collect.get("temperature")
        if temperature is None and self.context is not None:
            # Runs saved before this setting existed have none.
            temperature = self.context.config.training.get("collect", {}).get("temperature")
        return ActMode(
            sample=True,
            temperature=1.0 if temperature is None else float(temperature),
            epsilon=1.0 if collect.get("policy", "agent") == "random" else 0.0,
        )

    def imagine(self, *, horizon: int, **kwargs: Any) -> Imagined:
        """An imagined rollout of `horizon` steps."""
        raise NotImplementedError

    # Stepping the world model one action at a time: used by play, the dream report and WorldModelEnv.
    # A state holds all memory, including the policy's. The first dimension of each tensor is B, the dreams.

    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        """State after the rows of `batch` (B, T, …), where a dream continues. They may start mid-episode.

        The action of the last row is not read: it has not been taken yet.
        """
        raise NotImplementedError

    def dream_observation(self, state: PolicyState) -> dict[str, torch.Tensor]:
        """Decode the state: name -> (B, …) in the format of stored observations. Empty without a decoder."""
        return {}

    def dreamed_observations(self, spec: Spec) -> list[str]:
        """Names of the environment's observations that `dream_observation` returns."""
        decodes = type(self).dream_observation is not WorldModelWorkflow.dream_observation
        return list(spec.observations) if decodes else []

    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        """The policy's actions (B, …) in this state, and the state with the updated policy memory."""
        raise NotImplementedError

    def dream_step(
        self, state: PolicyState, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[PolicyState, ImaginedStep]:
        """Take (B, …) actions; returns the next state and the predicted reward, end and observations."""
        raise NotImplementedError

    def inspect_policy(self, state: PolicyState) -> dict[str, torch.Tensor]:
        """Diagnostics of the policy: name -> (N,), such as `value` and `entropy`. Empty if it has none.

        state: returned by `act` or `dream_act`
        """
        return {}

    # Steps after which play rebuilds a dream's memory from its last frames (for memory that grows each step).
    dream_flush: int | None = None

    @property
    def can_dream(self) -> bool:
        """Whether the world model of this workflow can be stepped."""
        return type(self).dream_step is not WorldModelWorkflow.dream_step

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

    def attach(self, context: WorkflowContext) -> None:
        """Store the context and the collector. `rl_lab.build` calls this before `initialize`."""
        self.context = context
        self.collector = context.collector

    def _bound(self) -> WorkflowContext:
        if self.context is None:
            raise ConfigError(f"{type(self).__name__} is not attached: call workflow.attach(context) first")
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
        """Episodes that ended since the last call, from the workflow's own tracker or the Collector's."""
        if self._tracker is not None:
            return self._tracker.drain()
        return self.collector.tracker.drain() if self.collector is not None else []

    def return_statistics(self) -> dict[str, float]:
        """Mean, std, min and max of the recent episode returns."""
        tracker = self._tracker or (self.collector.tracker if self.collector is not None else None)
        return return_statistics(list(tracker.history)) if tracker else {}


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
