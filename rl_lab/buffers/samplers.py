"""How sequences are chosen. A sampler sees positions only; the buffer fetches the rows.

A buffer keeps one sampler per BatchSpec. Another way of choosing (priorities, how often an episode was used)
is another class here, registered in `SAMPLERS` or handed to the buffer as `samplers={"name": factory}`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.buffers.ring import Ring
from rl_lab.errors import ConfigError, closest
from rl_lab.records import BatchSpec

REJECTION_ROUNDS = 16  # tries of twice the batch each, before all fitting starts are listed and drawn from
Starts = tuple[np.ndarray, np.ndarray]  # stream (K,), position of the first row (K,), int64


class Sampler(Protocol):
    """Chooses where sequences start. Everything it draws comes from the generator, so it can be repeated."""

    def available(self) -> int:
        """How many starts could be drawn now."""

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        """`count` starts, with repetition. Only called when `available()`."""

    def undo(self) -> None:
        """Take back the last draw, apart from the generator's state (the caller has that)."""

    def on_add(self, position: int) -> None:
        """A row at `position` was added to every stream."""

    def get_state(self) -> dict[str, Any]: ...

    def set_state(self, state: Mapping[str, Any]) -> None: ...


def samplers_state(samplers: Mapping[str, Any], specs: Mapping[str, BatchSpec]) -> dict[str, Any]:
    """What a buffer's samplers remember, each with the BatchSpec that it draws for."""
    return {
        "samplers": [
            {"spec": asdict(specs[key]), "state": sampler.get_state()} for key, sampler in samplers.items()
        ]
    }


def restore_samplers(state: Mapping[str, Any], sampler_for: Callable[[BatchSpec], Any]) -> None:
    """Give it back to them; `sampler_for` makes those of BatchSpecs that were not asked for yet."""
    for saved in state["samplers"]:
        sampler_for(BatchSpec(**saved["spec"])).set_state(saved["state"])


class UniformSampler:
    """Every start that the BatchSpec's boundary allows is equally likely."""

    def __init__(self, ring: Ring, spec: BatchSpec) -> None:
        if spec.boundary == "pad" and spec.pad == "both":
            raise ConfigError("replay pads sequences right or left, not both: use buffer=episodes for that")
        self._ring = ring
        self._rows = spec.rows
        self._boundary = spec.boundary
        # A padded window hangs over its anchor: the first row (right) or the last one (left), which is held.
        self._overhang = {"right": 0, "left": spec.rows - 1}[spec.pad] if spec.boundary == "pad" else 0

    def available(self) -> int:
        if self._boundary == "within":
            return self._ring.unbroken_count(self._rows)
        return self._ring.num_streams * self._candidates()

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        if self._boundary == "within":
            return self._draw_within(count, generator)
        return self._draw_any(count, generator)

    def undo(self) -> None:
        """Nothing is remembered between draws."""

    def on_add(self, position: int) -> None:
        """The ring itself knows what can be drawn."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        pass

    def _candidates(self) -> int:
        """Starts per stream, whatever episodes do."""
        needed = 1 if self._boundary == "pad" else self._rows
        return max(0, self._ring.stored - needed + 1)

    def _draw_any(self, count: int, generator: torch.Generator) -> Starts:
        per_stream = self._candidates()
        pick = torch.randint(self._ring.num_streams * per_stream, (count,), generator=generator).numpy()
        return pick // per_stream, self._ring.oldest + pick % per_stream - self._overhang

    def _draw_within(self, count: int, generator: torch.Generator) -> Starts:
        found: list[Starts] = []
        missing = count
        for _ in range(REJECTION_ROUNDS):
            stream, start = self._draw_any(2 * count, generator)
            fits = np.flatnonzero(self._ring.unbroken(stream, start, self._rows))[:missing]
            found.append((stream[fits], start[fits]))
            missing -= len(fits)
            if not missing:
                break
        else:  # such starts are rare here: list them all
            stream, start = self._ring.unbroken_starts(self._rows)
            pick = torch.randint(len(stream), (missing,), generator=generator).numpy()
            found.append((stream[pick], start[pick]))
        streams, starts = zip(*found)
        return np.concatenate(streams), np.concatenate(starts)


class OnlineQueue:
    """Fresh segments, in the order of their arrival.

    A stream's rows are cut into neighbouring, never overlapping segments of `rows` as they arrive; each complete
    segment joins the queue. within: a new episode starts a new segment.
    """

    def __init__(self, num_streams: int, rows: int, within: bool, cursor: int) -> None:
        self._rows, self._within = rows, within
        self._next = cursor  # the position that the next row must have
        self._begin = np.full(num_streams, cursor)  # where each stream's open segment starts
        self._queue: deque[tuple[int, int]] = deque()
        self._taken: list[tuple[int, int]] = []

    def take(self, count: int) -> list[tuple[int, int]]:
        """Stream and start of the oldest segments, `count` at most."""
        self._taken = [self._queue.popleft() for _ in range(min(count, len(self._queue)))]
        return self._taken

    def undo(self) -> None:
        self._queue.extendleft(reversed(self._taken))
        self._taken = []

    def on_add(self, position: int, is_first: np.ndarray) -> None:
        """A row was added to every stream. is_first: (N,) bool"""
        if position != self._next:  # the rows were emptied or replaced: earlier segments mean nothing now
            self._queue.clear()
            self._begin[:] = position
        self._next = position + 1
        if self._within:
            self._begin[is_first] = position
        complete = np.flatnonzero(position + 1 - self._begin == self._rows)
        if len(complete):
            self._queue.extend((int(stream), int(self._begin[stream])) for stream in complete)
            self._begin[complete] = position + 1

    def forget(self, oldest: int) -> None:
        """Rows before this position are gone."""
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
    """Fresh sequences first, each once and in the order of their arrival; uniform for the rest of the batch."""

    def __init__(self, ring: Ring, spec: BatchSpec) -> None:
        self._ring = ring
        self._uniform = UniformSampler(ring, spec)
        self._queue = OnlineQueue(ring.num_streams, spec.rows, spec.boundary == "within", ring.cursor)

    def available(self) -> int:
        return self._uniform.available()

    def draw(self, count: int, generator: torch.Generator) -> Starts:
        self._queue.forget(self._ring.oldest)
        fresh = np.array(self._queue.take(count), dtype=np.int64).reshape(-1, 2)
        stream, start = self._uniform.draw(count - len(fresh), generator) if len(fresh) < count else _NOTHING
        return np.concatenate([fresh[:, 0], stream]), np.concatenate([fresh[:, 1], start])

    def undo(self) -> None:
        self._queue.undo()

    def on_add(self, position: int) -> None:
        self._queue.on_add(position, self._ring.age[:, position % self._ring.capacity] == 0)
        self._queue.forget(self._ring.oldest)

    def get_state(self) -> dict[str, Any]:
        return self._queue.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._queue.set_state(state)


_NOTHING: Starts = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

SamplerFactory = Callable[[Ring, BatchSpec], Sampler]
SAMPLERS: dict[str, SamplerFactory] = {"uniform": UniformSampler, "online": OnlineSampler}


def make_sampler(ring: Ring, spec: BatchSpec, more: Mapping[str, SamplerFactory]) -> Sampler:
    """The sampler that a BatchSpec names, from `SAMPLERS` and the buffer's own."""
    known = {**SAMPLERS, **more}
    if spec.sampler not in known:
        raise ConfigError(f"no sampler '{spec.sampler}'.{closest(spec.sampler, known)}")
    return known[spec.sampler](ring, spec)


def sampler_key(spec: BatchSpec) -> str:
    """What a sampler is kept under; equal for BatchSpecs that differ only in the columns fetched."""
    boundary = f"{spec.boundary}-{spec.pad}" if spec.boundary == "pad" else spec.boundary
    return f"{spec.sampler}/{spec.size}x({spec.context}+{spec.length})/{boundary}"
