"""The replay that another run saved, as rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.chunk_files import FORMAT, ChunkFiles
from rl_lab.buffers.row_layout import RowLayout, check_row
from rl_lab.errors import ConfigError, closest
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.checkpoint_load import load_checkpoint
from rl_lab.utils.manifest import REPLAY_FOLDER


@dataclass(frozen=True)
class SavedBuffer:
    """One buffer of a checkpoint, and where its files are."""

    checkpoint: Path
    folder: Path
    entry: dict[str, Any]


def saved_buffer(path: Path, buffer: str) -> SavedBuffer:
    """A buffer of a run's newest good checkpoint, or of the checkpoint named."""
    loaded = load_checkpoint(path)
    entries = loaded.manifest["buffers"] if loaded.manifest else {}
    if buffer not in entries:
        raise ConfigError(f"{loaded.path} carries no buffer '{buffer}'.{closest(buffer, entries)}")
    if "source" in entries[buffer]["meta"]:
        there = entries[buffer]["meta"]["source"]["path"]
        raise ConfigError(f"buffer '{buffer}' of {path} is itself read from {there}: give that path")
    return SavedBuffer(loaded.path, loaded.folder / REPLAY_FOLDER / buffer, entries[buffer])


class RunRows:
    """The replay of a checkpoint, a stream per environment.

    Columns beside the row, such as latents, are taken over where they are stored in the same form, else zero.
    """

    def __init__(self, saved: SavedBuffer, spec: Spec) -> None:
        self.spec = spec
        self.path = saved.checkpoint
        self._folder = saved.folder
        self._entry: dict[str, Any] = saved.entry
        self._meta: dict[str, Any] = self._entry["meta"]
        if self._meta.get("format") != FORMAT:
            raise ConfigError(f"{self.path} has replay of format {self._meta.get('format')}, not {FORMAT}")
        self.num_streams = int(self._meta["num_streams"])
        self._end = int(self._meta["cursor"])
        held = self._end - int(self._meta.get("begin", 0))
        self.length = min(held, int(self._meta["capacity"]) // self.num_streams)
        if not self.length:
            raise ConfigError(f"the replay of {self.path} is empty")
        facts = json.dumps([self._entry["files"], self._end], sort_keys=True)
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        self._zero: list[str] = []

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Position (from 0) and rows (N, count, …) of each file; not all columns are in every one."""
        stored = {name: ArraySpec.from_dict(spec) for name, spec in self._meta["columns"].items()}
        self._zero = check_row(RowLayout(stored), self.spec, columns, self.path)
        oldest = self._end - self.length
        for start, end, rows in ChunkFiles(self._meta["chunk_rows"]).load(
            self._folder, self._entry, self._meta
        ):
            first = max(start, oldest)
            wanted = {
                name: value[:, first - start : end - start]
                for name, value in rows.items()
                if name in columns and name not in self._zero
            }
            if "action" in wanted:
                self._check_actions(wanted["action"])
            yield first - oldest, wanted

    def notes(self) -> list[str]:
        """What a reader of the data should know."""
        if not self._zero:
            return []
        return [f"{', '.join(self._zero)} begin as zeros, because that run did not store them in this form"]

    def _check_actions(self, actions: torch.Tensor) -> None:
        choices, indices = self.spec.action.choices, actions.numpy()
        if choices and np.any((indices < 0) | (indices >= np.array(choices))):
            raise ConfigError(
                f"{self.path} has actions from {indices.min()} to {indices.max()}, but {self.spec.name} has {choices} choices: the "
                "data is of another environment"
            )
