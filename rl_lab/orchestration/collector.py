"""One vector step at a time: receive, act, hand out rows, send. Workers step while the learner trains.

The Collector owns the vector environment, the policy's memory and the actions in flight. A result that has
arrived waits until the next `step`, so a checkpoint (which settles what is in flight) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.records import OBS_PREFIX, ActMode, CollectResult, EpisodeTracker
from rl_lab.utils.metrics import Stopwatch

# --------------------
# Acting for all environments: observations to the device, the policy's step (one CUDA graph there), actions back.


EAGER_CALLS = 3  # before recording, as for hooks


class Policy(Protocol):
    """What the Collector and the Evaluator need of a workflow."""

    def act(self, obs: Any, policy_state: Any, is_first: Any, mode: ActMode) -> tuple[Any, Any, Any]: ...
    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]: ...


class ActRunner:
    """Calls `policy.act`. On CUDA its inputs and memory get fixed addresses and, after a few calls, the step is replayed.

    The result's tensors are overwritten by the next call there: store or copy them before. A policy that cannot be
    recorded (it reads from the device, or has no memory to keep in place) says so with `act_captures = False`.
    """

    def __init__(self, policy: Policy, *, device: torch.device, capture: bool = True) -> None:
        self.policy = policy
        self.device = device
        self.enabled = capture and device.type == "cuda" and getattr(policy, "act_captures", True)
        self._obs: dict[str, torch.Tensor] = {}
        self._staging: dict[str, torch.Tensor] = {}
        self._is_first: torch.Tensor | None = None
        self._state: dict[str, torch.Tensor] | None = None
        self._graphs: dict[
            Any, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, dict[str, torch.Tensor]]]
        ] = {}
        self._calls: dict[Any, int] = {}
        self._action: torch.Tensor | None = None  # pinned

    @torch.no_grad()
    def __call__(
        self,
        obs: Mapping[
            str, np.ndarray
        ],  # name -> (N, …); may be shared memory: it is copied before this returns
        policy_state: dict[str, torch.Tensor] | None,
        is_first: np.ndarray,  # (N,) bool
        mode: ActMode,
    ) -> tuple[np.ndarray, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Actions (N, …) on the host, the policy's memory, its extras, and the observations on the device."""
        if policy_state is None:
            policy_state = self.policy.initial_policy_state(len(is_first))
        if not self.enabled:
            device_obs = {k: torch.from_numpy(v.copy()).to(self.device) for k, v in obs.items()}
            first = torch.from_numpy(is_first.copy()).to(self.device)
            action, policy_state, extras = self.policy.act(device_obs, policy_state, first, mode)
            return np.array(action.cpu().numpy()), policy_state, extras, device_obs
        self._place(obs, policy_state, is_first)
        assert self._state is not None
        action, extras = self._step(mode)
        if self._action is None or self._action.shape != action.shape:
            self._action = torch.empty(action.shape, dtype=action.dtype, pin_memory=True)
        self._action.copy_(action, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # the one host sync of a vector step
        return self._action.numpy().copy(), self._state, extras, self._obs

    def _place(
        self, obs: Mapping[str, np.ndarray], policy_state: dict[str, torch.Tensor], is_first: np.ndarray
    ) -> None:
        """Inputs to their fixed addresses; another number of environments begins anew."""
        if self._is_first is None or len(self._is_first) != len(is_first):
            self._graphs, self._calls, self._state = {}, {}, None
            arrays = {**obs, "is_first": is_first}
            self._staging = {
                k: torch.empty(v.shape, dtype=torch.from_numpy(v[:0]).dtype, pin_memory=True)
                for k, v in arrays.items()
            }
            device = {k: torch.empty_like(v, device=self.device) for k, v in self._staging.items()}
            self._is_first = device.pop("is_first")
            self._obs = device
        for key, target in {**self._obs, "is_first": self._is_first}.items():
            np.copyto(self._staging[key].numpy(), is_first if key == "is_first" else obs[key])
            target.copy_(self._staging[key], non_blocking=True)
        if self._state is None:
            self._state = {key: value.clone() for key, value in policy_state.items()}
        elif policy_state is not self._state:
            for key, value in policy_state.items():
                self._state[key].copy_(value)

    def _step(self, mode: ActMode) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        before_act = getattr(self.policy, "before_act", None)
        if before_act is not None:
            before_act(mode)
        key = (mode.sample, mode.temperature, mode.epsilon)
        if key in self._graphs:
            graph, result = self._graphs[key]
            graph.replay()
            return result
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= EAGER_CALLS:
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                result = self._act(mode)
            torch.cuda.current_stream(self.device).wait_stream(stream)
            return result
        return self._record(key, mode)

    def _record(self, key: Any, mode: ActMode) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        if mode.generator is not None:
            graph.register_generator_state(mode.generator)  # replays go on in its stream of numbers
        # A pool of its own: replay reads the result while an update may already be recorded or run.
        with torch.cuda.graph(graph):
            result = self._act(mode)
        self._graphs[key] = (graph, result)
        graph.replay()
        return result

    def _act(self, mode: ActMode) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert self._state is not None and self._is_first is not None
        action, state, extras = self.policy.act(self._obs, self._state, self._is_first, replace(mode))
        for key, value in state.items():
            self._state[key].copy_(value)
        return action, extras


@dataclass
class Arrived:
    """What one vector step brought: numpy, (N, …)."""

    obs: dict[str, np.ndarray]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray
    logs: dict[int, dict[str, float]]
    closed: list[int] = field(default_factory=list)  # environments that failed: this row ends their episode


class Collector:
    """Steps N environments with a policy and gives back stored rows."""

    def __init__(
        self,
        environment: Any,  # VectorEnv
        *,
        device: torch.device | str,
        generator: torch.Generator | None = None,  # on the device: the policy's sampling noise
        rows_on_host: bool = False,  # the buffer keeps its rows in host memory
        capture: bool = True,  # replay acting as a CUDA graph, where there is CUDA
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.environment = environment
        self.device = torch.device(device)
        self.generator = generator
        self.rows_on_host = rows_on_host or self.device.type == "cpu"
        self.stopwatch = stopwatch or Stopwatch()
        self.capture = capture
        self._runner: ActRunner | None = None
        self.tracker = EpisodeTracker(environment.num_envs)
        self.policy_state: dict[str, torch.Tensor] | None = None
        self._arrived: Arrived | None = None
        self._in_flight = False

    def reset(self) -> dict[str, np.ndarray]:
        """Start every environment anew; returns the first observations."""
        obs, _ = self.environment.reset()
        self._arrived = self._first(obs)
        self._in_flight = False
        self.policy_state = None
        return obs

    @torch.no_grad()
    def step(self, policy: Policy, mode: ActMode) -> CollectResult:
        """Receive all N results, act on them, send the actions, and return the rows.

        EnvironmentFaultError when too much has failed; nothing has changed then, and a checkpoint can be taken.
        """
        self.settle()
        failure = getattr(self.environment, "failure", None)  # a dreamed environment has none
        if failure is not None:
            raise failure
        arrived, self._arrived = self._arrived, None
        assert arrived is not None, "reset() first"
        with self.stopwatch("act"):
            mode = replace(mode, generator=self.generator)
            sent, self.policy_state, extras, obs = self._acting(policy)(
                arrived.obs, self.policy_state, arrived.is_first, mode
            )
            if self.rows_on_host and self.device.type != "cpu":
                # Copied: these arrays are the workers' shared memory, which the next send gives back to them.
                obs = {key: torch.from_numpy(value.copy()) for key, value in arrived.obs.items()}
            rows: dict[str, Any] = {OBS_PREFIX + key: value for key, value in obs.items()}
        ended = arrived.terminated | arrived.truncated
        sent[ended] = 0  # the action after an episode's last observation is never carried out
        rows |= {
            "action": sent,
            "reward": arrived.reward,
            "terminated": arrived.terminated,
            "truncated": arrived.truncated,
            "is_first": arrived.is_first,
            **extras,
        }
        self.environment.step_async(sent)
        self._in_flight = True
        counted = ~arrived.is_first
        episodes = self.tracker.update(arrived.reward, ended, counted, arrived.logs, arrived.closed)
        return CollectResult(steps=int(counted.sum()), episodes=episodes, trajectory=rows)

    def _acting(self, policy: Policy) -> ActRunner:
        if self._runner is None or self._runner.policy is not policy:
            self._runner = ActRunner(policy, device=self.device, capture=self.capture)
        return self._runner

    def settle(self) -> None:
        """Receive what is in flight and keep it for the next step."""
        if not self._in_flight:
            return
        with self.stopwatch("env_wait"):
            obs, reward, terminated, truncated, infos = self.environment.step_wait()
        self._in_flight = False
        self._arrived = Arrived(
            obs=obs,
            reward=np.array(reward, dtype=np.float32),
            terminated=np.array(terminated, dtype=bool),
            truncated=np.array(truncated, dtype=bool),
            is_first=np.array(self.environment.is_first, dtype=bool),
            logs=infos.get("log", {}),
            closed=list(infos.get("closed", ())),
        )

    def get_state(self) -> dict[str, Any]:
        self.settle()
        arrived = self._arrived
        assert arrived is not None
        return {
            "environment": self.environment.get_state(),
            "tracker": self.tracker.get_state(),
            "policy_state": self.policy_state,
            "reward": arrived.reward,
            "terminated": arrived.terminated,
            "truncated": arrived.truncated,
            "is_first": arrived.is_first,
            "logs": arrived.logs,
            "closed": arrived.closed,
        }

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Go on where `get_state` stood; returns environments that had to begin a new episode instead."""
        fresh: list[int] = self.environment.set_state(state["environment"])
        self.tracker.set_state(state["tracker"])
        self.policy_state = state["policy_state"]
        if self.policy_state is not None:
            self.policy_state = {key: value.to(self.device) for key, value in self.policy_state.items()}
        flags = {key: np.array(state[key]) for key in ("reward", "terminated", "truncated", "is_first")}
        arrived = self._first(self.environment.last_obs)
        kept = np.ones(self.environment.num_envs, dtype=bool)
        kept[fresh] = False
        for name, values in flags.items():
            getattr(arrived, name)[kept] = values[kept]
        self.tracker.returns[fresh] = 0.0
        self.tracker.lengths[fresh] = 0
        arrived.logs = {env: dict(log) for env, log in state["logs"].items() if kept[env]}
        arrived.closed = [env for env in state.get("closed", ()) if kept[env]]
        self._arrived = arrived
        self._in_flight = False
        return fresh

    def _first(self, obs: dict[str, np.ndarray]) -> Arrived:
        n = self.environment.num_envs
        none = np.zeros(n, dtype=bool)
        return Arrived(obs, np.zeros(n, np.float32), none, none.copy(), np.ones(n, dtype=bool), {})
