"""The replay that another run saved, as rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.chunk_files import FORMAT, ChunkFiles
from rl_lab.errors import ConfigError, closest
from rl_lab.records import ArraySpec, Spec
from rl_lab.utils.checkpoint_load import load_checkpoint
from rl_lab.utils.manifest import REPLAY_FOLDER


class RunRows:
    """One buffer of a run's newest good checkpoint (or of the checkpoint named), a stream per environment.

    Columns beside the row, such as latents, are taken over where they are stored in the same form, else zero.
    """

    def __init__(self, path: Path, spec: Spec, buffer: str) -> None:
        loaded = load_checkpoint(path)
        entries = loaded.manifest["buffers"] if loaded.manifest else {}
        if buffer not in entries:
            raise ConfigError(f"{loaded.path} carries no buffer '{buffer}'.{closest(buffer, entries)}")
        self.spec = spec
        self.path = loaded.path
        self._folder: Path = loaded.folder / REPLAY_FOLDER / buffer
        self._entry: dict[str, Any] = entries[buffer]
        self._meta: dict[str, Any] = self._entry["meta"]
        if "source" in self._meta:
            there = self._meta["source"]["path"]
            raise ConfigError(f"buffer '{buffer}' of {path} is itself read from {there}: give that path")
        if self._meta.get("format") != FORMAT:
            raise ConfigError(f"{loaded.path} has replay of format {self._meta.get('format')}, not {FORMAT}")
        self.num_streams = int(self._meta["num_streams"])
        self._end = int(self._meta["cursor"])
        self.length = min(self._end, int(self._meta["capacity"]) // self.num_streams)
        if not self.length:
            raise ConfigError(f"buffer '{buffer}' of {loaded.path} is empty")
        facts = json.dumps([self._entry["files"], self._end], sort_keys=True)
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        self._zero: list[str] = []

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Position (from 0) and rows (N, count, …) of each file; not all columns are in every one."""
        stored = {name: ArraySpec.from_dict(spec) for name, spec in self._meta["columns"].items()}
        self._check_row(columns, stored)
        self._zero = [name for name in columns if stored.get(name) != columns[name]]
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

    def _check_row(self, columns: dict[str, ArraySpec], stored: dict[str, ArraySpec]) -> None:
        for name, wanted in self.spec.row_columns().items():
            have = stored.get(name)
            if name in columns and have != wanted:
                there = f"{have.dtype} {have.shape}" if have else "absent"
                raise ConfigError(
                    f"'{name}' is {there} in {self.path}, but {wanted.dtype} {wanted.shape} in {self.spec.name}: the "
                    "data is of another environment"
                )

    def _check_actions(self, actions: torch.Tensor) -> None:
        choices, indices = self.spec.action.choices, actions.numpy()
        if choices and np.any((indices < 0) | (indices >= np.array(choices))):
            raise ConfigError(
                f"{self.path} has actions from {indices.min()} to {indices.max()}, but {self.spec.name} has {choices} choices: the "
                "data is of another environment"
            )
