"""Returns and lengths of episodes, over N environments that run side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

HISTORY = 100  # finished episodes that the running statistics look back on


@dataclass
class Episode:
    """One finished episode. `log` holds what the environment summed under `log/…`."""

    episode_return: float
    length: int
    env: int = 0  # which environment played it
    log: dict[str, float] = field(default_factory=dict)


class EpisodeTracker:
    """Adds up rewards until an episode ends, and remembers the last `HISTORY` finished ones."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.returns = np.zeros(num_envs, dtype=np.float64)
        self.lengths = np.zeros(num_envs, dtype=np.int64)
        self.history: deque[Episode] = deque(maxlen=HISTORY)
        self.total_episodes = 0
        self._fresh: list[Episode] = []

    def update(
        self,
        reward: np.ndarray,  # (N,)
        done: np.ndarray,  # (N,) bool
        counted: np.ndarray | None = None,  # (N,) bool, False for reset rows
        logs: Mapping[int, Mapping[str, float]] | None = None,  # by environment, for those that ended
        broken: Collection[int] = (),  # environments whose episode a failure ended, not the task
    ) -> int:
        """Add one vector step; returns how many episodes ended with it.

        A broken episode is counted, but its return says nothing and is not kept.
        """
        self.returns += np.asarray(reward, dtype=np.float64)
        self.lengths += 1 if counted is None else np.asarray(counted, dtype=np.int64)
        ended = [int(env) for env in np.flatnonzero(done)]
        for env in ended:
            if env in broken:
                continue
            log = dict(logs[env]) if logs and env in logs else {}
            episode = Episode(float(self.returns[env]), int(self.lengths[env]), env, log)
            self.history.append(episode)
            self._fresh.append(episode)
        self.returns[ended] = 0.0
        self.lengths[ended] = 0
        self.total_episodes += len(ended)
        return len(ended)

    def drain(self) -> list[Episode]:
        """Episodes finished since the last call."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def get_state(self) -> dict[str, Any]:
        def pack(episodes: Any) -> list[list[Any]]:
            return [[e.episode_return, e.length, e.env, dict(e.log)] for e in episodes]

        return {
            "returns": self.returns.tolist(),
            "lengths": self.lengths.tolist(),
            "history": pack(self.history),
            "fresh": pack(self._fresh),
            "total_episodes": self.total_episodes,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.returns = np.asarray(state["returns"], dtype=np.float64)
        self.lengths = np.asarray(state["lengths"], dtype=np.int64)
        self.history = deque((Episode(*item) for item in state["history"]), maxlen=HISTORY)
        self._fresh = [Episode(*item) for item in state["fresh"]]
        self.total_episodes = int(state["total_episodes"])


def return_statistics(episodes: list[Episode]) -> dict[str, float]:
    """Mean, std, min and max of returns, mean length, and the mean of each `log/…` sum."""
    if not episodes:
        return {}
    returns = np.array([episode.episode_return for episode in episodes])
    statistics = {
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(np.mean([episode.length for episode in episodes])),
    }
    for key in sorted({key for episode in episodes for key in episode.log}):
        statistics[key] = float(np.mean([e.log[key] for e in episodes if key in e.log]))
    return statistics
