"""Our own format: the episodes of an EpisodeStore with a description, and the replay of a run read in the same way.

    dataset.json   spec and metadata; a run's own buffer has none
    layout.json, index.log, chunk-00000000.episodes   see rl_lab/buffers/episodes/store.py

Training reads such a folder in place (buffer/offline_episodes) or loads it (buffer/offline).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.episodes.buffer import episode_folder
from rl_lab.buffers.episodes.checkpoint import fingerprint
from rl_lab.buffers.episodes.recovery import DamagedBlock
from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.episodes.table import BEGINS, ENDED
from rl_lab.buffers.formats.dataset import Dataset, DatasetWriter, action_of
from rl_lab.buffers.formats.episode import PlainEpisode, from_rows, to_rows
from rl_lab.buffers.row_layout import RowLayout, read_layout
from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.records import OBS_PREFIX, ActionSpec, ArraySpec, Spec
from rl_lab.utils.checkpoint.loading import load_checkpoint
from rl_lab.utils.files import read_json, write_json_atomic

DESCRIPTION = "dataset.json"
VERSION = 1


class StoredDataset(Dataset):
    """The episodes of a folder with layout.json, in the order in which they were stored."""

    format = "lab"

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.metadata = read_description(folder)
        self._store = EpisodeStore(
            folder,
            read_layout(folder),
            read_only=True,
            report=lambda message: warnings.warn(message, stacklevel=4),
        )
        table = self._store.table
        self._parts = _joined(table)
        rows = np.array([sum(table.fact(n, "rows") for n in parts) for parts in self._parts], dtype=np.int64)
        self._parts = [parts for parts, count in zip(self._parts, rows) if count > 1]
        self.lengths = rows[rows > 1] - 1

    def episode(self, index: int) -> PlainEpisode:
        store = self._store
        layout, pieces = store.layout, []
        for number in self._parts[index]:
            count = store.table.fact(number, "rows")
            try:
                pieces += store.read([(number, block) for block in range(layout.blocks(count))])
            except DamagedBlock as damage:
                raise self.fault(index, f"a file is damaged ({damage}): restore it") from None
        wanted = [name for name in layout.columns if name.startswith(OBS_PREFIX) or name in _ROW]
        joined = {name: np.concatenate([piece[name] for piece in pieces]) for name in wanted}
        return from_rows({name: layout.as_tensor(name, value).numpy() for name, value in joined.items()})

    @cached_property
    def spec(self) -> Spec:
        if "spec" in self.metadata:
            return Spec.from_dict(self.metadata["spec"])
        columns, action = self._store.layout.columns, self._store.layout.action
        return Spec(
            self.path.name,
            {name.removeprefix(OBS_PREFIX): s for name, s in columns.items() if name.startswith(OBS_PREFIX)},
            ActionSpec.from_dict(action) if action else _action_of_columns(self, columns["action"]),
        )

    def returns(self) -> np.ndarray:
        """Return the sum of rewards of every episode, without reading them."""
        table = self._store.table
        rewards = table.column("reward")
        return np.array([sum(rewards[n - table.first] for n in parts) for parts in self._parts])

    def fingerprint(self) -> str:
        return fingerprint(self._store)

    def notes(self) -> list[str]:
        return [f"{lost}: lost" for lost in self._store.lost]

    def close(self) -> None:
        self._store.close()


_ROW = ("action", "reward", "terminated", "truncated")


def _joined(table: Any) -> list[list[int]]:
    """Return the numbers of the parts of every episode: a long one is stored in parts."""
    groups: list[list[int]] = []
    last: dict[int, tuple[int, list[int]]] = {}  # stream -> position after its last part, and the group
    facts = {name: table.column(name).tolist() for name in ("stream", "start", "rows", "flags")}
    for at, rows in enumerate(facts["rows"]):
        if not rows:
            continue
        stream, start, flags = facts["stream"][at], facts["start"][at], facts["flags"][at]
        position, group = last.get(stream, (-1, []))
        if flags & BEGINS or position != start:
            group = []
            groups.append(group)
        group.append(table.first + at)
        last[stream] = (start + rows, group)
    return groups


class RunDataset(Dataset):
    """The replay in a checkpoint of a run, cut into episodes. Its rows are in an unnamed scratch file."""

    format = "run"

    def __init__(self, path: Path, buffer: str = "replay") -> None:
        from rl_lab.buffers.offline import OfflineBuffer, saved_buffer

        self.path = path
        saved = saved_buffer(path, buffer)
        stored = saved.entry["meta"].get("columns") or saved.entry["meta"]["layout"]["columns"]
        columns = {name: ArraySpec.from_dict(s) for name, s in stored.items()}
        self.metadata = {}
        known = load_checkpoint(path).info.get("spec")
        self._given = Spec.from_dict(known) if known else None
        rows = {
            name: s
            for name, s in columns.items()
            if name.startswith(OBS_PREFIX) or name in (*_ROW, "is_first")
        }
        action = self._given.action if self._given else _unknown_action(columns["action"])
        observations = {n.removeprefix(OBS_PREFIX): s for n, s in rows.items() if n.startswith(OBS_PREFIX)}
        self._buffer = OfflineBuffer(
            rows, path=path, spec=Spec(path.name, observations, action), buffer=buffer, storage="disk"
        )
        self._spans = self._episodes()
        self.lengths = np.array([count - 1 for _, _, count in self._spans], dtype=np.int64)

    def _episodes(self) -> list[tuple[int, int, int]]:
        """Return stream, first row and number of rows of every episode with at least one step."""
        total = self._buffer.total_rows
        first = self._buffer.column("is_first").cpu().numpy()
        spans = []
        for stream in range(self._buffer.num_streams):
            starts = np.flatnonzero(first[stream])
            if not len(starts) or starts[0]:
                starts = np.concatenate([[0], starts])
            ends = np.append(starts[1:], total)
            spans += [(stream, int(b), int(e - b)) for b, e in zip(starts, ends) if e - b > 1]
        return spans

    def episode(self, index: int) -> PlainEpisode:
        stream, begin, count = self._spans[index]
        rows = self._buffer.read(begin, count).columns
        return from_rows({name: value[stream].cpu().numpy() for name, value in rows.items()})

    @cached_property
    def spec(self) -> Spec:
        if self._given is not None:
            return self._given
        columns = self._buffer.columns
        observations = {n.removeprefix(OBS_PREFIX): s for n, s in columns.items() if n.startswith(OBS_PREFIX)}
        return Spec(self.path.name, observations, _action_of_columns(self, columns["action"]))

    def fingerprint(self) -> str:
        return str(self._buffer.source.fingerprint)


def _unknown_action(stored: ArraySpec) -> ActionSpec:
    if stored.dtype == "float32":
        return ActionSpec(
            "continuous", stored.shape, low=(-1.0,) * stored.shape[0], high=(1.0,) * stored.shape[0]
        )
    many = (1 << 31,) * max(1, *stored.shape, 1)
    return ActionSpec("multi_discrete" if stored.shape else "discrete", stored.shape, many)


def _action_of_columns(dataset: Dataset, stored: ArraySpec) -> ActionSpec:
    """Return the action's spec of data without a description: the choices are those that occur."""
    if stored.dtype == "float32":
        return _unknown_action(stored)
    highest = np.max([episode.actions.max(axis=0, initial=0) for episode in dataset], axis=0)
    return action_of(np.broadcast_to(highest, (1, *stored.shape)))


def Reader(path: Path) -> Dataset:
    """Open a folder of episodes, a run, or a checkpoint in it."""
    folder = episode_folder(path, "replay") if path.is_dir() else None
    if folder is not None:
        return StoredDataset(folder)
    return RunDataset(path)


def read_description(folder: Path) -> dict[str, Any]:
    file = folder / DESCRIPTION
    if not file.is_file():
        return {}
    try:
        content = dict(read_json(file))
        if content.get("version") != VERSION:
            raise ConfigError(
                f"{file} has version {content.get('version')}, but this version reads {VERSION}"
            )
        Spec.from_dict(content["spec"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} is damaged ({error}): restore it") from None
    return content


def write_description(folder: Path, spec: Spec, metadata: Mapping[str, Any]) -> None:
    write_json_atomic(folder / DESCRIPTION, {**metadata, "version": VERSION, "spec": spec.to_dict()})


class RowsWriter:
    """Appends episodes to an EpisodeStore as consecutive rows of one stream."""

    def __init__(self, folder: Path, spec: Spec, *, report: Any = warnings.warn) -> None:
        self.spec = spec
        self.layout = RowLayout(spec.row_columns(), None, spec.action.to_dict())
        self.store = EpisodeStore(folder, self.layout, report=report)
        ends = self.store.table.column("start") + self.store.table.column("rows")
        self.position = int(ends.max(initial=0))

    def append(self, episode: PlainEpisode) -> None:
        """Store one episode; ConfigError if it does not fit the spec."""
        rows = to_rows(episode, self.spec)
        packed = {}
        for name in self.layout.columns:
            tensor = torch.from_numpy(np.ascontiguousarray(rows[name][0]))
            packed[name] = self.layout.as_bytes(name, tensor, 1)
        count = len(episode) + 1
        self.store.append(
            packed,
            count,
            stream=0,
            start=self.position,
            flags=ENDED | BEGINS,
            total_reward=float(rows["reward"].sum(dtype=np.float64)),
        )
        self.position += count

    def keep(self, count: int) -> int:
        """Drop all episodes but the first `count`; return how many there are."""
        numbers = self.store.table.numbers().tolist()
        self.store.drop(numbers[count:])
        starts, rows = self.store.table.column("start"), self.store.table.column("rows")
        self.position = int((starts + rows)[rows > 0].max(initial=0))
        return min(count, len(numbers))

    def close(self) -> None:
        self.store.close()


class Writer(DatasetWriter):
    format = "lab"

    def __init__(self, path: Path, spec: Spec, metadata: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, spec, metadata)
        self._rows = RowsWriter(self.temporary, spec)

    def write(self, episode: PlainEpisode) -> None:
        self._rows.append(episode)

    def complete(self) -> None:
        self._rows.close()
        write_description(self.temporary, self.spec, self.metadata)

    def discard(self) -> None:
        self._rows.close()
        super().discard()
