"""The memory that the trainer and the environments' workers share: everything of a vector step but the infos."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from rl_lab.records import ArraySpec, Spec

ALIGNMENT = 64  # a cache line: two workers do not write to one line at the borders of an array
HALVES = 2


class StepArrays:
    """Actions, observations, rewards and flags of N environments, views of one block.

    Observations lie there twice and take turns: while workers write one half, the other still holds what the trainer
    was given last, whole, whatever happens to a worker in the middle of a write.

    halves:   two dicts, name -> (N, …); `obs` is the one in turn
    action (N, …); reward (N,) float32; terminated, truncated (N,) bool
    seed:     (N,) int64, of each environment's next reset; written by the trainer
    goes_on:  (N,) bool, whether the next reset will continue the game that the last episode was part of
    ticks:    (N,) int64, calls of each environment that came back: how the trainer tells slow from stuck
    """

    def __init__(self, spec: Spec, num_envs: int, memory: Any = None) -> None:
        block = (
            np.zeros(self.nbytes(spec, num_envs), np.uint8)
            if memory is None
            else np.frombuffer(memory, np.uint8)
        )
        arrays: dict[str, np.ndarray] = {}
        offset = 0
        for name, column in _columns(spec).items():
            shape, dtype = (num_envs, *column.shape), np.dtype(column.dtype)
            size = int(np.prod(shape)) * dtype.itemsize
            arrays[name] = block[offset : offset + size].view(dtype).reshape(shape)
            offset += _aligned(size)
        self.halves = [
            {name: arrays[f"obs/{half}/{name}"] for name in spec.observations} for half in range(HALVES)
        ]
        self.action = arrays["action"]
        self.reward = arrays["reward"]
        self.terminated = arrays["terminated"]
        self.truncated = arrays["truncated"]
        self.seed = arrays["seed"]
        self.goes_on = arrays["goes_on"]
        self.ticks = arrays["ticks"]
        self._turn = arrays["turn"]

    @property
    def obs(self) -> dict[str, np.ndarray]:
        return self.halves[self._turn[0]]

    def turn(self) -> None:
        """The other half is written next."""
        self._turn[0] = 1 - self._turn[0]

    def repeat(self, env: int) -> None:
        """Put the observation before this one in its place."""
        old, new = self.halves[1 - self._turn[0]], self.obs
        for name, array in new.items():
            array[env] = old[name][env]

    @staticmethod
    def nbytes(spec: Spec, num_envs: int) -> int:
        return sum(
            _aligned(num_envs * int(np.prod(column.shape)) * np.dtype(column.dtype).itemsize)
            for column in _columns(spec).values()
        )


def shared_memory(context: Any, spec: Spec, num_envs: int) -> Any:
    """A block for `StepArrays` that worker processes inherit.

    It is an unlinked file mapped into memory: it has no name, so nothing is left behind however a run ends.
    """
    return context.RawArray(ctypes.c_byte, StepArrays.nbytes(spec, num_envs))


def _columns(spec: Spec) -> dict[str, ArraySpec]:
    rows = spec.row_columns()
    columns = {
        f"obs/{half}/{name}": column for half in range(HALVES) for name, column in spec.observations.items()
    }
    columns |= {name: rows[name] for name in ("action", "reward", "terminated", "truncated")}
    numbers = dict.fromkeys(("seed", "ticks", "turn"), ArraySpec((), "int64"))
    return {**columns, **numbers, "goes_on": ArraySpec((), "bool")}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
