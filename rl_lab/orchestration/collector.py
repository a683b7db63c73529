"""One vector step at a time: receive, act, hand out rows, send. Workers step while the learner trains.

The Collector owns the vector environment, the policy's memory and the actions in flight. A result that has
arrived waits until the next `step`, so a checkpoint (which settles what is in flight) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rl_lab.episode_tracker import EpisodeTracker
from rl_lab.orchestration.act_runner import ActRunner, Policy
from rl_lab.records import OBS_PREFIX, ActMode, CollectResult
from rl_lab.utils.timing import Stopwatch


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
