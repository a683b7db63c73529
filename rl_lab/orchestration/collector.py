"""The Collector: steps N environments with a policy and returns the rows to store.

One call is one vector step: receive the results of the last actions, act on them, send the new actions. The
environments' workers step while the learner trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rl_lab.errors import LabError
from rl_lab.protocols import Policy, SelectsActions, VectorEnvironment
from rl_lab.records import OBS_PREFIX, ActMode, CollectResult, EpisodeTracker
from rl_lab.utils import ranks
from rl_lab.utils.metrics import Stopwatch


@dataclass
class ReceivedStep:
    """Results of one vector step: numpy arrays, (N, …).

    Of an environment on the device, `obs` and `device` are tensors there, and the arrays are copies of `device`.
    """

    obs: dict[str, Any]
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    is_first: np.ndarray
    logs: dict[int, dict[str, float]]
    closed: list[int] = field(default_factory=list)  # failed environments: this row ends their episode
    device: dict[str, torch.Tensor] | None = None  # reward, terminated, truncated, is_first


class Collector:
    """Steps N environments with a policy and returns rows for the buffer.

    It holds the vector environment, the policy state and the actions in flight. `get_state` receives results
    in flight and keeps them for the next `step`, so that taking a checkpoint does not change the run.
    """

    def __init__(
        self,
        environment: VectorEnvironment,
        *,
        device: torch.device | str,
        generator: torch.Generator | None = None,  # on the device: the policy's sampling noise
        rows_on_host: bool = False,  # the buffer stores its rows in host memory
        capture: bool = True,  # on CUDA, replay acting as a CUDA graph
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
        self._received: ReceivedStep | None = None
        self._in_flight = False

    def reset(self) -> dict[str, np.ndarray]:
        """Reset every environment; return the first observations."""
        obs, _ = self.environment.reset()
        self._received = self._after_reset(obs)
        self._in_flight = False
        self.policy_state = None
        return obs

    @torch.no_grad()
    def step(self, policy: Policy, mode: ActMode) -> CollectResult:
        """Receive all N results, act on them, send the actions, and return the rows.

        A row holds what was received together, then the action taken: reward, terminated, truncated and
        is_first belong to the observation. An error of the policy, and EnvironmentFaultError after too many
        failures, are raised before anything has changed, so that a checkpoint can still be saved.
        """
        self.receive()
        failure = getattr(self.environment, "failure", None)  # a WorldModelEnv has no such attribute
        if failure is not None:
            raise failure
        received = self._received
        assert received is not None, "reset() first"
        with self.stopwatch("act"):
            mode = replace(mode, generator=self.generator)
            on_device = received.device
            is_first = received.is_first if on_device is None else on_device["is_first"]
            actions, self.policy_state, extras, obs = self._runner_for(policy)(
                received.obs, self.policy_state, is_first, mode
            )
            if on_device is None and self.rows_on_host and self.device.type != "cpu":
                # Copied: these arrays are shared memory, which the workers overwrite after the next send.
                obs = {key: torch.from_numpy(value.copy()) for key, value in received.obs.items()}
            rows: dict[str, Any] = {OBS_PREFIX + key: value for key, value in obs.items()}
        ended = received.terminated | received.truncated
        # The action after the last observation of an episode is never executed.
        if on_device is None:
            actions[ended] = 0
            rows |= {name: getattr(received, name) for name in FLAGS}
        else:
            over = on_device["terminated"] | on_device["truncated"]
            actions = torch.where(over.view(-1, *[1] * (actions.ndim - 1)), 0, actions)
            rows |= {**on_device, "is_first": received.is_first}  # the buffer reads it on the host
        rows |= {"action": actions, **extras}
        self.environment.step_async(actions)
        self._received, self._in_flight = None, True
        counted = ~received.is_first
        episodes = self.tracker.update(received.reward, ended, counted, received.logs, received.closed)
        return CollectResult(steps=int(counted.sum()), episodes=episodes, trajectory=rows)

    @property
    def received(self) -> ReceivedStep | None:
        """The results that `receive` has received and the next `step` will use."""
        return self._received

    def _runner_for(self, policy: Policy) -> ActRunner:
        if self._runner is None or self._runner.policy is not policy:
            self._runner = ActRunner(policy, device=self.device, capture=self.capture)
        return self._runner

    def receive(self) -> None:
        """Receive the results in flight and keep them for the next step."""
        if not self._in_flight:
            return
        with self.stopwatch("env_wait"):
            obs, reward, terminated, truncated, infos = self.environment.step_wait()
        self._in_flight = False
        if isinstance(reward, torch.Tensor):
            self._received = received_on_device(obs, reward, terminated, truncated, self.environment.is_first)
            return
        self._received = ReceivedStep(
            obs=obs,
            reward=np.array(reward, dtype=np.float32),
            terminated=np.array(terminated, dtype=bool),
            truncated=np.array(truncated, dtype=bool),
            is_first=np.array(self.environment.is_first, dtype=bool),
            logs=infos.get("log", {}),
            closed=list(infos.get("closed", ())),
        )

    def get_state(self) -> dict[str, Any]:
        self.receive()
        received = self._received
        assert received is not None
        return {
            "environment": self.environment.get_state(),
            "tracker": self.tracker.get_state(),
            "policy_state": self.policy_state,
            "reward": received.reward,
            "terminated": received.terminated,
            "truncated": received.truncated,
            "is_first": received.is_first,
            "logs": received.logs,
            "closed": received.closed,
        }

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Continue from `get_state`; return the environments that had to start a new episode instead."""
        if "environment" not in state:  # of remote collectors, whose environments have ended with them
            self.reset()
            return list(range(self.environment.num_envs))
        fresh = self.environment.set_state(state["environment"])
        self.tracker.set_state(state["tracker"])
        self.policy_state = state["policy_state"]
        if self.policy_state is not None:
            self.policy_state = {key: value.to(self.device) for key, value in self.policy_state.items()}
        flags = {key: np.array(state[key]) for key in ("reward", "terminated", "truncated", "is_first")}
        received = self._after_reset(self.environment.last_obs)
        kept = np.ones(self.environment.num_envs, dtype=bool)
        kept[fresh] = False
        for name, values in flags.items():
            getattr(received, name)[kept] = values[kept]
        self.tracker.returns[fresh] = 0.0
        self.tracker.lengths[fresh] = 0
        received.logs = {env: dict(log) for env, log in state["logs"].items() if kept[env]}
        received.closed = [env for env in state.get("closed", ()) if kept[env]]
        self._to_device(received)
        self._received = received
        self._in_flight = False
        return fresh

    def _after_reset(self, obs: dict[str, np.ndarray]) -> ReceivedStep:
        n = self.environment.num_envs
        none = np.zeros(n, dtype=bool)
        received = ReceivedStep(obs, np.zeros(n, np.float32), none, none.copy(), np.ones(n, dtype=bool), {})
        self._to_device(received)
        return received

    def _to_device(self, received: ReceivedStep) -> None:
        """Set `device` from the arrays, for an environment on the device."""
        if getattr(self.environment, "on_device", False):
            received.device = {
                name: torch.as_tensor(getattr(received, name), device=self.device) for name in FLAGS
            }


FLAGS = ("reward", "terminated", "truncated", "is_first")


def host_flags(
    obs: Mapping[str, torch.Tensor],
    reward: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return reward, terminated, truncated and is_first as arrays (N,), with one copy for all.

    Raises LabError if an observation or a reward is not finite.
    """
    usable = torch.isfinite(reward)
    for value in obs.values():
        if value.is_floating_point():
            usable = usable & torch.isfinite(value).flatten(1).all(1)
    packed = torch.stack(
        [reward.float(), *(flag.float() for flag in (terminated, truncated, is_first, usable))]
    )
    rows = packed.cpu().numpy()
    if not rows[4].all():
        index = int(np.flatnonzero(rows[4] == 0)[0])
        raise LabError(f"environment {index} returned an observation or a reward that is NaN or infinite")
    return rows[0].copy(), rows[1] > 0, rows[2] > 0, rows[3] > 0


def received_on_device(obs: Any, reward: Any, terminated: Any, truncated: Any, is_first: Any) -> ReceivedStep:
    """Return the step of an environment on the device: its flags are copied to the host, observations are not."""
    values = (reward, terminated, truncated, is_first)
    arrays = host_flags(obs, *values)
    return ReceivedStep(obs, *arrays, logs={}, device=dict(zip(FLAGS, values, strict=True)))


# ---------------------------------------------------------------- acting on the device


EAGER_CALLS = 3  # before the CUDA graph is recorded, as for hooks


class ActRunner:
    """Calls `policy.act`: observations to the device, one step of the policy, actions back to the host.

    On CUDA the inputs and the policy state have fixed addresses, and after a few calls the step is replayed
    as a CUDA graph. The next call then overwrites the returned tensors: store or copy them before. A policy
    that cannot be captured (it reads from the device, or its state cannot be updated in place) sets
    `act_captures = False`.
    """

    def __init__(self, policy: Policy, *, device: torch.device, capture: bool = True) -> None:
        self.policy = policy
        self.device = device
        # `select_action` reads the observations on the host.
        can_capture = getattr(policy, "act_captures", not isinstance(policy, SelectsActions))
        self.enabled = bool(capture and device.type == "cuda" and can_capture)
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
        obs: Mapping[str, Any],  # name -> (N, …); may be shared memory: copied before the call returns
        policy_state: dict[str, torch.Tensor] | None,
        is_first: Any,  # (N,) bool
        mode: ActMode,
    ) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return actions (N, …) on the host, the policy state, extras, and the observations on the device.

        Tensors on the device are not copied, and then the actions stay there, too.
        """
        if policy_state is None:
            policy_state = self.policy.initial_policy_state(len(is_first))
        given = isinstance(is_first, torch.Tensor)
        if not self.enabled and given:
            action, policy_state, extras = self.policy.act(dict(obs), policy_state, is_first, mode)
            return action, policy_state, extras, dict(obs)
        if not self.enabled:
            device_obs = {k: torch.from_numpy(v.copy()).to(self.device) for k, v in obs.items()}
            first = torch.from_numpy(is_first.copy()).to(self.device)
            action, policy_state, extras = self.policy.act(device_obs, policy_state, first, mode)
            return np.array(action.cpu().numpy()), policy_state, extras, device_obs
        self._copy_inputs(obs, policy_state, is_first)
        assert self._state is not None
        action, extras = self._step(mode)
        if given:
            return action, self._state, extras, self._obs
        if self._action is None or self._action.shape != action.shape:
            self._action = torch.empty(action.shape, dtype=action.dtype, pin_memory=True)
        self._action.copy_(action, non_blocking=True)
        torch.cuda.current_stream(self.device).synchronize()  # the one host sync of a vector step
        return self._action.numpy().copy(), self._state, extras, self._obs

    def _copy_inputs(
        self, obs: Mapping[str, Any], policy_state: dict[str, torch.Tensor], is_first: Any
    ) -> None:
        """Copy the inputs to their fixed addresses; a new number of environments discards the graphs."""
        if self._is_first is None or len(self._is_first) != len(is_first):
            self._graphs, self._calls, self._state = {}, {}, None
            arrays = {**obs, "is_first": is_first}
            given = isinstance(is_first, torch.Tensor)
            self._staging = (
                {}
                if given
                else {
                    k: torch.empty(v.shape, dtype=torch.from_numpy(v[:0]).dtype, pin_memory=True)
                    for k, v in arrays.items()
                }
            )
            like = arrays if given else self._staging
            device = {k: torch.empty_like(v, device=self.device) for k, v in like.items()}
            self._is_first = device.pop("is_first")
            self._obs = device
        for key, target in {**self._obs, "is_first": self._is_first}.items():
            value = is_first if key == "is_first" else obs[key]
            if not isinstance(value, torch.Tensor):
                np.copyto(self._staging[key].numpy(), value)
                value = self._staging[key]
            target.copy_(value, non_blocking=True)
        if self._state is None:
            self._state = {key: value.clone() for key, value in policy_state.items()}
        elif policy_state is not self._state:
            for key, value in policy_state.items():
                self._state[key].copy_(value)

    def _step(self, mode: ActMode) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        before_act = getattr(self.policy, "before_act", None)
        if before_act is not None:
            before_act(mode)
        act_variant = getattr(self.policy, "act_variant", None)
        if act_variant is not None:  # it may read from the device
            mode = replace(mode, variant=act_variant(self._state, self._is_first))
        key = (mode.sample, mode.temperature, mode.epsilon, mode.policy, mode.variant)
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
            graph.register_generator_state(mode.generator)  # each replay continues its random sequence
        # Its own memory pool: the result is read while an update may already be recorded or replayed.
        with torch.cuda.graph(graph, capture_error_mode="thread_local" if ranks.joined() else "global"):
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
