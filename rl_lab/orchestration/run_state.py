"""The complete state of a run as one dict, for checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_lab.errors import CheckpointError, LabError, unexpected
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.updates import Storage
from rl_lab.protocols import TracksEpisodes, Workflow
from rl_lab.utils import ranks
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION
from rl_lab.utils.checkpoint.matching import load_matching
from rl_lab.utils.checkpoint.saveable import to_saveable
from rl_lab.utils.seeding import Generators

if TYPE_CHECKING:
    from rl_lab.orchestration.remote_collector import RemoteCollector

# What each rank has of its own; the rest of a state is the same on all.
OF_RANK = ("generators", "collector", "storage", "episode_tracking", "workflow_custom", "orchestrator")


def with_state_of_ranks(state: dict[str, Any]) -> dict[str, Any]:
    """Add what the other ranks have of their own, as `ranks`, to the state that the first rank saves."""
    if ranks.size() == 1:
        return state
    mine = to_saveable({key: state[key] for key in OF_RANK if key in state})
    own = ranks.gather_on_first(_on_host(mine))
    return {**state, "ranks": own[1:]}


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_host(item) for key, item in value.items()}
    return type(value)(_on_host(item) for item in value) if isinstance(value, list | tuple) else value


def saved_ranks(state: Mapping[str, Any]) -> int:
    """The number of ranks that a state was saved with."""
    return 1 + len(state.get("ranks", ()))


def state_of_rank(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that this rank continues from.

    A rank that the saved run did not have begins with new environments and generators, and with a copy of the
    replay of rank `rank % saved ranks`.
    """
    mine = dict(state)
    others = [{}, *mine.pop("ranks", ())]
    mine |= others[ranks.rank() % len(others)]
    if ranks.rank() >= len(others):
        mine |= {"collector": {}, "new_rank": True}
    return mine


def share_statistics(normalizer: Any) -> None:
    """Merge what each rank's environments have added to the observation statistics since the last call."""
    if normalizer is not None and ranks.size() > 1:
        normalizer.merge(ranks.gather(normalizer.take_added()))


class RunState:
    """Gathers and restores the state of all parts of a run; any of them may be absent."""

    def __init__(
        self,
        *,
        workflow: Workflow,
        scheduler: PhaseScheduler,
        components: Mapping[str, Any] | None = None,
        controller_manager: Any = None,  # ControllerManager
        optimizers: Mapping[str, Any] | None = None,
        generators: Generators | None = None,
        storage: Storage | None = None,
        collector: Collector | RemoteCollector | None = None,
    ) -> None:
        self.workflow = workflow
        self.scheduler = scheduler
        self.components = dict(components or {})
        self.controller_manager = controller_manager
        self.optimizers = dict(optimizers or {})
        self.generators = generators
        self.storage = storage
        self.collector = collector

    def gather(self, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the state of all parts."""
        # First finish what is in progress: receive the results in flight, drop prefetched batches.
        collector = self.collector.get_state() if self.collector is not None else {}
        if self.storage is not None:
            self.storage.drop_prefetched()
        tracking = {}
        if isinstance(self.workflow, TracksEpisodes):
            tracking = self.workflow._snapshot_episode_tracking()
        return {
            "version": CHECKPOINT_VERSION,
            "global_step": self.scheduler.totals["env_steps"],
            "workflow_name": type(self.workflow).__name__,
            "phase_state": self.scheduler.get_state(),
            "components": self.component_weights(),
            "controllers": self.controller_manager.state_dict() if self.controller_manager else {},
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "workflow_custom": self.workflow.get_state(),
            "observation_statistics": self._observation_statistics(),
            "episode_tracking": tracking,
            "generators": self.generators.get_state() if self.generators else {},
            "storage": self.storage.get_state() if self.storage is not None else {},
            "collector": collector,
            **(extra or {}),
        }

    def _observation_statistics(self) -> dict[str, Any] | None:
        """Stored with the weights: a policy needs the statistics that it was trained with."""
        environment = getattr(self.collector, "environment", None)
        normalizer = getattr(environment, "normalizer", None)
        return None if normalizer is None else normalizer.get_state()

    def component_weights(self) -> dict[str, Any]:
        return {
            name: part.state_dict() for name, part in self.components.items() if isinstance(part, nn.Module)
        }

    def restore(self, state: Mapping[str, Any], empty_buffers: Sequence[str] = ()) -> None:
        """Load a complete state. Buffer rows are restored before; `empty_buffers` lack some or all of them.

        Raises CheckpointError if the state does not fit: an intact file may come from other code.
        """
        name = type(self.workflow).__name__
        made_by = state.get("workflow_name")
        if made_by != name:
            raise CheckpointError(
                f"the checkpoint was saved by {made_by}, but this run uses {name}: resume it with {made_by}"
            )
        try:
            self._restore(state, empty_buffers)
        except LabError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"the checkpoint was saved by another version of {name}, of one of its parts or of RL Lab, "
                f"and does not fit this code: {unexpected(error)}"
            ) from error

    def _restore(self, state: Mapping[str, Any], empty_buffers: Sequence[str]) -> None:
        modules = {key: part for key, part in self.components.items() if isinstance(part, nn.Module)}
        load_matching(modules, state["components"], prefix="components")
        if self.controller_manager is not None:
            load_matching(dict(self.controller_manager.modules()), state["controllers"], prefix="controllers")
        load_matching(self.optimizers, state["optimizers"], prefix="optimizers")
        self.scheduler.set_state(state["phase_state"])
        if self.storage is not None:
            self.storage.set_state(state["storage"], skip=empty_buffers)
        if self.collector is not None and state["collector"]:
            self._restore_collector(self.collector, state["collector"])
        if state.get("new_rank"):
            self._begin_rank(state)
        elif isinstance(self.workflow, TracksEpisodes):
            self.workflow._restore_episode_tracking(state["episode_tracking"])
        self.workflow.set_state(state["workflow_custom"])
        if self.generators is not None and not state.get("new_rank"):
            self.generators.set_state(state["generators"])

    def _begin_rank(self, state: Mapping[str, Any]) -> None:
        """Of a rank that the saved run did not have: its environments were reset when they were created."""
        if self.collector is None:
            return
        environment, statistics = self.collector.environment, state["observation_statistics"]
        if self.storage is not None:
            self.storage.restart_streams(range(environment.num_envs))
        normalizer = getattr(environment, "normalizer", None)
        if statistics is not None and normalizer is not None:
            normalizer.set_state(statistics.get("base", statistics))

    def _restore_collector(self, collector: Collector | RemoteCollector, state: Mapping[str, Any]) -> None:
        fresh = collector.set_state(state)
        if fresh:
            if self.storage is not None:
                self.storage.restart_streams(fresh)
            warnings.warn(
                f"environments {fresh} start a new episode: replaying their actions did not lead to the "
                "saved observation (they are not deterministic), or there were more than "
                "environment.history_limit actions, or other machines had collected",
                stacklevel=2,
            )
        if isinstance(self.workflow, TracksEpisodes):
            environment = collector.environment
            self.workflow._reset_rollout_state(
                initial_obs=environment.last_obs, initial_dones=environment.last_dones
            )
