"""The base of every algorithm: what the Orchestrator may call, and help for writing it.

The plain way in needs `initialize` and one update that returns a dict of floats. The fast way in declares
`hooks()`: pure fixed-shape steps that can be captured as CUDA graphs. Both run on the same loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError
from rl_lab.records import (
    ActMode,
    ArraySpec,
    Batch,
    BatchSpec,
    CollectResult,
    Dreamed,
    Episode,
    EpisodeTracker,
    Hook,
    Imagined,
    Spec,
    return_statistics,
)
from rl_lab.workflows.context import WorkflowContext

PhaseConfig = Mapping[str, Any]
PolicyState = dict[str, torch.Tensor]
Metrics = Mapping[str, Any]


class WorldModelWorkflow(ABC):
    """Pure algorithm: given observations, actions; given a batch, losses and an update."""

    # Config paths that a phase's `set:` may change; the workflow reads them with `phase_value`.
    phase_settings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.context: WorkflowContext | None = None
        self.collector: Any = None
        self._tracker: EpisodeTracker | None = None

    # ---------------------------------------------------------------- required

    @abstractmethod
    def initialize(self, context: WorkflowContext) -> None:
        """Bind parts from the context and set up state. Called once, before anything else."""

    # ---------------------------------------------------------------- what it can be asked to do

    def update_world_model(self, batch: Batch, *, phase: PhaseConfig) -> Metrics:
        """One gradient step on the world model; returns metrics."""
        raise NotImplementedError

    def update_controller(self, batch: Batch, *, phase: PhaseConfig) -> Metrics:
        """One gradient step on the controller; returns metrics."""
        raise NotImplementedError

    def hooks(self) -> dict[str, Hook]:
        """Name -> Hook. By default the update methods that the subclass wrote, as plain hooks."""
        hooks: dict[str, Hook] = {}
        for name, prefix in (("update_world_model", "train"), ("update_controller", "controller")):
            if getattr(type(self), name) is not getattr(WorldModelWorkflow, name):
                hooks[name] = Hook(getattr(self, name), batch=self.plain_batch(), prefix=prefix, plain=True)
        return hooks

    def plain_batch(self) -> BatchSpec:
        """Batch of the plain hooks: `batch_length` transitions, never across an episode's end."""
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
        """Actions for N environments, the policy's next memory, and columns to store with the rows.

        A policy that remembers its last action keeps it as `action` in its memory: one who acts in its place (play)
        puts there what was really done.
        """
        raise NotImplementedError

    def before_act(self, mode: ActMode) -> None:
        """Called before each `act` that may be replayed from a recording: put changing numbers where `act` reads them."""

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        """Memory before the first step; `act` itself resets rows where `is_first`."""
        return {}

    def policy_columns(self) -> dict[str, ArraySpec]:
        """Columns that `act` returns as extras, stored with each row."""
        return {}

    def collect_step(self, step: int, *, phase: PhaseConfig) -> CollectResult | None:
        """One vector step through the Collector, with the actions that `act` chooses."""
        result: CollectResult = self.collector.step(self, self.collect_mode(phase))
        return result

    def collect_mode(self, phase: PhaseConfig) -> ActMode:
        """Exploration while collecting; the Collector fills in the generator.

        A phase with `collect: {policy: random}` acts uniformly at random (epsilon 1).
        """
        policy = phase.get("collect", {}).get("policy", "agent")
        return ActMode(sample=True, epsilon=1.0 if policy == "random" else 0.0)

    def imagine(self, *, horizon: int, **kwargs: Any) -> Imagined:
        """A dream of `horizon` steps."""
        raise NotImplementedError

    # A world model that can be stepped, one action at a time: what play, the dream report and WorldModelEnv use.
    # A dream's state holds all memory, the policy's included; every tensor in it has the B dreams first.

    def dream_start(self, batch: Batch, *, generator: torch.Generator | None = None) -> PolicyState:
        """Memory after seeing the rows of `batch` (B, T, …) from an episode's start or middle; dreams go on from there.

        The last row's action has not been taken yet and is not read.
        """
        raise NotImplementedError

    def dream_observation(self, state: PolicyState) -> dict[str, torch.Tensor]:
        """The current state decoded: name -> (B, …) as stored. Empty for a model without a decoder."""
        return {}

    def dreamed_observations(self, spec: Spec) -> list[str]:
        """Which of the environment's observations `dream_observation` gives."""
        decodes = type(self).dream_observation is not WorldModelWorkflow.dream_observation
        return list(spec.observations) if decodes else []

    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        """What the agent would do in the dream: (B, …) actions, and the state with the policy's next memory."""
        raise NotImplementedError

    def dream_step(
        self, state: PolicyState, action: torch.Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[PolicyState, Dreamed]:
        """Take (B, …) actions: the next state and what the model expects to arrive with it."""
        raise NotImplementedError

    def inspect_policy(self, state: PolicyState) -> dict[str, torch.Tensor]:
        """What the policy thinks where it stands: name -> (N,), such as `value` and `entropy`. For looking, not learning.

        state: what `act` or `dream_act` returned. Empty for a policy that has nothing to tell.
        """
        return {}

    # Steps after which play begins a dream's memory anew from its own frames, where it grows with the dream's length.
    dream_flush: int | None = None

    @property
    def can_dream(self) -> bool:
        """Whether this workflow's model can be stepped."""
        return type(self).dream_step is not WorldModelWorkflow.dream_step

    def report(self, batch: Batch) -> dict[str, Any]:
        """Things to look at: name -> float, image (C, H, W) or video (T, C, H, W), uint8."""
        return {}

    def weights_loaded(self) -> None:
        """Parts were given other weights: what was copied from them before is to be copied again."""

    def get_state(self) -> dict[str, Any]:
        """State of the algorithm beyond parts, controllers and optimizers."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take back what `get_state` gave."""

    # ---------------------------------------------------------------- help for subclasses

    def attach(self, context: WorkflowContext) -> None:
        """Keep the context and the collector. The build calls this just before `initialize`."""
        self.context = context
        self.collector = context.collector

    def _bound(self) -> WorkflowContext:
        if self.context is None:
            raise ConfigError(f"{type(self).__name__} is not attached: call workflow.attach(context) first")
        return self.context

    def _bind_context(self, context: WorkflowContext) -> None:
        """Where a workflow extracts what it needs, under its own names."""

    def phase_value(self, phase: PhaseConfig, path: str) -> float:
        """A config value that the phase's `set:` may have changed."""
        overrides = phase.get("set", {})
        if path in overrides:
            return float(overrides[path])
        node: Any = self._bound().config
        for key in path.split("."):
            node = node[key]
        return float(node)

    def _reset_rollout_state(self, *, initial_obs: Any, initial_dones: Any = None) -> None:
        """Where a plain `collect_step` goes on from; called again after a resume."""
        self.current_obs = initial_obs
        self.current_dones = initial_dones

    def _reset_episode_tracking(self, num_envs: int, *, clear_history: bool = False) -> None:
        if clear_history or self._tracker is None or self._tracker.num_envs != num_envs:
            self._tracker = EpisodeTracker(num_envs)
        else:
            self._tracker.returns[:] = 0.0
            self._tracker.lengths[:] = 0

    def _update_episode_stats(self, reward: Any, done: Any, info: Any = None) -> int:
        """Add one vector step; returns how many episodes ended."""
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
        """Episodes that ended since the last call: the workflow's own tracking, or the Collector's."""
        if self._tracker is not None:
            return self._tracker.drain()
        return self.collector.tracker.drain() if self.collector is not None else []

    def return_statistics(self) -> dict[str, float]:
        """Mean, std, min and max of the recent returns."""
        tracker = self._tracker or (self.collector.tracker if self.collector is not None else None)
        return return_statistics(list(tracker.history)) if tracker else {}


# --------------------
# Dreams with the policy's own actions, as films: the part of a report that every world model shows alike.


DIM = 4  # frames of a dream that has probably ended are this many times darker


def imagined_report(dream: Imagined, *, discount: float = 1.0) -> dict[str, Any]:
    """Of a decoded dream of B starts and H steps:

    imagination/<name>   (H+1, C, h, B·w) uint8, for every image: the dreams side by side, dark once they have ended
    imagination_return   mean over dreams of what they promise until their end, undiscounted

    discount: what `dream.cont` holds besides the chance of going on
    """
    assert dream.reward is not None and dream.cont is not None and dream.obs is not None
    alive = torch.cumprod((dream.cont / discount).clamp(max=1.0), 1)  # (B, H+1)
    report: dict[str, Any] = {
        "imagination_return": float((dream.reward[:, 1:] * alive[:, :-1]).sum(1).mean())
    }
    for key, frames in dream.obs.items():
        if frames.dtype == torch.uint8 and frames.ndim == 5:
            shown = torch.where(alive[..., None, None, None] < 0.5, frames // DIM, frames)
            report[f"imagination/{key}"] = shown.permute(1, 2, 3, 0, 4).flatten(3, 4).cpu()
    return report
