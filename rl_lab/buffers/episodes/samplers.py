"""Samplers of EpisodeBuffer. They work on episode numbers and lengths; the buffer fetches the rows.

A draw gives an episode and a first row for each sequence; the first row is negative if the sequence is padded
on the left. An episode is a number in the table, or -1 - stream for the open episode of a stream. A buffer
has one sampler per BatchSpec; its `samplers` may name more. EpisodeCountSampler ("episodes") prefers episodes
that were drawn least, EndsSampler ("ends") prefers the ends of episodes; their settings are in the buffer's
config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.episodes.table import EpisodeTable, GrowingArray
from rl_lab.buffers.episodes.writer import OpenEpisodes
from rl_lab.buffers.samplers import OnlineQueue
from rl_lab.errors import ConfigError
from rl_lab.records import BatchSpec

Draw = tuple[np.ndarray, np.ndarray]  # episode (K,), its first row (K,), int64


class Episodes:
    """All episodes that can be drawn: those of the table and, with `with_open`, the open ones."""

    def __init__(self, table: EpisodeTable, unfinished: OpenEpisodes, with_open: bool) -> None:
        self.table, self.unfinished, self.with_open = table, unfinished, with_open
        self.counts: dict[str, EpisodeCounts] = {}  # by sampler name

    def open_rows(self) -> np.ndarray:
        """Return the rows of the open episodes, (N,); 0 if they are not drawn."""
        rows = self.unfinished.rows()
        return rows if self.with_open else np.zeros_like(rows)

    def facts(self, episode: int) -> tuple[int, int, int]:
        """Return stream, start and rows of an episode."""
        if episode < 0:
            stream = -1 - episode
            return stream, int(self.unfinished.begin[stream]), int(self.unfinished.rows()[stream])
        table = self.table
        return table.fact(episode, "stream"), table.fact(episode, "start"), table.fact(episode, "rows")

    def facts_of(self, episodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return streams, starts and rows (K,) of episodes (K,)."""
        table, unfinished = self.table, self.unfinished
        opened = np.maximum(-1 - episodes, 0)
        facts = opened, unfinished.begin[opened], unfinished.rows()[opened]
        if not len(table.column("rows")):
            return facts
        stored = np.maximum(episodes - table.first, 0)
        columns = (table.column(name)[stored] for name in ("stream", "start", "rows"))
        stream, start, rows = (np.where(episodes < 0, a, b) for a, b in zip(facts, columns))
        return stream, start, rows

    def rows(self, episodes: np.ndarray) -> np.ndarray:
        """Return the rows (K,) of episodes (K,)."""
        return self.facts_of(episodes)[2]

    def acted_rows(self, episodes: np.ndarray) -> np.ndarray:
        """As `rows`, without the last row of an episode that ended, in which no action was taken; at least 1."""
        table, rows = self.table, self.rows(episodes)
        stored = episodes >= table.first
        ended = np.zeros(len(episodes), dtype=bool)
        ended[stored] = table.ended()[episodes[stored] - table.first]
        return np.asarray(np.maximum(rows - ended, 1))

    def at(self, stream: int, position: int) -> int | None:
        """Return the episode that has a row at this position, or None."""
        if stream < self.unfinished.num_streams and self.with_open:
            begin = self.unfinished.begin[stream]
            if 0 <= begin <= position < self.unfinished.cursor:
                return -1 - stream
        stored = self.table.streams.get(stream)
        number = stored.at(position) if stored is not None else -1
        return number if number >= 0 else None

    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return stream, first position and length of every run of rows without a gap, (R,) each."""
        found = [
            (stream, begin, end)
            for stream, stored in sorted(self.table.streams.items())
            for begin, end in stored.runs
        ]
        last = {stream: k for k, (stream, _, _) in enumerate(found)}
        for stream in np.flatnonzero(self.open_rows()).tolist():
            begin, k = int(self.unfinished.begin[stream]), last.get(stream)
            if k is not None and found[k][2] == begin:
                found[k] = (stream, found[k][1], self.unfinished.cursor)
            else:
                found.append((stream, begin, self.unfinished.cursor))
        table = np.array(found, dtype=np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2] - table[:, 1]

    def oldest(self) -> int:
        """Return a position before which no stream has a row."""
        stored = [stream.runs[0][0] for stream in self.table.streams.values()]
        return min(
            stored,
            default=int(
                np.where(self.unfinished.begin < 0, self.unfinished.cursor, self.unfinished.begin).min()
            ),
        )


class LengthSums:
    """Cumulative sums over the stored episodes of a function of their length, updated incrementally."""

    def __init__(self, table: EpisodeTable, weigh: Callable[[np.ndarray], np.ndarray]) -> None:
        self._table, self._weigh = table, weigh
        self._first, self._before, self._changes = table.first, 0, table.changes
        self._sums = GrowingArray(np.int64)

    def update(self) -> tuple[np.ndarray, int]:
        """Return the inclusive cumulative sums (episodes,) and the sum before the first of them."""
        table = self._table
        if (
            self._changes != table.changes
            or self._first > table.first
            or self._first + len(self._sums) < table.first
        ):
            self._start_over()
        evicted = table.first - self._first
        if evicted:
            self._before = int(self._sums.view[evicted - 1])
            self._sums.drop_first(evicted)
            self._first = table.first
        new = table.column("rows")[len(self._sums) :]
        if len(new):
            last = int(self._sums.view[-1]) if len(self._sums) else self._before
            self._sums.extend(last + np.cumsum(self._weigh(new), dtype=np.int64))
        return self._sums.view, self._before

    def _start_over(self) -> None:
        self._first, self._before, self._changes = self._table.first, 0, self._table.changes
        self._sums = GrowingArray(np.int64)


class Stateless:
    """What samplers share whose draws depend on the stored episodes alone."""

    def undo(self) -> None:
        """Nothing to undo: the sampler has no state."""

    def on_add(self, position: int, is_first: np.ndarray) -> None:
        """Nothing to do: the starts are computed from the episodes."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        pass


class UniformEpisodes(Stateless):
    """Draws uniformly from all starts that the BatchSpec's boundary allows: over rows, not over episodes."""

    def __init__(self, episodes: Episodes, spec: BatchSpec) -> None:
        self._episodes = episodes
        self._rows = spec.rows
        self._boundary = spec.boundary
        self.window = Window(spec)
        self._sums = LengthSums(episodes.table, self.window.choices)

    def available(self) -> int:
        if self._boundary == "cross":
            return int(np.maximum(0, self._episodes.runs()[2] - self._rows + 1).sum())
        sums, before = self._sums.update()
        stored = int(sums[-1]) - before if len(sums) else 0
        return stored + int(self.window.choices(self._episodes.open_rows()).sum())

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        if self._boundary == "cross":
            return self._draw_cross(count, generator)
        sums, before = self._sums.update()
        stored = int(sums[-1]) - before if len(sums) else 0
        opened = np.cumsum(self.window.choices(self._episodes.open_rows()))
        pick = torch.randint(stored + int(opened[-1]), (count,), generator=generator).numpy()
        place = np.searchsorted(sums, pick + before, side="right")
        base = np.concatenate([[before], sums])[np.minimum(place, len(sums))]
        inside = pick + before - base
        is_open = pick >= stored
        if is_open.any():
            stream = np.searchsorted(opened, pick[is_open] - stored, side="right")
            inside[is_open] = pick[is_open] - stored - np.concatenate([[0], opened])[stream]
        episode = self._episodes.table.first + place
        episode[is_open] = -1 - stream if is_open.any() else episode[is_open]
        return episode, self.window.begin(inside, generator)

    def _draw_cross(self, count: int, generator: torch.Generator) -> Draw:
        streams, begins, lengths = self._episodes.runs()
        sums = np.cumsum(np.maximum(0, lengths - self._rows + 1))
        pick = torch.randint(int(sums[-1]), (count,), generator=generator).numpy()
        run = np.searchsorted(sums, pick, side="right")
        position = begins[run] + pick - np.concatenate([[0], sums])[run]
        return locate(self._episodes, list(zip(streams[run].tolist(), position.tolist())))


class Window:
    """The positions that a sequence can have in an episode."""

    def __init__(self, spec: BatchSpec) -> None:
        if spec.boundary == "pad" and spec.pad == "both" and spec.least > 1:
            raise ConfigError(f"pad 'both' needs least 1, not {spec.least}: use pad 'right' or 'left'")
        self._rows, self._needed = spec.rows, spec.stored_rows
        self._pad = spec.pad if spec.boundary == "pad" else ""

    def choices(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of positions in episodes of these rows: first rows of those that it needs."""
        return np.asarray(np.maximum(0, rows - self._needed + 1))

    def begin(self, choice: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Return the first row for choices 0, 1, …; it is negative if padding comes before the episode."""
        if self._pad == "left":
            return np.asarray(choice - (self._rows - self._needed))
        if self._pad == "both":
            return np.asarray(choice - torch.randint(self._rows, (len(choice),), generator=generator).numpy())
        return choice

    def at_end(self, rows: np.ndarray) -> np.ndarray:
        """Return the first row of a sequence that ends with the episode."""
        begin = rows - self._rows
        return np.maximum(begin, 0) if self._pad == "right" else begin

    def pick(self, rows: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """Draw the first row in episodes of (K,) rows, each with at least one position."""
        uniforms = torch.rand(len(rows), dtype=torch.float64, generator=generator).numpy()
        choices = self.choices(rows)
        return self.begin(np.minimum((uniforms * choices).astype(np.int64), choices - 1), generator)

    def pick_late(self, rows: np.ndarray, generator: torch.Generator) -> np.ndarray:
        """As `pick` with padding on the left, but late rows are preferred as last rows.

        The last row is a uniform row plus 0 to length - 1, at most the episode's last row.
        """
        uniforms = torch.rand(len(rows), dtype=torch.float64, generator=generator).numpy()
        row = np.minimum((uniforms * rows).astype(np.int64), rows - 1)
        later = torch.randint(self._rows, (len(rows),), generator=generator).numpy()
        return np.asarray(np.minimum(row + later, rows - 1) - (self._rows - 1))


class OnlineEpisodes:
    """Draws new sequences first, each once and oldest first, and fills the batch with uniform draws."""

    def __init__(self, episodes: Episodes, spec: BatchSpec) -> None:
        if spec.boundary == "pad" or not episodes.with_open:
            raise ConfigError(
                "sampler 'online' needs boundary 'cross' or 'within', and a buffer with open_episodes: true"
            )
        self._episodes, self._rows = episodes, spec.rows
        self._uniform = UniformEpisodes(episodes, spec)
        unfinished = episodes.unfinished
        within = spec.boundary == "within"
        self._queue = OnlineQueue(unfinished.num_streams, spec.rows, within, unfinished.cursor)

    def available(self) -> int:
        return self._uniform.available()

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        streams, begins, lengths = self._episodes.runs()

        def is_stored(stream: int, start: int) -> bool:
            inside = (begins <= start) & (start + self._rows <= begins + lengths)
            return bool((inside & (streams == stream)).any())

        new = locate(self._episodes, [at for at in self._queue.take(count) if is_stored(*at)])
        rest = count - len(new[0])
        if not rest:
            return new
        episode, begin = self._uniform.draw(rest, generator)
        return np.concatenate([new[0], episode]), np.concatenate([new[1], begin])

    def undo(self) -> None:
        self._queue.undo()

    def on_add(self, position: int, is_first: np.ndarray) -> None:
        self._queue.on_add(position, is_first)
        self._queue.discard_before(self._episodes.oldest())

    def get_state(self) -> dict[str, Any]:
        return self._queue.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._queue.set_state(state)


def locate(episodes: Episodes, rows: list[tuple[int, int]]) -> Draw:
    """Convert stream and position of stored rows to episode and row."""
    found = np.zeros((2, len(rows)), dtype=np.int64)
    for k, (stream, position) in enumerate(rows):
        episode = episodes.at(stream, position)
        assert episode is not None
        found[:, k] = episode, position - episodes.facts(episode)[1]
    return found[0], found[1]


# --- Samplers that prefer some episodes ---------------------------------------------------------


class EpisodeCounts:
    """Number of draws of each episode by one consumer. An open episode keeps its count when it is closed."""

    def __init__(self, table: EpisodeTable, num_streams: int) -> None:
        self._table = table
        self._first = table.first
        self._stored = GrowingArray(np.int64)
        self.open = np.zeros(num_streams, dtype=np.int64)
        self.batches = 0

    def stored(self) -> np.ndarray:
        """Return a writable view of the counts of the table's episodes, (episodes,)."""
        table = self._table
        if not self._first <= table.first <= self._first + len(self._stored):
            self._first, self._stored = table.first, GrowingArray(np.int64)
        self._stored.drop_first(table.first - self._first)
        self._first = table.first
        self._stored.extend(np.zeros(len(table.column("rows")) - len(self._stored), dtype=np.int64))
        return self._stored.view

    def closed(self, number: int, stream: int) -> None:
        """Move the count of a stream's open episode to `number`, the newest episode of the table."""
        self.stored()[number - self._table.first] = self.open[stream]
        self.open[stream] = 0

    def add(self, episodes: np.ndarray, times: int = 1) -> None:
        """Count a draw of episodes (K,); times=-1 undoes it."""
        stored = episodes[episodes >= self._table.first]
        np.add.at(self.stored(), stored - self._table.first, times)
        np.add.at(self.open, -1 - episodes[episodes < 0], times)

    def get_state(self) -> dict[str, Any]:
        stored = torch.from_numpy(self.stored().copy())
        opened = torch.from_numpy(self.open.copy())
        return {"first": self._first, "stored": stored, "open": opened, "batches": self.batches}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._first, self._stored = int(state["first"]), GrowingArray(np.int64)
        self._stored.extend(state["stored"].numpy())
        self.open = state["open"].numpy().copy()
        self.batches = int(state["batches"])


class EpisodeCountSampler:
    """Draws an episode with p ∝ (1 + count)^-alpha, regardless of its length, then a uniform position.

    count is the number of draws by this consumer: "episodes:world_model" and "episodes:tokenizer" have
    separate counts. It increases after each batch, by one for each of its sequences. With alpha 0 all
    episodes are equally likely.

    alpha:       Δ-IRIS uses 5 for Crafter and 1 for Atari (vmicheli/delta-iris config/params)
    uncounted:   number of first batches that are not counted; Δ-IRIS counts from its second epoch
    prefer_late: for sequences with padding on the left: the last row is a uniform row plus 0 to length - 1, at
                 most the last in which an action was taken (vmicheli/delta-iris src/data/sampler.py)
    """

    def __init__(
        self,
        episodes: Episodes,
        spec: BatchSpec,
        *,
        alpha: float = 1.0,
        uncounted: int = 0,
        prefer_late: bool = False,
    ) -> None:
        require_one_episode(spec)
        if alpha < 0 or uncounted < 0:
            raise ConfigError(
                f"sampler 'episodes': alpha and uncounted must be at least 0, not {alpha} and {uncounted}"
            )
        self._episodes = episodes
        self._uniform = UniformEpisodes(episodes, spec)
        self._window = self._uniform.window
        self._alpha, self._uncounted = float(alpha), int(uncounted)
        self._prefer_late = bool(prefer_late) and spec.boundary == "pad" and spec.pad == "left"
        unfinished = episodes.unfinished
        self.counts = episodes.counts.setdefault(
            spec.sampler, EpisodeCounts(episodes.table, unfinished.num_streams)
        )
        self._by_count = np.ones(1)  # (1 + count)^-alpha
        self._drawn = np.zeros(0, dtype=np.int64)

    def available(self) -> int:
        return self._uniform.available()

    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all stored and open episodes (E + N,) and their probabilities."""
        table, counts = self._episodes.table, self.counts
        numbers = np.arange(table.first, table.end)
        rows = np.concatenate([table.column("rows"), self._episodes.open_rows()])
        weights = self._weights(np.concatenate([counts.stored(), counts.open]))
        weights = np.where(self._window.choices(rows) > 0, weights, 0.0)
        return np.concatenate([numbers, -1 - np.arange(len(counts.open))]), weights / weights.sum()

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        episodes, probabilities = self.probabilities()
        sums = np.cumsum(probabilities)
        values = torch.rand(count, dtype=torch.float64, generator=generator).numpy() * sums[-1]
        drawn = episodes[np.searchsorted(sums, np.minimum(values, np.nextafter(sums[-1], 0)), side="right")]
        if self._prefer_late:
            begin = self._window.pick_late(self._episodes.acted_rows(drawn), generator)
        else:
            begin = self._window.pick(self._episodes.rows(drawn), generator)
        self._drawn = drawn if self.counts.batches >= self._uncounted else drawn[:0]
        self.counts.add(self._drawn)
        self.counts.batches += 1
        return drawn, begin

    def undo(self) -> None:
        self.counts.add(self._drawn, -1)
        self.counts.batches -= 1
        self._drawn = self._drawn[:0]

    def on_add(self, position: int, is_first: np.ndarray) -> None:
        """Nothing to do: the starts are computed from the episodes."""

    def get_state(self) -> dict[str, Any]:
        return self.counts.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.counts.set_state(state)

    def _weights(self, counts: np.ndarray) -> np.ndarray:
        """Look up the weights by count: the last bit of an array's powers depends on the array's length."""
        most = int(counts.max(initial=0))
        if most >= len(self._by_count):
            longer = range(len(self._by_count), max(most + 1, 2 * len(self._by_count)))
            more = [(1.0 + count) ** -self._alpha for count in longer]
            self._by_count = np.concatenate([self._by_count, more])
        weights: np.ndarray = self._by_count[counts]
        return weights


class EndsSampler(Stateless):
    """Draws uniformly over rows, but a share of the sequences ends with the last row of an episode.

    For this share, all episodes that ended (terminated or truncated) and are long enough are equally likely.
    In uniform sampling the last rows of an episode are in fewer sequences than the others.

    share: fraction of all sequences, 0 to 1
    """

    def __init__(self, episodes: Episodes, spec: BatchSpec, *, share: float = 0.1) -> None:
        require_one_episode(spec)
        if not 0 <= share <= 1:
            raise ConfigError(f"sampler 'ends': share must be from 0 to 1, not {share}")
        self._episodes, self._share = episodes, float(share)
        self._uniform = UniformEpisodes(episodes, spec)

    def available(self) -> int:
        return self._uniform.available()

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        episode, begin = self._uniform.draw(count, generator)
        table, window = self._episodes.table, self._uniform.window
        ended = table.first + np.flatnonzero(table.ended() & (window.choices(table.column("rows")) > 0))
        uniforms = torch.rand((2, count), dtype=torch.float64, generator=generator).numpy()
        if len(ended):
            at_end = uniforms[0] < self._share
            chosen = ended[(uniforms[1, at_end] * len(ended)).astype(np.int64)]
            episode[at_end] = chosen
            begin[at_end] = window.at_end(self._episodes.rows(chosen).astype(np.int64))
        return episode, begin


class FirstRowsOfEpisodes(Stateless):
    """Draws episodes, all equally often: each sequence begins with the first row of its episode."""

    def __init__(self, episodes: Episodes, spec: BatchSpec) -> None:
        if spec.boundary == "cross" or (spec.boundary == "pad" and spec.pad != "right"):
            raise ConfigError("sampler 'first' needs boundary 'within', or 'pad' with padding on the right")
        self._episodes, self._window = episodes, Window(spec)

    def available(self) -> int:
        return len(self._long_enough())

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        numbers = self._long_enough()
        pick = torch.randint(len(numbers), (count,), generator=generator).numpy()
        return numbers[pick], np.zeros(count, dtype=np.int64)

    def _long_enough(self) -> np.ndarray:
        """Return the numbers of the stored episodes, and of the open ones, that have the rows it needs."""
        table = self._episodes.table
        stored = table.first + np.flatnonzero(self._window.choices(table.column("rows")) > 0)
        opened = -1 - np.flatnonzero(self._window.choices(self._episodes.open_rows()) > 0)
        return np.concatenate([stored, opened]).astype(np.int64)


def require_one_episode(spec: BatchSpec) -> None:
    if spec.boundary == "cross":
        raise ConfigError(
            f"sampler '{spec.sampler}' draws sequences from one episode: use boundary 'within' or 'pad'"
        )
