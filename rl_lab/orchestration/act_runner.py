"""Acting for all environments: observations to the device, the policy's step (one CUDA graph there), actions back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.records import ActMode

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
