"""Where dreams begin: rows of replay, of recorded episodes, or of a fresh episode in the real environment.

Each is called with the number of dreams and a CPU generator, and gives rows (B, T, …) whose last one is not an end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rl_lab.errors import ConfigError
from rl_lab.records import OBS_PREFIX, Batch, BatchSpec, Spec

Starts = Callable[[int, torch.Generator], Batch]
# (observations (N, …) by name, is_first (N,)) -> actions (N, …)
Choose = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]

TRIES = 20  # episodes that ended too early before a start of a single row is given instead


class BufferStarts:
    """Sequences of `length` rows from a buffer (see buffers/replay.py)."""

    def __init__(self, buffer: Any, length: int) -> None:
        self.buffer = buffer
        self.length = length

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        # One row more than is used, so that the last one used is never an episode's last.
        spec = BatchSpec(count, self.length + 1, boundary="within")
        batch = self.buffer.sample(spec, generator=generator)
        return Batch({name: value[:, : self.length].clone() for name, value in batch.columns.items()})


class EpisodeStarts:
    """Sequences of `length` rows from whole episodes: columns (K+1, …) each, as a buffer stores them."""

    def __init__(self, episodes: Sequence[Mapping[str, np.ndarray]], length: int) -> None:
        self.episodes = [episode for episode in episodes if len(episode["reward"]) > length]
        self.length = length
        if not self.episodes:
            raise ConfigError(
                f"no episode has the {length} steps that a dream starts from: {len(episodes)} episodes, the longest has "
                f"{max([len(episode['reward']) - 1 for episode in episodes], default=0)}"
            )

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        rows = []
        for _ in range(count):
            episode = self.episodes[_draw(len(self.episodes), generator)]
            first = _draw(len(episode["reward"]) - self.length, generator)
            rows.append({name: value[first : first + self.length] for name, value in episode.items()})
        return Batch({name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})


class EnvironmentStarts:
    """The first `length` rows of fresh episodes in a real environment (a VectorEnv, reset anew for every call).

    choose: the actions; None takes random ones
    """

    def __init__(self, environment: Any, length: int, choose: Choose | None = None) -> None:
        self.environment = environment
        self.length = length
        self.choose = choose or self._random
        self._numbers = np.random.default_rng(0)

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        self._numbers = np.random.default_rng(_draw(2**31 - 1, generator))
        taken: list[dict[str, np.ndarray]] = []
        for attempt in range(TRIES + count):
            length = self.length if attempt < TRIES else 1
            taken += self._play(_draw(2**31 - 1, generator), length)
            if len(taken) >= count:
                break
        shortest = min(len(rows["reward"]) for rows in taken[:count])
        names = taken[0].keys()
        return Batch(
            {n: torch.from_numpy(np.stack([rows[n][-shortest:] for rows in taken[:count]])) for n in names}
        )

    def _play(self, seed: int, length: int) -> list[dict[str, np.ndarray]]:
        """One start of each environment, those left out whose episode ended on the way."""
        environment = self.environment
        spec: Spec = environment.spec
        obs, _ = environment.reset(seed=seed)
        n = environment.num_envs
        reward, ended, is_first = np.zeros(n, np.float32), np.zeros(n, bool), np.ones(n, bool)
        steps: list[dict[str, np.ndarray]] = []
        for t in range(length):
            row = {OBS_PREFIX + name: np.array(value) for name, value in obs.items()}
            flags = {"terminated": ended.copy(), "truncated": ended.copy(), "is_first": is_first.copy()}
            row |= {"reward": reward.copy(), **flags}
            row["action"] = np.zeros((n, *spec.action.shape), spec.action.dtype)
            steps.append(row)
            if t + 1 < length:
                row["action"] = np.asarray(self.choose(obs, is_first), dtype=spec.action.dtype)
                obs, reward, terminated, truncated, _ = environment.step(row["action"])
                is_first = np.zeros(n, bool)
                ended = ended | terminated | truncated
        return [
            {name: np.stack([row[name][i] for row in steps]) for name in steps[0]}
            for i in np.flatnonzero(~ended)
        ]

    def _random(self, obs: dict[str, np.ndarray], is_first: np.ndarray) -> np.ndarray:
        action = self.environment.spec.action
        shape = (self.environment.num_envs, *action.shape)
        if action.kind == "continuous":
            return self._numbers.uniform(-1.0, 1.0, shape).astype(np.float32)
        return self._numbers.integers(0, np.asarray(action.choices).reshape(action.shape), shape)


def _draw(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))
