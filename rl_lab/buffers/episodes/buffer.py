"""Episodes on disk, for more data than memory holds; sampled like replay.

Rows of an episode that is going on are in memory; when it ends it is written to disk, whole, and read from there. Memory
holds the blocks of rows that were used last, up to `cache_bytes`, and a few dozen bytes for each episode. Rows are known by
stream and position, as in replay, so a sequence may also cross from one episode to the next of the same environment.

A closed episode never changes. Columns that may be written back (latents) are kept in memory beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.batches import MOST_WAITING, LateWrites, allocate, copy_batch
from rl_lab.buffers.chunk_files import Lost, find_damaged
from rl_lab.buffers.episodes import checkpoint as episode_checkpoint
from rl_lab.buffers.episodes.checkpoint import KIND, fingerprint
from rl_lab.buffers.episodes.reader import BlockCache, EpisodeReader, WrittenBlocks
from rl_lab.buffers.episodes.recovery import DamagedBlock
from rl_lab.buffers.episodes.samplers import (
    EndsSampler,
    EpisodeCountSampler,
    Episodes,
    EpisodeSampler,
    OnlineEpisodes,
    UniformEpisodes,
)
from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.episodes.writer import EpisodeWriter, OpenEpisodes
from rl_lab.buffers.ring import Array, as_rows
from rl_lab.buffers.row_layout import FORMAT, LAYOUT, RowLayout, check_row, read_layout
from rl_lab.buffers.samplers import restore_samplers, sampler_key, samplers_state
from rl_lab.errors import CheckpointError, ConfigError, LabError, closest
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex, Spec
from rl_lab.utils.checkpoint.loading import say
from rl_lab.utils.checkpoint.saveable import load_data
from rl_lab.utils.files import free_bytes, write_atomic

SamplerFactory = Callable[[Episodes, BatchSpec], EpisodeSampler]
SAMPLERS: dict[str, SamplerFactory] = {
    "uniform": UniformEpisodes,
    "online": OnlineEpisodes,
    "episodes": EpisodeCountSampler,
    "ends": EndsSampler,
}
CHANGELESS = (
    "rows on disk never change; a hook of kind transform needs buffer=world_model_sequence or buffer=disk"
)


class EpisodeBuffer:
    """Whole episodes in files, the oldest deleted first.

    columns:          name -> shape and dtype of one row's array
    spec:             of the environment: rows of one with other actions are then not mixed in
    folder:           where the episodes are kept, and found again; None: a folder of the run (`home`, given by the build)
    capacity:         rows of finished episodes in all environments together; None: no limit
    max_bytes:        of the files; None: no limit
    open_episodes:    whether sequences are also drawn from episodes that are still going on
    compression:      "auto" (zstd if installed, else zlib), "zstd", "zlib", "none"
    cache_bytes:      memory for blocks of rows that were read
    written_bytes:    memory for mutable columns that were written back; beyond it the oldest are forgotten
    readers:          threads that read and unpack; 0: none beside this one
    max_episode_rows: a longer episode is stored in parts; None: what makes 64 MB, 100,000 at most
    chunk_bytes:      of one file
    block_rows:       rows that are packed together; None: what makes 16 kilobytes, and 16 rows at least
    verify:           check every byte of every file when opening, not only of the file written last
    mutable:          columns that `write_back` may change
    samplers:         more samplers for BatchSpec.sampler to name, or others under the usual names
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
            raise ConfigError("a buffer of episodes needs a folder: set buffers.<name>.folder")
        self._check_numbers(capacity, max_bytes, num_streams, cache_bytes, written_bytes, readers)
        for name in mutable:
            if name not in columns:
                raise ConfigError(f"mutable column '{name}' is not a column.{closest(name, columns)}")
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
            fresh=folder is None,  # in the run's own folder only a checkpoint says what belongs to the run
            verify=verify,
            threads=readers,
            say=lambda message: say(message, on_warning),
        )
        self._factories = {**SAMPLERS, **(samplers or {})}
        self._specs: dict[str, BatchSpec] = {}
        self._staging: dict[BatchSpec, tuple[Batch, torch.cuda.Event | None]] = {}
        self._late = LateWrites(self._write_rows)
        self._cache, self._written = BlockCache(int(cache_bytes)), WrittenBlocks(int(written_bytes))
        self._with_open = bool(open_episodes)
        # Rows to come do not go on where stored ones end: one position is left out.
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
    def _check_numbers(capacity: int | None, max_bytes: int | None, streams: int, *rest: int) -> None:
        for name, value in (("capacity", capacity), ("max_bytes", max_bytes), ("num_streams", streams)):
            if value is not None and value < 1:
                raise ConfigError(f"a buffer of episodes needs {name} above 0, not {value}")
        if min(rest) < 0:
            raise ConfigError("cache_bytes, written_bytes and readers must not be below 0")

    def _attach(self) -> None:
        """Samplers and reader for the table and the open episodes as they are now."""
        self._episodes = Episodes(self._store.table, self._open, self._with_open)
        self._reader = EpisodeReader(
            self._store, self._episodes, self._cache, self._written, self.columns, self._mutable
        )
        self._samplers: dict[str, EpisodeSampler] = {}
        for spec in self._specs.values():
            self._sampler(spec)

    # ---------------------------------------------------------------- what it holds

    @property
    def folder(self) -> Path:
        return self._store.folder

    @property
    def size(self) -> int:
        """Rows held, over all streams."""
        return self._store.table.rows + int(self._open.rows().sum())

    @property
    def episodes(self) -> int:
        """Finished episodes held."""
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
        """Of the files of episodes."""
        return self._store.disk_bytes

    @property
    def nbytes(self) -> int:
        """Memory at most, without the open episodes."""
        return self._cache.most_bytes + (self._written.most_bytes if self._mutable else 0)

    def describe(self) -> str:
        """What is held, where, and the memory it takes, in a line."""
        table, store = self._store.table, self._store
        rewards = table.column("reward")[table.ended()]
        gained = f", return mean {rewards.mean():.4g}" if len(rewards) else ""
        limits = [f"{store.capacity:,} rows"] if store.capacity else []
        limits += [f"{store.max_bytes / 1e9:.2f} GB"] if store.max_bytes else []
        return (
            f"episodes on disk in {store.folder} ({free_bytes(store.folder) / 1e9:.1f} GB are free there), at most "
            f"{' and '.join(limits) or 'any number'} of {store.layout.row_bytes:,} bytes a row before {store.compression}; now "
            f"{table.episodes:,} episodes, {table.rows:,} rows, {store.disk_bytes / 1e6:,.2f} MB{gained}; in memory up to "
            f"{self.nbytes / 1e6:,.0f} MB and the open episodes"
        )

    # ---------------------------------------------------------------- adding

    def add(self, rows: Mapping[str, Array]) -> None:
        """Store one row per stream, name -> (N, …), or T rows at once, name -> (N, T, …).

        An episode ends with a row that is terminated or truncated, or, if it was cut off, before the next `is_first`.
        """
        self._late.settle(leave=MOST_WAITING)
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
        """Whether a batch can be drawn."""
        return self._sampler(spec).available() > 0

    def shortage(self, spec: BatchSpec) -> str:
        """Why a batch cannot be drawn yet; "" when it can."""
        if self.ready(spec):
            return ""
        opened = "" if self._with_open else ", and open ones do not count"
        return (
            f"the buffer holds {self.size:,} rows in {self.episodes:,} finished episodes and {int((self._open.begin >= 0).sum())} "
            f"open ones{opened}; no sequence of {spec.rows} rows fits"
        )

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        """An empty batch for `sample(out=…)`, on the training device. On the host it is pinned where that helps."""
        self._sampler(spec)
        place = self.device if device is None else torch.device(device)
        return allocate(self.columns, spec, place, place.type == "cpu" and self.device.type == "cuda")

    def sample(self, spec: BatchSpec, *, generator: torch.Generator, out: Batch | None = None) -> Batch:
        """Fill `out` (or a new batch) with sequences. generator: on the CPU

        Episodes that turn out to be damaged are dropped with a message, and others drawn.
        """
        sampler = self._sampler(spec)
        out = self.make_batch(spec) if out is None else out
        assert out.index is not None
        target, sent = (out, None) if out.index.stream.device.type == "cpu" else self._stage(spec, out)
        if sent is not None:
            sent.synchronize()  # the last batch may still be on its way out of the same memory
        self._late.settle(leave=MOST_WAITING)
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
        """Give back what the sampler took for the last batch, to draw it again later (see BatchStream)."""
        self._sampler(spec).undo()

    def _sampler(self, spec: BatchSpec) -> EpisodeSampler:
        """The sampler of a BatchSpec, made when it is first asked for. "name:consumer" is one of its own."""
        key = sampler_key(spec)
        if key not in self._samplers:
            name = spec.sampler.partition(":")[0]
            if name not in self._factories:
                raise ConfigError(
                    f"no sampler '{name}' for episodes on disk.{closest(name, self._factories)}"
                )
            if spec.boundary != "cross" and "is_first" not in self.columns:
                raise ConfigError(
                    f"boundary '{spec.boundary}' needs the column 'is_first', which is not stored"
                )
            self._samplers[key] = self._factories[name](self._episodes, spec)
            self._specs[key] = replace(spec, keys=None)
        return self._samplers[key]

    def _stage(self, spec: BatchSpec, out: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """A batch on the host, on the way to one on a device."""
        spec = replace(spec, keys=tuple(out.columns))
        if spec not in self._staging:
            event = torch.cuda.Event() if self.device.type == "cuda" else None
            self._staging[spec] = (self.make_batch(spec, device="cpu"), event)
        return self._staging[spec]

    # ---------------------------------------------------------------- changing rows

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        """Replace mutable columns of sampled rows. columns: name -> (B, L, …), for rows offset … offset+L of each.

        Rows deleted since they were sampled, and padding, are left out. The last of equal rows wins.
        """
        if not columns:
            return
        for name, value in columns.items():
            if name not in self._mutable:
                raise ConfigError(
                    f"column '{name}' cannot be changed: episodes on disk take back only what the workflow stores with "
                    f"each row ({', '.join(self._mutable) or 'nothing'}). Priorities need buffer=prioritized."
                )
            as_rows(name, value, self.columns[name], (len(index.stream), value.shape[1]))
        if index.stream.is_cuda:
            self._late.push(index, columns, offset)
        else:
            self._write_rows(index, columns, offset)

    def _write_rows(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        try:
            self._reader.write(index, {name: value.detach() for name, value in columns.items()}, offset)
        except DamagedBlock as damage:
            self._store.drop_damaged(damage)

    def read(self, position: int, count: int) -> Batch:
        raise LabError(CHANGELESS)

    def write(self, position: int, columns: Mapping[str, torch.Tensor]) -> None:
        raise LabError(CHANGELESS)

    def add_column(self, name: str, spec: ArraySpec) -> None:
        raise LabError(CHANGELESS)

    # ---------------------------------------------------------------- checkpoints

    def get_state(self) -> dict[str, Any]:
        """State of the samplers: how often each consumer drew each episode. The rows are saved by `checkpoint`."""
        return samplers_state(self._samplers, self._specs)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take back the samplers. After `restore`, because what they remember is about those rows."""
        restore_samplers(state, self._sampler)

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save the episodes into a folder, by link where that can be. returns: {"files": …, "meta": …}, JSON-able."""
        self._late.settle()
        self._written.keep_only(set(self._store.table.numbers().tolist()))
        self._saves += 1
        return episode_checkpoint.save(folder, self._store, self._open, self._written, self._saves)

    def restore(self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False) -> list[Lost]:
        """Take back the episodes of a checkpoint; what was stored since is deleted.

        CheckpointError when they are damaged or of another shape. skip_corrupt: do without damaged episodes and return
        what was lost.
        """
        self._late.settle()
        self._cache.clear()
        lost = episode_checkpoint.restore(
            folder, entry, self._store, self._open, self._written, skip_corrupt=skip_corrupt
        )
        self._saves = int(entry["meta"]["saves"])
        self._attach()
        return lost

    def close(self) -> None:
        """Bring everything to the disk, except open episodes, and let another process write to the folder."""
        self._store.close()


# --------------------
# Episodes that lie on disk, to train on as they are: read where they are, whatever their size, never changed.


def episode_folder(path: Path, buffer: str) -> Path | None:
    """The folder of episodes that is meant by a path: itself, or that of a buffer of the run there; None: neither."""
    return next((f for f in (path, path / "buffers" / buffer) if (f / LAYOUT).is_file()), None)


class StoredEpisodes(EpisodeBuffer):
    """EpisodeBuffer over episodes that another run stored. Only mutable columns (latents) change, in memory.

    path:    the folder of a buffer of episodes, or a run that has one
    buffer:  which buffer of that run
    spec:    of the environment that the data must fit
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
            hint = closest(buffer, there) if there else " buffer=offline reads other data."
            raise ConfigError(f"there are no episodes of a buffer '{buffer}' at {self.path}.{hint}")
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
            f"the episodes in {self.folder} are read-only: collected rows need a buffer of their own, named first in the "
            "phase's `buffer` (such as {replay: 0.5, offline: 0.5})"
        )

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save what was written back; of the data itself only where it is and its fingerprint."""
        self._late.settle()
        self._saves += 1
        folder.mkdir(parents=True, exist_ok=True)
        name = f"memory-{self._saves:08d}.pt"
        facts = write_atomic(folder / name, lambda f: torch.save({"written": self._written.get_state()}, f))
        source = {"path": str(self.folder), "fingerprint": self.fingerprint}
        meta = {"kind": KIND, "format": FORMAT, "memory": name, "saves": self._saves, "source": source}
        return {"files": {name: dict(zip(("bytes", "crc32"), facts))}, "meta": meta}

    def restore(self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False) -> list[Lost]:
        """Take back what was written back; CheckpointError when the data has changed since."""
        meta = entry["meta"]
        saved = meta.get("source", {})
        if saved.get("fingerprint") != self.fingerprint:
            raise CheckpointError(
                f"the episodes in {self.folder} are not what this run was training on (from {saved.get('path')}): bring that "
                "data back, or start a new run"
            )
        self._saves = int(meta["saves"])
        damaged = find_damaged(folder, entry) if skip_corrupt else {}
        if damaged:
            self._written.clear()
            return [Lost(name, 0, f"{reason}: what was written back") for name, reason in damaged.items()]
        self._written.set_state(load_data(folder / Path(meta["memory"]).name, check_zip=True)["written"])
        return []
