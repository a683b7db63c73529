"""Stored episodes as rows of one stream: those of a folder, or of a run's checkpoint."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.episode_store import EpisodeStore
from rl_lab.buffers.open_episodes import OpenEpisodes
from rl_lab.buffers.row_layout import Bytes, RowLayout, check_row, read_layout
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.saveable import load_data


class EpisodeRows:
    """Episodes one behind the other, each stream's in their order; see offline.Source.

    entry: of a checkpoint, whose files lie in the folder; None: the folder is that of a buffer
    """

    num_streams = 1

    def __init__(self, folder: Path, spec: Spec, entry: dict[str, Any] | None = None) -> None:
        self.spec, self.path = spec, folder
        index = None
        self._open: OpenEpisodes | None = None
        if entry is None:
            layout = read_layout(folder)
        else:
            layout, index = RowLayout.from_dict(entry["meta"]["layout"]), folder / entry["meta"]["index"]
            self._open = OpenEpisodes(layout, int(entry["meta"]["streams"]))
            try:
                self._open.set_state(load_data(folder / Path(entry["meta"]["memory"]).name)["open"])
            except CheckpointError as error:
                raise ConfigError(str(error)) from None
        self._store = EpisodeStore(
            folder,
            layout,
            read_only=True,
            verify=True,
            index=index,
            say=lambda message: warnings.warn(message, stacklevel=4),
        )
        table = self._store.table
        order = np.lexsort((table.column("start"), table.column("stream")))
        self._episodes = [int(table.first + k) for k in order if table.column("rows")[k]]
        self._episodes += (
            [] if self._open is None else [-1 - int(s) for s in np.flatnonzero(self._open.rows())]
        )
        self.length = sum(self._facts(episode)[2] for episode in self._episodes)
        if not self.length:
            raise ConfigError(f"{folder} holds no episodes")
        facts = [self._facts(episode) for episode in self._episodes]
        self.fingerprint = hashlib.blake2b(str(facts).encode(), digest_size=16).hexdigest()
        self._zero: list[str] = []

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Position and rows (1, count, …) of each episode."""
        self._zero = check_row(self._store.layout, self.spec, columns, self.path)
        position, before = 0, (-1, -1)
        for episode in self._episodes:
            stream, start, count = self._facts(episode)
            layout = self._store.layout
            rows: dict[str, Any] = {
                name: layout.as_tensor(name, value)[None]
                for name, value in self._rows(episode, stream, start, count).items()
                if name in columns and name not in self._zero
            }
            if before != (stream, start):  # whatever came before, this is no continuation of it
                rows["is_first"][:, 0] = True
            yield position, rows
            position, before = position + count, (stream, start + count)

    def notes(self) -> list[str]:
        """What a reader of the data should know."""
        if not self._zero:
            return []
        return [f"{', '.join(self._zero)} begin as zeros, because they are not stored in this form"]

    def _facts(self, episode: int) -> tuple[int, int, int]:
        """Stream, start, rows."""
        if episode < 0:
            assert self._open is not None
            stream = -1 - episode
            return stream, int(self._open.begin[stream]), int(self._open.rows()[stream])
        table = self._store.table
        return table.fact(episode, "stream"), table.fact(episode, "start"), table.fact(episode, "rows")

    def _rows(self, episode: int, stream: int, start: int, count: int) -> Bytes:
        if episode < 0:
            assert self._open is not None
            return self._open.read(stream, start, start + count)
        blocks = self._store.read([(episode, block) for block in range(self._store.layout.blocks(count))])
        return {
            name: np.concatenate([block[name] for block in blocks]) for name in self._store.layout.columns
        }
