"""Vector environments whose observations are tensors on the training device, such as those of GPU simulators.

    simulator = CartPole(1024, device="cuda")
    env = TensorVectorEnv(simulator, name="tensor/cartpole", seed=0)
    obs, _ = env.reset()                                       # {"state": (1024, 4) float32 on the GPU}
    obs, reward, terminated, truncated, _ = env.step(actions)  # tensors, too

The Collector passes such observations to the policy and to the buffer as they are. Only five numbers of each
environment are copied to the host, by the Collector, where episodes are counted and the buffer keeps their starts.
`FromVectorEnv` makes a TensorSimulator from a simulator that resets by itself (Isaac Lab, ManiSkill, mjlab), and
`as_tensors` converts arrays of JAX or Warp without a copy (DLPack).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.errors import CheckpointError, LabError
from rl_lab.records import ActionSpec, ArraySpec, Spec

Tensors = dict[str, torch.Tensor]


class TensorSimulator:
    """N copies of one environment that are stepped together, to subclass.

    num_envs, device, observations (name -> shape and dtype of one environment) and action are attributes.
    """

    num_envs: int
    device: torch.device
    observations: dict[str, ArraySpec]
    action: ActionSpec
    time_limit: int | None = None  # steps after which an episode is truncated, unless the user sets another

    def start(self, which: torch.Tensor, generator: torch.Generator) -> None:
        """Begin new episodes. which: (N,) bool. Draw for all N and select, so that nothing waits for the device."""
        raise NotImplementedError

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Step all N; return reward (N,) and terminated (N,). action: (N, …)

        The actions of episodes that have ended are 0, and what they do is not used: `start` follows for them.
        """
        raise NotImplementedError

    def observe(self) -> Tensors:
        """Return name -> (N, …), contiguous, for all N. They may change in the next `start` or `step`."""
        raise NotImplementedError

    def state(self) -> Tensors:
        """Return the tensors that determine what follows: they are saved, and loaded in place."""
        raise NotImplementedError

    def ended(self) -> torch.Tensor | None:
        """Return (N,) bool, episodes that the simulator itself truncated in the last step, or None."""
        return None

    def close(self) -> None:
        """Release what the simulator holds."""


class TensorVectorEnv:
    """The interface of `VectorEnv` with tensors on the simulator's device instead of arrays.

    An episode's last observation is returned with `terminated` or `truncated`; the next step returns the first
    observation of the next episode with reward 0 and `is_first`, as all vector environments of RL Lab do.
    """

    on_device = True
    failure = None
    normalizer = None
    restarts = 0
    num_workers = 0

    def __init__(
        self, simulator: TensorSimulator, *, name: str, seed: int = 0, time_limit: int | None = None
    ) -> None:
        self.simulator = simulator
        self.num_envs = simulator.num_envs
        self.device = simulator.device
        self.spec = Spec(name, dict(simulator.observations), simulator.action)
        self.time_limit = simulator.time_limit if time_limit is None else time_limit
        self.closed = False
        self._seed = seed
        self._generator = torch.Generator(self.device)
        no = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self._all = ~no
        self._ended = no.clone()
        self.is_first = self._all.clone()
        self._elapsed = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self._action: torch.Tensor | None = None
        self.last_obs: Tensors = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensors, dict[str, Any]]:
        """Start an episode in every environment; the first call and a seed determine all that follow."""
        if seed is not None or not self.last_obs:
            self._generator.manual_seed((self._seed if seed is None else seed) % 2**63)
        self.simulator.start(self._all, self._generator)
        self._elapsed.zero_()
        self._ended.zero_()
        self.is_first = self._all.clone()
        self._action = None
        return self._observe(), {}

    def step_async(self, actions: Any) -> None:
        """Take actions (N, …), a tensor on the device (or an array, which is copied to it)."""
        if not self.last_obs:
            raise LabError("step_async(): call reset() before the first step")
        action = torch.as_tensor(actions, device=self.device)
        if tuple(action.shape) != (self.num_envs, *self.spec.action.shape):
            raise LabError(
                f"actions have shape {tuple(action.shape)}, not {(self.num_envs, *self.spec.action.shape)}"
            )
        self._action = action

    def step_wait(self) -> tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Step, or begin the next episode where the last one has ended."""
        if self._action is None:
            raise LabError("step_wait(): call step_async() first")
        action, self._action, first = self._action, None, self._ended
        reward, terminated = self.simulator.step(action)
        self.simulator.start(first, self._generator)
        self._elapsed = torch.where(first, 0, self._elapsed + 1)
        truncated = torch.zeros_like(terminated)
        if self.time_limit is not None:
            truncated = self._elapsed >= self.time_limit
        own = self.simulator.ended()
        if own is not None:
            truncated = truncated | own
        terminated = terminated & ~first
        truncated = truncated & ~terminated & ~first
        self.is_first = first
        self._ended = terminated | truncated
        return self._observe(), reward.float().masked_fill(first, 0.0), terminated, truncated, {}

    def step(self, actions: Any) -> tuple[Tensors, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.step_async(actions)
        return self.step_wait()

    @property
    def last_dones(self) -> np.ndarray:
        return self._ended.cpu().numpy()

    def get_state(self) -> dict[str, Any]:
        """Return all tensors of the simulator: a resumed run continues every open episode."""
        if self._action is not None:
            raise LabError("get_state(): call step_wait() first, since a step is under way")
        own = {"ended": self._ended, "is_first": self.is_first, "elapsed": self._elapsed}
        return {
            "generator": self._generator.get_state(),
            "own": {name: value.clone() for name, value in own.items()},
            "simulator": {name: value.clone() for name, value in self.simulator.state().items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> list[int]:
        """Continue from `get_state`; no environment has to start a new episode."""
        held = self.simulator.state()
        saved = state.get("simulator", {})
        if {name: tuple(value.shape) for name, value in saved.items()} != {
            name: tuple(value.shape) for name, value in held.items()
        }:
            raise CheckpointError(
                f"environment.num_envs={self.num_envs}: the checkpoint has other environments than {self.spec.name}; "
                "set environment.num_envs and environment.task to those of the run"
            )
        for name, value in held.items():
            value.copy_(saved[name])
        own = {name: value.to(self.device) for name, value in state["own"].items()}
        self._ended, self.is_first, self._elapsed = own["ended"], own["is_first"], own["elapsed"]
        self._generator.set_state(state["generator"].cpu())
        self._action = None
        self._observe()
        return []

    def listen(self, say: Any, trusted: bool = False) -> None:
        """Nothing to say: there are no worker processes."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.simulator.close()

    def __enter__(self) -> TensorVectorEnv:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _observe(self) -> Tensors:
        self.last_obs = self.simulator.observe()
        return self.last_obs


# --- Other simulators ------------------------------------------------------------------------------------


class FromVectorEnv(TensorSimulator):
    """A simulator with Gymnasium's vector interface, tensors on the device, and resets of its own.

    env:   `reset() -> obs, info`, `step(action) -> obs, reward, terminated, truncated, info`; obs: a tensor or a dict
           of tensors (N, …); when an episode ends, `step` returns the first observation of the next one
    final: name of the entry of `info` with the last observations of ended episodes (N, …), as in obs

    Such a simulator cannot wait for one environment, so the first observation of an episode is not seen: each
    begins with the one after its first step, whose action is 0. Its state cannot be saved: a resumed run starts new
    episodes.
    """

    def __init__(
        self,
        env: Any,
        *,
        num_envs: int,
        device: torch.device | str,
        observations: dict[str, ArraySpec],
        action: ActionSpec,
        final: str = "final_obs",
    ) -> None:
        self.env = env
        self.num_envs, self.device = num_envs, torch.device(device)
        self.observations, self.action, self.final = observations, action, final
        self._begun = False
        self._obs: Tensors = {}
        self._truncated = torch.zeros(num_envs, dtype=torch.bool, device=self.device)

    def start(self, which: torch.Tensor, generator: torch.Generator) -> None:
        if not self._begun:
            self._begun = True
            seed = int(generator.initial_seed() % 2**31)
            self._obs = as_tensors(self.env.reset(seed=seed)[0], self.observations, self.device)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._obs = as_tensors(obs, self.observations, self.device)
        terminated, truncated = (
            torch.as_tensor(flag, device=self.device).bool() for flag in (terminated, truncated)
        )
        ended = terminated | truncated
        if self.final not in info:
            raise LabError(
                f"the simulator's info has no '{self.final}': name the entry with the last observations of ended "
                f"episodes (it has {', '.join(sorted(map(str, info))) or 'none'})"
            )
        last = as_tensors(info[self.final], self.observations, self.device)
        for name, value in self._obs.items():
            mask = ended.view(-1, *[1] * (value.ndim - 1))
            self._obs[name] = torch.where(mask, last[name], value)
        self._truncated = truncated
        return torch.as_tensor(reward, device=self.device), terminated

    def ended(self) -> torch.Tensor | None:
        return self._truncated

    def observe(self) -> Tensors:
        return self._obs

    def state(self) -> Tensors:
        return {}

    def close(self) -> None:
        self.env.close()


def as_tensors(obs: Any, observations: Mapping[str, ArraySpec], device: torch.device) -> Tensors:
    """Return name -> tensor, without a copy if it is a tensor or a DLPack array (JAX, Warp, CuPy) of that device.

    obs: a dict of arrays, or one array if there is one name
    """
    values = obs if isinstance(obs, Mapping) else dict.fromkeys(observations, obs)
    tensors: Tensors = {}
    for name, spec in observations.items():
        if name not in values:
            raise LabError(f"observation '{name}' is missing: the simulator returned {', '.join(values)}")
        value = values[name]
        if not isinstance(value, torch.Tensor) and hasattr(value, "__dlpack__"):
            value = torch.from_dlpack(value)
        tensor = torch.as_tensor(value, device=device)
        if tuple(tensor.shape[1:]) != spec.shape:
            raise LabError(f"observation '{name}' has shape {tuple(tensor.shape[1:])}, not {spec.shape}")
        tensors[name] = tensor.to(getattr(torch, spec.dtype)).contiguous()
    return tensors
