"""EpisodeBuffer: replay of complete episodes on disk. StoredEpisodes: the same for data of another run.

An open episode (one that has not ended) is in memory; when it ends it is written to disk and read from there.
Memory holds the most recently used blocks of rows, up to `cache_bytes`, and a few dozen bytes per episode. A
row is identified by stream and position as in ReplayBuffer, so a sequence may cross into the next episode of
the same environment.

A closed episode never changes. Columns that were written back (latents) are kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.batches import MAX_PENDING, DeferredWrites, allocate, copy_batch
from rl_lab.buffers.chunk_files import LostFile, find_damaged
from rl_lab.buffers.episodes import checkpoint as episode_checkpoint
from rl_lab.buffers.episodes.checkpoint import KIND, fingerprint
from rl_lab.buffers.episodes.reader import BlockCache, EpisodeReader, WrittenBlocks
from rl_lab.buffers.episodes.recovery import DamagedBlock
from rl_lab.buffers.episodes.samplers import (
    EndsSampler,
    EpisodeCountSampler,
    Episodes,
    FirstRowsOfEpisodes,
    OnlineEpisodes,
    UniformEpisodes,
)
from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.episodes.writer import EpisodeWriter, OpenEpisodes
from rl_lab.buffers.ring import Array, as_rows
from rl_lab.buffers.row_layout import FORMAT, LAYOUT, RowLayout, check_row, read_layout
from rl_lab.buffers.samplers import restore_samplers, sampler_key, samplers_state
from rl_lab.errors import CheckpointError, ConfigError, LabError, closest
from rl_lab.protocols import EpisodeSampler
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex, Spec
from rl_lab.utils.checkpoint.loading import emit_warning
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import free_bytes, write_atomic

SamplerFactory = Callable[[Episodes, BatchSpec], EpisodeSampler]
SAMPLERS: dict[str, SamplerFactory] = {
    "uniform": UniformEpisodes,
    "online": OnlineEpisodes,
    "episodes": EpisodeCountSampler,
    "ends": EndsSampler,
    "first": FirstRowsOfEpisodes,
}
ROWS_ARE_READ_ONLY = (
    "buffer=episodes cannot change rows on disk; for a hook of kind transform use buffer=world_model_sequence or "
    "buffer=disk"
)


class EpisodeBuffer:
    """Complete episodes in files; the oldest are deleted first.

    columns:          name -> shape and dtype of one row's array
    spec:             of the environment; with it a folder with episodes of other actions is refused
    folder:           folder of the episodes, reused by later runs; None: a folder of the run (`home`)
    capacity:         rows of finished episodes of all environments together; None: no limit
    max_bytes:        total size of the files; None: no limit
    open_episodes:    whether sequences are also drawn from episodes that have not ended
    compression:      "auto" (zstd if installed, else zlib), "zstd", "zlib", "none"
    cache_bytes:      memory for blocks of rows that were read
    written_bytes:    memory for columns that were written back; if it is full, the oldest are discarded
    readers:          additional threads that read and decompress
    max_episode_rows: a longer episode is stored in parts; None: about 64 MB, at most 100,000 rows
    chunk_bytes:      size of one file
    block_rows:       rows that are compressed together; None: about 16 kB, at least 16 rows
    verify:           check every byte of every file when opening, not only of the last file
    mutable:          columns that `write_back` may change
    samplers:         samplers that BatchSpec.sampler may name in addition to `SAMPLERS`, or instead of them
    """

    read_only = False
    storage_device = torch.device("cpu")
    on_host = True

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        *,
        num_streams: int,
        spec: Spec | None = None,
        folder: Path | str | None = None,
        home: Path | str | None = None,
        capacity: int | None = None,
        max_bytes: int | None = None,
        open_episodes: bool = True,
        compression: str = "auto",
        cache_bytes: int = 256 << 20,
        written_bytes: int = 256 << 20,
        readers: int = 0,
        max_episode_rows: int | None = None,
        chunk_bytes: int = 64 << 20,
        block_rows: int | None = None,
        verify: bool = False,
        device: torch.device | str = "cpu",
        mutable: Sequence[str] = (),
        samplers: Mapping[str, SamplerFactory] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        if folder is None and home is None:
            raise ConfigError("buffers.<name>.folder is missing: set the folder of the episodes")
        self._check_limits(capacity, max_bytes, num_streams, cache_bytes, written_bytes, readers)
        for name in mutable:
            if name not in columns:
                raise ConfigError(f"mutable: '{name}' is not a column.{closest(name, columns)}")
        self.device = torch.device(device)
        self.num_streams = num_streams
        self.columns = dict(columns)
        self._mutable = list(mutable)
        self._on_warning = on_warning
        self._store = self._open_store(
            Path(str(folder if folder is not None else home)).expanduser().absolute(),
            RowLayout(columns, block_rows, None if spec is None else spec.action.to_dict()),
            compression=compression,
            capacity=capacity,
            max_bytes=max_bytes,
            chunk_bytes=chunk_bytes,
            # In the run's own folder only a checkpoint defines which episodes belong to the run.
            fresh=folder is None,
            verify=verify,
            threads=readers,
            report=lambda message: emit_warning(message, on_warning),
        )
        self._factories = {**SAMPLERS, **(samplers or {})}
        self._specs: dict[str, BatchSpec] = {}
        self._staging: dict[BatchSpec, tuple[Batch, torch.cuda.Event | None]] = {}
        self._deferred = DeferredWrites(self._write_rows)
        self._cache, self._written = BlockCache(int(cache_bytes)), WrittenBlocks(int(written_bytes))
        self._with_open = bool(open_episodes)
        # New rows do not continue the stored ones: one position is skipped.
        ends = self._store.table.column("start") + self._store.table.column("rows")
        self._open = OpenEpisodes(self._store.layout, num_streams, int(ends.max(initial=-1)) + 1)
        self._writer = EpisodeWriter(
            self._store,
            self._open,
            max_rows=max_episode_rows,
            on_closed=self._on_closed,
            on_rows=self._on_rows,
        )
        self._saves = 0
        self._attach()

    def _open_store(self, folder: Path, layout: RowLayout, **options: Any) -> EpisodeStore:
        return EpisodeStore(folder, layout, **options)

    @staticmethod
    def _check_limits(capacity: int | None, max_bytes: int | None, streams: int, *rest: int) -> None:
        for name, value in (("capacity", capacity), ("max_bytes", max_bytes), ("num_streams", streams)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if min(rest) < 0:
            raise ConfigError("cache_bytes, written_bytes and readers must not be negative")

    def _attach(self) -> None:
        """Create samplers and reader for the current table and open episodes."""
        self._episodes = Episodes(self._store.table, self._open, self._with_open)
        self._reader = EpisodeReader(
            self._store, self._episodes, self._cache, self._written, self.columns, self._mutable
        )
        self._samplers: dict[str, EpisodeSampler] = {}
        for spec in self._specs.values():
            self._sampler(spec)

    # ---------------------------------------------------------------- contents

    @property
    def folder(self) -> Path:
        return self._store.folder

    @property
    def size(self) -> int:
        """Rows stored in all streams."""
        return self._store.table.rows + int(self._open.rows().sum())

    @property
    def episodes(self) -> int:
        """Number of finished episodes."""
        return self._store.table.episodes

    @property
    def capacity(self) -> int | None:
        return self._store.capacity

    @property
    def total_rows(self) -> int:
        """Position after the newest row of each stream."""
        return self._open.cursor

    @property
    def oldest_position(self) -> int:
        return self._episodes.oldest()

    @property
    def disk_bytes(self) -> int:
        """Total size of the episode files."""
        return self._store.disk_bytes

    @property
    def nbytes(self) -> int:
        """Maximum memory, without the open episodes."""
        return self._cache.max_bytes + (self._written.max_bytes if self._mutable else 0)

    def describe(self) -> str:
        """One line with folder, limits, contents and memory."""
        table, store = self._store.table, self._store
        rewards = table.column("reward")[table.ended()]
        returns = f", return mean {rewards.mean():.4g}" if len(rewards) else ""
        limits = [f"{store.capacity:,} rows"] if store.capacity else []
        limits += [f"{store.max_bytes / 1e9:.2f} GB"] if store.max_bytes else []
        most = f"at most {' and '.join(limits)}" if limits else "no limit"
        return (
            f"episodes on disk in {store.folder} ({free_bytes(store.folder) / 1e9:.1f} GB are free there), {most}, "
            f"{store.layout.row_bytes:,} bytes a row before {store.compression}; now "
            f"{table.episodes:,} episodes, {table.rows:,} rows, {store.disk_bytes / 1e6:,.2f} MB{returns}; in memory up to "
            f"{self.nbytes / 1e6:,.0f} MB and the open episodes"
        )

    # ---------------------------------------------------------------- adding

    def add(self, rows: Mapping[str, Array]) -> None:
        """Store one row per stream, name -> (N, …), or T rows at once, name -> (N, T, …).

        An episode ends with a row that is terminated or truncated, or before the next `is_first`.
        """
        self._deferred.flush(max_pending=MAX_PENDING)
        self._writer.add(rows)

    def _on_closed(self, number: int, stream: int) -> None:
        for counts in self._episodes.counts.values():
            counts.closed(number, stream)

    def _on_rows(self, position: int, is_first: np.ndarray) -> None:
        for sampler in self._samplers.values():
            for step in range(is_first.shape[1]):
                sampler.on_add(position + step, is_first[:, step])

    # ---------------------------------------------------------------- sampling

    def ready(self, spec: BatchSpec) -> bool:
        """Return whether a batch can be drawn."""
        return self._sampler(spec).available() > 0

    def shortage(self, spec: BatchSpec) -> str:
        """Return why a batch cannot be drawn yet, or "" if it can."""
        if self.ready(spec):
            return ""
        opened = "" if self._with_open else ", and open ones do not count"
        return (
            f"the buffer holds {self.size:,} rows in {self.episodes:,} finished episodes and {int((self._open.begin >= 0).sum())} "
            f"open ones{opened}; no sequence of {spec.stored_rows} rows fits"
        )

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        """Return an empty batch for `sample(out=…)`. device: None is the training device

        A batch on the host is pinned if the training device is a GPU.
        """
        self._sampler(spec)
        place = self.device if device is None else torch.device(device)
        return allocate(self.columns, spec, place, place.type == "cpu" and self.device.type == "cuda")

    def sample(self, spec: BatchSpec, *, generator: torch.Generator, out: Batch | None = None) -> Batch:
        """Fill `out` (or a new batch) with sequences. generator: a CPU generator

        Damaged episodes are dropped with a warning, and the batch is drawn again.
        """
        sampler = self._sampler(spec)
        out = self.make_batch(spec) if out is None else out
        assert out.index is not None
        target, sent = (out, None) if out.index.stream.device.type == "cpu" else self._stage(spec, out)
        if sent is not None:
            sent.synchronize()  # the previous batch may still be copied from the same memory
        self._deferred.flush(max_pending=MAX_PENDING)
        while True:
            if not sampler.available():
                raise ConfigError(f"nothing to sample: {self.shortage(spec)}")
            episode, begin = sampler.draw(spec.size, generator)
            try:
                self._reader.fill(target, spec, episode, begin)
                break
            except DamagedBlock as damage:
                sampler.undo()
                self._store.drop_damaged(damage)
        if target is not out:
            copy_batch(target, out)
        if sent is not None:
            sent.record()
        return out

    def undo(self, spec: BatchSpec) -> None:
        """Undo the sampler's last draw, so that the batch can be drawn again (see BatchStream)."""
        self._sampler(spec).undo()

    def _sampler(self, spec: BatchSpec) -> EpisodeSampler:
        """Return the sampler of a BatchSpec, created at the first call; one for each "name:consumer"."""
        key = sampler_key(spec)
        if key not in self._samplers:
            name = spec.sampler.partition(":")[0]
            if name not in self._factories:
                raise ConfigError(
                    f"sampler '{name}' does not exist for episodes on disk.{closest(name, self._factories)}"
                )
            if spec.boundary != "cross" and "is_first" not in self.columns:
                raise ConfigError(
                    f"boundary '{spec.boundary}' needs the column 'is_first', which is not stored"
                )
            self._samplers[key] = self._factories[name](self._episodes, spec)
            self._specs[key] = replace(spec, keys=None)
        return self._samplers[key]

    def _stage(self, spec: BatchSpec, out: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Return a batch on the host, from which `out` is copied, and the event of the last copy."""
        spec = replace(spec, keys=tuple(out.columns))
        if spec not in self._staging:
            event = torch.cuda.Event() if self.device.type == "cuda" else None
            self._staging[spec] = (self.make_batch(spec, device="cpu"), event)
        return self._staging[spec]

    # ---------------------------------------------------------------- writing to stored rows

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        """Replace mutable columns of sampled rows.

        columns: name -> (B, L, …), for rows offset … offset+L of each sequence

        Padding and rows that were deleted since they were sampled are skipped. The last of equal rows wins.
        """
        if not columns:
            return
        for name, value in columns.items():
            if name not in self._mutable:
                raise ConfigError(
                    f"column '{name}' cannot be changed: episodes on disk accept only the workflow's columns "
                    f"({', '.join(self._mutable) or 'none'}); for priorities use buffer=prioritized"
                )
            as_rows(name, value, self.columns[name], (len(index.stream), value.shape[1]))
        if index.stream.is_cuda:
            self._deferred.push(index, columns, offset)
        else:
            self._write_rows(index, columns, offset)

    def _write_rows(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        try:
            self._reader.write(index, {name: value.detach() for name, value in columns.items()}, offset)
        except DamagedBlock as damage:
            self._store.drop_damaged(damage)

    def read(self, position: int, count: int) -> Batch:
        raise LabError(ROWS_ARE_READ_ONLY)

    def write(self, position: int, columns: Mapping[str, torch.Tensor]) -> None:
        raise LabError(ROWS_ARE_READ_ONLY)

    def add_column(self, name: str, spec: ArraySpec) -> None:
        raise LabError(ROWS_ARE_READ_ONLY)

    # ---------------------------------------------------------------- checkpoints

    def get_state(self) -> dict[str, Any]:
        """Return the state of the samplers, with the counts of draws. `checkpoint` saves the rows."""
        return samplers_state(self._samplers, self._specs)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the samplers. Call `restore` first, because their state refers to the restored rows."""
        restore_samplers(state, self._sampler)

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save the episodes to a folder, as links if possible. returns: {"files": …, "meta": …} for JSON"""
        self._deferred.flush()
        self._written.keep_only(set(self._store.table.numbers().tolist()))
        self._saves += 1
        return episode_checkpoint.save(folder, self._store, self._open, self._written, self._saves)

    def restore(
        self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False
    ) -> list[LostFile]:
        """Restore the episodes of a checkpoint and delete those stored since.

        CheckpointError if they are damaged or do not fit this buffer.

        skip_corrupt: skip damaged episodes and return the lost files
        """
        self._deferred.flush()
        self._cache.clear()
        lost = episode_checkpoint.restore(
            folder, entry, self._store, self._open, self._written, skip_corrupt=skip_corrupt
        )
        self._saves = int(entry["meta"]["saves"])
        self._attach()
        return lost

    def close(self) -> None:
        """Write everything except open episodes to disk, and release the lock of the folder."""
        self._store.close()


# --- Stored episodes ----------------------------------------------------------------------------


def episode_folder(path: Path, buffer: str) -> Path | None:
    """Return the folder of episodes at a path: the path itself or a buffer of the run there; else None."""
    return next((f for f in (path, path / "buffers" / buffer) if (f / LAYOUT).is_file()), None)


class StoredEpisodes(EpisodeBuffer):
    """Read-only EpisodeBuffer over episodes of another run. Mutable columns (latents) change in memory.

    path:    the folder of an EpisodeBuffer, or a run that has one
    buffer:  name of the buffer in that run
    spec:    of the environment that the data must match
    cache_bytes, written_bytes, readers, verify, mutable, samplers: see EpisodeBuffer
    """

    read_only = True

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        *,
        path: Path | str,
        spec: Spec,
        buffer: str = "replay",
        cache_bytes: int = 256 << 20,
        written_bytes: int = 256 << 20,
        readers: int = 0,
        verify: bool = False,
        device: torch.device | str = "cpu",
        mutable: Sequence[str] = (),
        samplers: Mapping[str, SamplerFactory] | None = None,
        on_warning: Callable[[str], None] | None = None,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        folder = episode_folder(self.path, buffer)
        if folder is None:
            there = [found.parent.name for found in self.path.glob(f"buffers/*/{LAYOUT}")]
            hint = closest(buffer, there) if there else " Use buffer=offline for other data."
            raise ConfigError(f"{self.path} has no episodes of a buffer '{buffer}'.{hint}")
        self._spec = spec
        super().__init__(
            columns,
            num_streams=1,
            spec=spec,
            folder=folder,
            open_episodes=False,
            cache_bytes=cache_bytes,
            written_bytes=written_bytes,
            readers=readers,
            verify=verify,
            device=device,
            mutable=mutable,
            samplers=samplers,
            on_warning=on_warning,
        )
        self.fingerprint = fingerprint(self._store)

    def _open_store(self, folder: Path, layout: RowLayout, **options: Any) -> EpisodeStore:
        there = read_layout(folder)
        self._zero = check_row(there, self._spec, self.columns, folder)
        return EpisodeStore(folder, there, **{**options, "read_only": True, "fresh": False})

    def describe(self) -> str:
        notes = (
            f"; {', '.join(self._zero)} begin as zeros, because they are not stored in this form"
            if self._zero
            else ""
        )
        return super().describe() + notes

    def add(self, rows: Mapping[str, Array]) -> None:
        raise LabError(
            f"{self.folder} is read-only: name a buffer for the collected rows first in the phase's `buffer`, such as "
            "{replay: 0.5, offline: 0.5}"
        )

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save the columns that were written back, and path and fingerprint of the data."""
        self._deferred.flush()
        self._saves += 1
        folder.mkdir(parents=True, exist_ok=True)
        name = f"memory-{self._saves:08d}.pt"
        facts = write_atomic(folder / name, lambda f: torch.save({"written": self._written.get_state()}, f))
        source = {"path": str(self.folder), "fingerprint": self.fingerprint}
        meta = {"kind": KIND, "format": FORMAT, "memory": name, "saves": self._saves, "source": source}
        return {"files": {name: dict(zip(("bytes", "crc32"), facts))}, "meta": meta}

    def restore(
        self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False
    ) -> list[LostFile]:
        """Restore the columns that were written back; CheckpointError if the data has changed since."""
        meta = entry["meta"]
        saved = meta.get("source", {})
        if saved.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"{self.folder} is not the data that this run was trained on (from {saved.get('path')}): restore that "
                "data, or start a new run"
            )
        self._saves = int(meta["saves"])
        damaged = find_damaged(folder, entry) if skip_corrupt else {}
        if damaged:
            self._written.clear()
            return [
                LostFile(name, 0, f"{reason}: columns that were written back")
                for name, reason in damaged.items()
            ]
        self._written.set_state(load_data(folder / Path(meta["memory"]).name, check_zip=True)["written"])
        return []
