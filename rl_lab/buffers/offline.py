"""OfflineBuffer: read-only training data from episode files or from the replay of another run."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from rl_lab.buffers.chunk_files import FORMAT, ChunkFiles, LostFile, RestorePlan
from rl_lab.buffers.episodes.buffer import episode_folder
from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.episodes.writer import OpenEpisodes
from rl_lab.buffers.formats.dataset import Dataset, open_dataset, recognize
from rl_lab.buffers.formats.episode import to_rows
from rl_lab.buffers.formats.zarr import is_ours
from rl_lab.buffers.formats.zarr_layout import Keys, ZarrEpisodes, is_zarr_layout
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.buffers.ring import Array, as_rows
from rl_lab.buffers.row_layout import Bytes, RowLayout, check_row, read_layout
from rl_lab.buffers.samplers import SamplerFactory
from rl_lab.errors import CheckpointError, ConfigError, LabError, closest, one_line
from rl_lab.protocols import Sampler
from rl_lab.records import ArraySpec, BatchSpec, Spec
from rl_lab.utils.checkpoint.loading import load_checkpoint
from rl_lab.utils.checkpoint.manifest import REPLAY_FOLDER
from rl_lab.utils.checkpoint.saveable import load_data


class OfflineBuffer(ReplayBuffer):
    """ReplayBuffer with stored data. Only mutable columns (latents) and added columns can be written.

    path:     a run folder or a checkpoint in it, the folder of an EpisodeBuffer, a folder of episode files,
              one episode file, or a zarr folder in the layout of Diffusion Policy
    spec:     of the environment that the data must match
    buffer:   name of the buffer in that run
    observations, episodes: of a zarr folder; see formats/zarr_layout.py
    device, storage, folder, mutable, samplers, chunk_rows: see ReplayBuffer
    """

    read_only = True

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        *,
        path: Path | str,
        spec: Spec,
        buffer: str = "replay",
        observations: Mapping[str, Keys] | None = None,
        episodes: int | None = None,
        device: torch.device | str = "cpu",
        storage: str = "auto",
        folder: Path | str | None = None,
        mutable: Sequence[str] = (),
        samplers: Mapping[str, SamplerFactory] | None = None,
        chunk_rows: int = 1024,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self.source = open_source(self.path, spec, buffer, observations, episodes)
        streams, length = self.source.num_streams, self.source.length
        super().__init__(
            columns,
            capacity=streams * length,
            num_streams=streams,
            device=device,
            storage=storage,
            folder=folder,
            mutable=mutable,
            samplers=samplers,
            chunk_rows=chunk_rows,
        )
        for position, rows in self.source.pieces(dict(columns)):
            for name, value in rows.items():
                tensor = as_rows(name, value, columns[name], (streams, value.shape[1]))
                self._columns.write(name, position, tensor)
        self._rebuild_ring(length)

    def column(self, name: str) -> torch.Tensor:
        """Return one column of all rows, (N, T, …)."""
        return self._columns.read(name, 0, self.total_rows)

    def describe(self) -> str:
        """One line about the data: path, episodes, returns, memory."""
        reward, is_first, terminated, truncated = (
            self.column(name).cpu().numpy() for name in ("reward", "is_first", "terminated", "truncated")
        )
        returns = episode_returns(reward, is_first, terminated | truncated)
        statistics = "no complete episode"
        if len(returns):
            statistics = f"return mean {returns.mean():.4g}, min {returns.min():.4g}, max {returns.max():.4g}"
        notes = "".join(f"; {note}" for note in self.source.notes())
        return (
            f"{self.path}: {len(returns):,} episodes, {int((~is_first).sum()):,} steps, {statistics}; "
            f"{self.nbytes / 1e6:,.2f} MB, {self._columns.place(self.device)}{notes}"
        )

    def add(self, rows: Mapping[str, Array]) -> None:
        raise LabError(
            f"{self.path} is read-only: name a buffer for the collected rows first in the phase's `buffer`, such as "
            "{replay: 0.5, offline: 0.5}"
        )

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save the columns that were written back, and path and fingerprint of the data."""
        entry = super().checkpoint(folder)
        entry["meta"]["source"] = {"path": str(self.path), "fingerprint": self.source.fingerprint}
        return entry

    def restore(
        self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False
    ) -> list[LostFile]:
        """Restore the columns that were written back; CheckpointError if the data has changed since."""
        saved = entry["meta"].get("source", {})
        if saved.get("fingerprint") != self.source.fingerprint:
            raise CheckpointError(
                f"{self.path} is not the data that this run was trained on (from {saved.get('path')}): restore that "
                "data, or start a new run"
            )
        return super().restore(folder, entry, skip_corrupt=skip_corrupt)

    def _plan(self, folder: Path, entry: Mapping[str, Any], skip_corrupt: bool) -> RestorePlan:
        """Keep all rows: they are not in the checkpoint, which holds only columns that were written back."""
        plan = super()._plan(folder, entry, skip_corrupt)
        if not plan.lost:
            return plan
        spans = [(0, self.total_rows, 0)]
        return replace(
            plan, spans=spans, first=0, cursor=self.total_rows, after_gap=[], gap_behind=False, partial=True
        )

    def _layout(self) -> dict[str, Any]:
        """Without the columns that never change, which are in the source."""
        layout = super()._layout()
        written = [*layout["mutable"], *layout["added"]]
        return {**layout, "columns": {name: layout["columns"][name] for name in written}}

    def _sampler(self, spec: BatchSpec) -> Sampler:
        if spec.rows > self.ring.capacity:
            raise ConfigError(
                f"{self.path} has {self.num_streams} × {self.ring.capacity} rows, too few for sequences of {spec.rows} "
                "rows: use more data or shorter sequences"
            )
        return super()._sampler(spec)


def episode_returns(reward: np.ndarray, is_first: np.ndarray, ended: np.ndarray) -> np.ndarray:
    """Return the returns of all complete episodes in streams of rows. reward, is_first, ended: (N, T)"""
    returns: list[np.ndarray] = []
    for stream in range(len(reward)):
        starts = np.flatnonzero(is_first[stream])
        if len(starts):
            last = np.append(starts[1:], reward.shape[1]) - 1
            sums = np.add.reduceat(reward[stream].astype(np.float64), starts)
            returns.append(sums[ended[stream, last]])
    return np.concatenate(returns) if returns else np.zeros(0)


# --- Data sources -------------------------------------------------------------------------------


class RowSource(Protocol):
    """Stored rows: N streams of `length` rows each."""

    num_streams: int
    fingerprint: str  # of the content; a resumed run needs the same data

    @property
    def length(self) -> int: ...

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and rows, name -> (N, count, …). A column that no piece has stays zero."""

    def notes(self) -> list[str]: ...


def open_source(
    path: Path,
    spec: Spec,
    buffer: str,
    observations: Mapping[str, Keys] | None = None,
    episodes: int | None = None,
) -> RowSource:
    """Open a run, a checkpoint, the folder of an EpisodeBuffer, a zarr folder, or stored episodes of any format."""
    try:
        return _open_source(path, spec, buffer, observations, episodes)
    except OSError as error:  # a file of the data that is a folder, a pipe or a device
        raise ConfigError(f"{path} cannot be read: {one_line(error)}") from error


def _open_source(
    path: Path, spec: Spec, buffer: str, observations: Mapping[str, Keys] | None, episodes: int | None
) -> RowSource:
    if is_zarr_layout(path) and not is_ours(path):
        return ZarrEpisodes(path, spec, observations, episodes)
    if observations is not None or episodes is not None:
        raise ConfigError(
            f"{path}: `observations` and `episodes` are for data in a zarr folder, which it is not; remove them"
        )
    if not path.exists():
        raise ConfigError(f"{path} does not exist: use a run folder, or a data set (rl-lab data info PATH)")
    found = recognize(path)
    if found is None:
        raise ConfigError(
            f"{path} is neither a run folder nor a data set of a known format; use one of these (rl-lab data --help)"
        )
    if found.name != "lab":
        return DatasetRows(open_dataset(path, found.name), spec)
    has_steps = any(path.glob("checkpoints/step_*.json")) or any(path.glob("step_*.json"))
    folder = None if path.is_file() or has_steps else episode_folder(path, buffer)
    if folder is not None:  # of a buffer, or of a run without checkpoints
        return EpisodeRows(folder, spec)
    return open_run(path, spec, buffer)


def open_run(path: Path, spec: Spec, buffer: str) -> RowSource:
    """Open a buffer of any type in a checkpoint, or in a run's newest intact checkpoint."""
    saved = saved_buffer(path, buffer)
    if saved.entry["meta"].get("kind") == "episodes":
        return EpisodeRows(saved.folder, spec, saved.entry)
    return RunRows(saved, spec)


# --- Stored episodes of other formats ------------------------------------------------------------


class DatasetRows:
    """Episodes of a Dataset as the rows of one stream, in its order; a RowSource."""

    num_streams = 1

    def __init__(self, dataset: Dataset, spec: Spec) -> None:
        self.dataset, self.spec = dataset, spec
        self.length = int(dataset.lengths.sum()) + len(dataset)
        self.fingerprint = dataset.fingerprint()
        self._repeated = 0

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and rows (1, count, …) of each episode."""
        position = self._repeated = 0
        for index in range(len(self.dataset)):
            episode = self.dataset.episode(index)
            try:
                rows = to_rows(episode, self.spec)
            except ConfigError as error:
                raise self.dataset.fault(index, error) from None
            self._repeated += episode.last_repeated
            yield position, rows
            position += len(episode) + 1

    def notes(self) -> list[str]:
        """Return remarks about the data for `describe`."""
        notes = self.dataset.notes()
        if self._repeated:
            notes.append(
                f"in {self._repeated:,} episodes the last observation is missing and the previous one is repeated"
            )
        return notes


# --- Replay of another run ----------------------------------------------------------------------


@dataclass(frozen=True)
class SavedBuffer:
    """One buffer of a checkpoint and the folder of its files."""

    checkpoint: Path
    folder: Path
    entry: dict[str, Any]


def saved_buffer(path: Path, buffer: str) -> SavedBuffer:
    """Return a buffer of a checkpoint; for a run folder, of its newest intact checkpoint."""
    loaded = load_checkpoint(path)
    entries = loaded.manifest["buffers"] if loaded.manifest else {}
    if buffer not in entries:
        raise ConfigError(f"{loaded.path} has no buffer '{buffer}'.{closest(buffer, entries)}")
    if "source" in entries[buffer]["meta"]:
        there = entries[buffer]["meta"]["source"]["path"]
        raise ConfigError(f"{path}: buffer '{buffer}' was read from {there}; use that path")
    return SavedBuffer(loaded.path, loaded.folder / REPLAY_FOLDER / buffer, entries[buffer])


class RunRows:
    """Rows of a saved replay, one stream per environment.

    Extra columns such as latents are copied if they are stored with the same shape and dtype; otherwise they
    are zero.
    """

    def __init__(self, saved: SavedBuffer, spec: Spec) -> None:
        self.spec = spec
        self.path = saved.checkpoint
        self._folder = saved.folder
        self._entry: dict[str, Any] = saved.entry
        self._meta: dict[str, Any] = self._entry["meta"]
        if self._meta.get("format") != FORMAT:
            raise ConfigError(
                f"{self.path} has replay format {self._meta.get('format')}, but this version reads {FORMAT}"
            )
        self.num_streams = int(self._meta["num_streams"])
        self._end = int(self._meta["cursor"])
        held = self._end - int(self._meta.get("begin", 0))
        self.length = min(held, int(self._meta["capacity"]) // self.num_streams)
        if not self.length:
            raise ConfigError(f"{self.path} has an empty replay; use a run that has collected data")
        facts = json.dumps([self._entry["files"], self._end], sort_keys=True)
        self.fingerprint = hashlib.blake2b(facts.encode(), digest_size=16).hexdigest()
        self._zero: list[str] = []

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position (from 0) and rows (N, count, …) of each file; a file may hold only some columns."""
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
        """Return remarks about the data for `describe`."""
        if not self._zero:
            return []
        return [f"{', '.join(self._zero)} begin as zeros, because that run did not store them in this form"]

    def _check_actions(self, actions: torch.Tensor) -> None:
        choices, indices = self.spec.action.choices, actions.numpy()
        if choices and np.any((indices < 0) | (indices >= np.array(choices))):
            raise ConfigError(
                f"{self.path} has actions from {indices.min()} to {indices.max()}, but {self.spec.name} has {choices} choices: "
                "use data of the same environment"
            )


# --- Episodes of another run --------------------------------------------------------------------


class EpisodeRows:
    """Episodes of an EpisodeBuffer as the rows of one stream, sorted by stream and position; a RowSource.

    entry: entry of a checkpoint whose files are in the folder; None: the folder belongs to a buffer
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
            report=lambda message: warnings.warn(message, stacklevel=4),
        )
        table = self._store.table
        order = np.lexsort((table.column("start"), table.column("stream")))
        self._episodes = [int(table.first + k) for k in order if table.column("rows")[k]]
        self._episodes += (
            [] if self._open is None else [-1 - int(s) for s in np.flatnonzero(self._open.rows())]
        )
        self.length = sum(self._facts(episode)[2] for episode in self._episodes)
        if not self.length:
            raise ConfigError(f"{folder} has no episodes; use a folder with stored episodes")
        facts = [self._facts(episode) for episode in self._episodes]
        self.fingerprint = hashlib.blake2b(str(facts).encode(), digest_size=16).hexdigest()
        self._zero: list[str] = []

    def pieces(self, columns: dict[str, ArraySpec]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield position and rows (1, count, …) of each episode."""
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
            if before != (stream, start):  # it does not continue the previous episode
                rows["is_first"][:, 0] = True
            yield position, rows
            position, before = position + count, (stream, start + count)

    def notes(self) -> list[str]:
        """Return remarks about the data for `describe`."""
        if not self._zero:
            return []
        return [f"{', '.join(self._zero)} begin as zeros, because they are not stored in this form"]

    def _facts(self, episode: int) -> tuple[int, int, int]:
        """Return stream, start and number of rows."""
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
