"""The memory that the trainer and the environments' workers share: everything of a vector step but the infos."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from rl_lab.records import ArraySpec, Spec

ALIGNMENT = 64  # a cache line: two workers do not write to one line at the borders of an array


class StepArrays:
    """Observations, actions, rewards, flags and episode numbers of N environments, views of one block.

    obs: name -> (N, …); action (N, …); reward (N,) float32; terminated, truncated (N,) bool;
    episode (N,) int64, the number of the episode that each environment is in.
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
        self.obs = {name: arrays["obs/" + name] for name in spec.observations}
        self.action = arrays["action"]
        self.reward = arrays["reward"]
        self.terminated = arrays["terminated"]
        self.truncated = arrays["truncated"]
        self.episode = arrays["episode"]

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
    columns = spec.row_columns()
    del columns["is_first"]  # known to the trainer without being told
    return {**columns, "episode": ArraySpec((), "int64")}


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
