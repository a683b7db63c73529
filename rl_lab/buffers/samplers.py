"""Samplers choose where sequences start. They work on positions; the buffer fetches the rows.

A buffer has one sampler per BatchSpec. To add a sampler, register its class in `SAMPLERS` or pass it to the
buffer as `samplers={"name": factory}`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.ring import Ring
from rl_lab.errors import ConfigError, closest
from rl_lab.protocols import Sampler
from rl_lab.records import BatchSpec

REJECTION_ROUNDS = (
    16  # of twice the batch size, before the sampler lists all valid starts and draws from them
)
Starts = tuple[np.ndarray, np.ndarray]  # stream (K,), position of the first row (K,), int64


def samplers_state(samplers: Mapping[str, Any], specs: Mapping[str, BatchSpec]) -> dict[str, Any]:
    """Return the state of a buffer's samplers, each with its BatchSpec."""
    return {
        "samplers": [
            {"spec": asdict(specs[key]), "state": sampler.get_state()} for key, sampler in samplers.items()
        ]
    }


def restore_samplers(state: Mapping[str, Any], sampler_for: Callable[[BatchSpec], Any]) -> None:
    """Restore the samplers; `sampler_for` creates those that do not exist yet."""
    for saved in state["samplers"]:
        sampler_for(BatchSpec(**saved["spec"])).set_state(saved["state"])


class UniformSampler:
    """Draws uniformly from all starts that the BatchSpec's boundary allows."""

    def __init__(self, ring: Ring, spec: BatchSpec) -> None:
        if spec.boundary == "pad" and spec.pad == "both":
            raise ConfigError("pad 'both' needs buffer=episodes: this buffer pads only 'right' or 'left'")
        self._ring = ring
        self._rows, self._needed = spec.rows, spec.stored_rows
        self._one_episode = spec.boundary == "within" or (spec.boundary == "pad" and spec.least > 1)
        # The stored rows of a padded window are its first (pad right) or its last ones (pad left).
        self._padded = self._rows - self._needed if spec.boundary == "pad" and spec.pad == "left" else 0

    def available(self) -> int:
        if self._one_episode:
            return self._ring.unbroken_count(self._needed)
        return self._ring.num_streams * self._candidates()

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        draw = self._draw_unbroken if self._one_episode else self._draw_any
        stream, start = draw(count, generator)
        return stream, start - self._padded

    def undo(self) -> None:
        """Nothing to undo: the sampler has no state."""

    def on_add(self, position: int) -> None:
        """Nothing to do: the starts are computed from the ring."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        pass

    def _candidates(self) -> int:
        """Return the number of starts per stream, regardless of episodes."""
        return max(0, self._ring.stored - self._needed + 1)

    def _draw_any(self, count: int, generator: torch.Generator) -> Starts:
        per_stream = self._candidates()
        pick = torch.randint(self._ring.num_streams * per_stream, (count,), generator=generator).numpy()
        return pick // per_stream, self._ring.oldest + pick % per_stream

    def _draw_unbroken(self, count: int, generator: torch.Generator) -> Starts:
        found: list[Starts] = []
        missing = count
        for _ in range(REJECTION_ROUNDS):
            stream, start = self._draw_any(2 * count, generator)
            fits = np.flatnonzero(self._ring.unbroken(stream, start, self._needed))[:missing]
            found.append((stream[fits], start[fits]))
            missing -= len(fits)
            if not missing:
                break
        else:  # valid starts are rare: list them all
            stream, start = self._ring.unbroken_starts(self._needed)
            pick = torch.randint(len(stream), (missing,), generator=generator).numpy()
            found.append((stream[pick], start[pick]))
        streams, starts = zip(*found)
        return np.concatenate(streams), np.concatenate(starts)


class EndsSampler(UniformSampler):
    """Draws a row of all stored ones; a sequence that would cross the end of the row's episode ends there instead.

    So the last rows of an episode, which are rare and have its ending, are in as many sequences as the others
    (`prioritize_ends` in DreamerV2: danijar/dreamerv2 common/replay.py). A sequence that starts before its episode
    begins with the end of the previous one; the sequences of episodes that have not ended are not moved.
    """

    def __init__(self, ring: Ring, spec: BatchSpec) -> None:
        if spec.boundary != "cross":
            raise ConfigError(f"sampler 'ends' needs boundary 'cross', not '{spec.boundary}'")
        super().__init__(ring, spec)

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        ring = self._ring
        pick = torch.randint(ring.num_streams * ring.stored, (count,), generator=generator).numpy()
        stream, start = pick // ring.stored, ring.oldest + pick % ring.stored
        steps = np.arange(1, self._needed)
        following = start[:, None] + steps
        begins = (ring.age[stream[:, None], following % ring.capacity] == 0) & (following < ring.cursor)
        # Rows of this episode from `start` on; all that are needed, if none of the next rows begins another.
        left = np.where(begins.any(1), 1 + begins.argmax(1), self._needed)
        start = start - (self._needed - left)
        return stream, np.clip(start, ring.oldest, ring.cursor - self._needed)


class FirstRowSampler(UniformSampler):
    """Draws episodes, all equally often: each sequence begins with the first row of its episode.

    Episodes whose first row was overwritten are not drawn.
    """

    def __init__(self, ring: Ring, spec: BatchSpec) -> None:
        if spec.boundary == "cross" or (spec.boundary == "pad" and spec.pad != "right"):
            raise ConfigError("sampler 'first' needs boundary 'within', or 'pad' with padding on the right")
        super().__init__(ring, spec)

    def available(self) -> int:
        return len(self._starts()[0])

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        stream, start = self._starts()
        pick = torch.randint(len(stream), (count,), generator=generator).numpy()
        return stream[pick], start[pick]

    def _starts(self) -> Starts:
        ring = self._ring
        start = ring.oldest + np.arange(self._candidates())
        stream, which = np.nonzero(ring.age[:, start % ring.capacity] == 0)
        start = start[which]
        fits = ring.unbroken(stream, start, self._needed)
        return stream[fits], start[fits]


class OnlineQueue:
    """Queue of new segments, oldest first.

    As rows are added, each stream is split into consecutive segments of `rows` rows without overlap; complete
    segments are appended to the queue. within: a new episode starts a new segment
    """

    def __init__(self, num_streams: int, rows: int, within: bool, cursor: int) -> None:
        self._rows, self._within = rows, within
        self._next = cursor  # expected position of the next row
        self._begin = np.full(num_streams, cursor)  # start of each stream's incomplete segment
        self._queue: deque[tuple[int, int]] = deque()
        self._taken: list[tuple[int, int]] = []

    def take(self, count: int) -> list[tuple[int, int]]:
        """Remove and return stream and start of the oldest segments, at most `count`."""
        self._taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        return self._taken

    def undo(self) -> None:
        self._queue.extendleft(reversed(self._taken))
        self._taken = []

    def on_add(self, position: int, is_first: np.ndarray) -> None:
        """Called after a row was added to every stream. is_first: (N,) bool"""
        if position != self._next:  # the rows were restored: earlier segments are invalid
            self._queue.clear()
            self._begin[:] = position
        self._next = position + 1
        if self._within:
            self._begin[is_first] = position
        complete = np.flatnonzero(position + 1 - self._begin == self._rows)
        if len(complete):
            self._queue.extend((int(stream), int(self._begin[stream])) for stream in complete)
            self._begin[complete] = position + 1

    def discard_before(self, oldest: int) -> None:
        """Remove segments that start before this position: their rows are no longer stored."""
        while self._queue and self._queue[0][1] < oldest:
            self._queue.popleft()

    def get_state(self) -> dict[str, Any]:
        queue = torch.tensor(list(self._queue), dtype=torch.int64).reshape(-1, 2)
        return {"next": self._next, "begin": torch.from_numpy(self._begin.copy()), "queue": queue}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])
        self._begin = state["begin"].numpy().copy()
        self._queue = deque((int(stream), int(start)) for stream, start in state["queue"].tolist())
        self._taken = []


class OnlineSampler:
    """Draws new sequences first, each once and oldest first, and fills the batch with uniform draws."""

    def __init__(self, ring: Ring, spec: BatchSpec) -> None:
        self._ring = ring
        self._uniform = UniformSampler(ring, spec)
        self._queue = OnlineQueue(ring.num_streams, spec.rows, spec.boundary == "within", ring.cursor)

    def available(self) -> int:
        return self._uniform.available()

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        self._queue.discard_before(self._ring.oldest)
        new = np.array(self._queue.take(count), dtype=np.int64).reshape(-1, 2)
        stream, start = self._uniform.draw(count - len(new), generator) if len(new) < count else _NO_STARTS
        return np.concatenate([new[:, 0], stream]), np.concatenate([new[:, 1], start])

    def undo(self) -> None:
        self._queue.undo()

    def on_add(self, position: int) -> None:
        self._queue.on_add(position, self._ring.age[:, position % self._ring.capacity] == 0)
        self._queue.discard_before(self._ring.oldest)

    def get_state(self) -> dict[str, Any]:
        return self._queue.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._queue.set_state(state)


_NO_STARTS: Starts = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

SamplerFactory = Callable[[Ring, BatchSpec], Sampler]
SAMPLERS: dict[str, SamplerFactory] = {
    "uniform": UniformSampler,
    "online": OnlineSampler,
    "ends": EndsSampler,
    "first": FirstRowSampler,
}


def make_sampler(ring: Ring, spec: BatchSpec, more: Mapping[str, SamplerFactory]) -> Sampler:
    """Create the sampler of a BatchSpec, from `SAMPLERS` and the samplers of the buffer."""
    known = {**SAMPLERS, **more}
    if spec.sampler not in known:
        raise ConfigError(f"sampler '{spec.sampler}' does not exist.{closest(spec.sampler, known)}")
    return known[spec.sampler](ring, spec)


def sampler_key(spec: BatchSpec) -> str:
    """Return the dict key of a sampler; equal for BatchSpecs that differ only in their columns."""
    boundary = f"{spec.boundary}-{spec.pad}" if spec.boundary == "pad" else spec.boundary
    boundary += f"-{spec.least}" if spec.boundary == "pad" and spec.least > 1 else ""
    return f"{spec.sampler}/{spec.size}x({spec.context}+{spec.length})/{boundary}"
