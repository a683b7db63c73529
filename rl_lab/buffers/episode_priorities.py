"""Samplers that prefer some episodes: those drawn least so far, and those whose end is reached.

Named in a BatchSpec as "episodes" and "ends"; their numbers are in the buffer's config, `samplers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.episode_samplers import Draw, Episodes, UniformEpisodes
from rl_lab.buffers.episode_table import EpisodeTable, Growing
from rl_lab.errors import ConfigError
from rl_lab.records import BatchSpec


class EpisodeCounts:
    """How often one consumer drew each episode. An open episode's count stays with it when it is closed."""

    def __init__(self, table: EpisodeTable, num_streams: int) -> None:
        self._table = table
        self._first = table.first
        self._stored = Growing(np.int64)
        self.open = np.zeros(num_streams, dtype=np.int64)
        self.batches = 0

    def stored(self) -> np.ndarray:
        """Counts of the table's episodes, (episodes,), to be read and changed."""
        table = self._table
        if not self._first <= table.first <= self._first + len(self._stored):
            self._first, self._stored = table.first, Growing(np.int64)
        self._stored.forget(table.first - self._first)
        self._first = table.first
        self._stored.extend(np.zeros(len(table.column("rows")) - len(self._stored), dtype=np.int64))
        return self._stored.view

    def closed(self, number: int, stream: int) -> None:
        """The open episode of a stream became number `number`, the newest of the table."""
        self.stored()[number - self._table.first] = self.open[stream]
        self.open[stream] = 0

    def add(self, episodes: np.ndarray, times: int = 1) -> None:
        """These episodes (K,) were drawn; -1 takes a draw back."""
        still = episodes[episodes >= self._table.first]
        np.add.at(self.stored(), still - self._table.first, times)
        np.add.at(self.open, -1 - episodes[episodes < 0], times)

    def get_state(self) -> dict[str, Any]:
        stored = torch.from_numpy(self.stored().copy())
        opened = torch.from_numpy(self.open.copy())
        return {"first": self._first, "stored": stored, "open": opened, "batches": self.batches}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._first, self._stored = int(state["first"]), Growing(np.int64)
        self._stored.extend(state["stored"].numpy())
        self.open = state["open"].numpy().copy()
        self.batches = int(state["batches"])


class EpisodeCountSampler:
    """p(episode) ∝ (1 + count)^-alpha, whatever its length; then a place in it, all alike.

    count is how often this consumer drew the episode: "episodes:world_model" and "episodes:tokenizer" count apart. It is
    raised after each batch, by one for each of its sequences. With alpha 0 all episodes are alike.

    alpha:      Δ-IRIS uses 5 for Crafter and 1 for Atari (vmicheli/delta-iris config/params)
    uncounted:  batches at the beginning that are not counted; Δ-IRIS counts from its second epoch on
    """

    def __init__(
        self, episodes: Episodes, spec: BatchSpec, *, alpha: float = 1.0, uncounted: int = 0
    ) -> None:
        require_one_episode(spec)
        if alpha < 0 or uncounted < 0:
            raise ConfigError(
                f"sampler 'episodes' needs alpha and uncounted from 0 on, not {alpha} and {uncounted}"
            )
        self._episodes = episodes
        self._uniform = UniformEpisodes(episodes, spec)
        self._window = self._uniform.window
        self._alpha, self._uncounted = float(alpha), int(uncounted)
        unfinished = episodes.unfinished
        self.counts = episodes.counts.setdefault(
            spec.sampler, EpisodeCounts(episodes.table, unfinished.num_streams)
        )
        self._by_count = np.ones(1)  # (1 + count)^-alpha
        self._drawn = np.zeros(0, dtype=np.int64)

    def available(self) -> int:
        return self._uniform.available()

    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """Episodes (E + N,), stored and open, and the probability of each."""
        table, counts = self._episodes.table, self.counts
        numbers = np.arange(table.first, table.end)
        rows = np.concatenate([table.column("rows"), self._episodes.open_rows()])
        weights = self._weights(np.concatenate([counts.stored(), counts.open]))
        weights = np.where(self._window.choices(rows) > 0, weights, 0.0)
        return np.concatenate([numbers, -1 - np.arange(len(counts.open))]), weights / weights.sum()

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        episodes, chances = self.probabilities()
        sums = np.cumsum(chances)
        numbers = torch.rand(count, dtype=torch.float64, generator=generator).numpy() * sums[-1]
        drawn = episodes[np.searchsorted(sums, np.minimum(numbers, np.nextafter(sums[-1], 0)), side="right")]
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
        """What can be drawn is read off the episodes."""

    def get_state(self) -> dict[str, Any]:
        return self.counts.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.counts.set_state(state)

    def _weights(self, counts: np.ndarray) -> np.ndarray:
        """From a list by count: powers of arrays differ in their last bit with the arrays' length."""
        most = int(counts.max(initial=0))
        if most >= len(self._by_count):
            longer = range(len(self._by_count), max(most + 1, 2 * len(self._by_count)))
            more = [(1.0 + count) ** -self._alpha for count in longer]
            self._by_count = np.concatenate([self._by_count, more])
        return self._by_count[counts]


class EndsSampler:
    """Uniform over rows, but a share of the sequences ends with an episode's last row.

    The episodes for that share are those that came to an end (terminated or truncated) and are long enough, all
    alike. Without such ends, as in uniform sampling, the last rows of an episode are in fewer sequences than others.

    share: of all sequences, 0 to 1
    """

    def __init__(self, episodes: Episodes, spec: BatchSpec, *, share: float = 0.1) -> None:
        require_one_episode(spec)
        if not 0 <= share <= 1:
            raise ConfigError(f"sampler 'ends' needs a share from 0 to 1, not {share}")
        self._episodes, self._share = episodes, float(share)
        self._uniform = UniformEpisodes(episodes, spec)

    def available(self) -> int:
        return self._uniform.available()

    def draw(self, count: int, generator: torch.Generator) -> Draw:
        episode, begin = self._uniform.draw(count, generator)
        table, window = self._episodes.table, self._uniform.window
        ended = table.first + np.flatnonzero(table.ended() & (window.choices(table.column("rows")) > 0))
        numbers = torch.rand((2, count), dtype=torch.float64, generator=generator).numpy()
        if len(ended):
            at_end = numbers[0] < self._share
            chosen = ended[(numbers[1, at_end] * len(ended)).astype(np.int64)]
            episode[at_end] = chosen
            begin[at_end] = window.at_end(self._episodes.rows(chosen).astype(np.int64))
        return episode, begin

    def undo(self) -> None:
        """Nothing is remembered between draws."""

    def on_add(self, position: int, is_first: np.ndarray) -> None:
        """What can be drawn is read off the episodes."""

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        pass


def require_one_episode(spec: BatchSpec) -> None:
    if spec.boundary == "cross":
        raise ConfigError(
            f"sampler '{spec.sampler}' draws sequences of one episode each: use boundary 'within' or 'pad'"
        )
