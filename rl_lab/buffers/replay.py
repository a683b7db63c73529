"""ReplayBuffer: the newest rows of N environments, on the training device, in host memory or on disk.

Each environment (stream) has a ring of rows; all rings advance together. A sequence is a run of consecutive
rows of one stream. Its start is drawn on the host from a CPU generator, so the same seed draws the same
sequences on any device; only the B starts are copied to the device.

On CUDA, call `add`, `sample` and `write_back` on one CUDA stream, so that they run in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.batches import MAX_PENDING, DeferredWrites, allocate, copy_batch
from rl_lab.buffers.chunk_files import (
    ChunkFiles,
    LostFile,
    RestorePlan,
    Rows,
    check_layout,
    plan_restore,
    restore_rows,
)
from rl_lab.buffers.ring import (
    Array,
    Columns,
    Ring,
    as_rows,
    choose_files,
    choose_storage,
    row_bytes,
    same_episode,
    to_device,
)
from rl_lab.buffers.samplers import (
    SamplerFactory,
    make_sampler,
    restore_samplers,
    sampler_key,
    samplers_state,
)
from rl_lab.errors import ConfigError, closest
from rl_lab.protocols import Sampler
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex


class ReplayBuffer:
    """A ring buffer of rows for each environment.

    columns:     name -> shape and dtype of one row's array (dtype "bfloat16" is allowed)
    capacity:    rows of all streams together; each stream holds capacity // num_streams
    device:      device of the sampled batches
    storage:     "device", "host", "disk", or "auto": the device if under half of its free memory is needed
    folder:      for "disk": folder of the scratch files (None: the working directory); see ring.MappedFiles
    mutable:     columns that `write_back` and `write` may change after the rows were added
    samplers:    samplers that BatchSpec.sampler may name in addition to "uniform" and "online"
    chunk_rows:  positions per checkpoint file
    """

    def __init__(
        self,
        columns: Mapping[str, ArraySpec],
        *,
        capacity: int,
        num_streams: int,
        device: torch.device | str = "cpu",
        storage: str = "auto",
        folder: Path | str | None = None,
        mutable: Sequence[str] = (),
        samplers: Mapping[str, SamplerFactory] | None = None,
        chunk_rows: int = 1024,
    ) -> None:
        if capacity < num_streams or num_streams < 1:
            raise ConfigError(
                f"capacity {capacity} is less than one row for each of {num_streams} environments; raise it"
            )
        for name in mutable:
            if name not in columns:
                raise ConfigError(f"mutable: '{name}' is not a column.{closest(name, columns)}")
        self.device = torch.device(device)
        self.num_streams = num_streams
        self.ring = Ring(num_streams, capacity // num_streams)
        estimate = num_streams * self.ring.capacity * sum(row_bytes(spec) for spec in columns.values())
        place = choose_storage(storage, self.device, estimate)
        self._columns = Columns(num_streams, self.ring.capacity, place, choose_files(storage, folder))
        for name, spec in columns.items():
            self._columns.allocate(name, spec)
        self._mutable = list(mutable)
        self._added: list[str] = []
        self._factories = dict(samplers or {})
        self._samplers: dict[str, Sampler] = {}
        self._specs: dict[str, BatchSpec] = {}  # BatchSpec of each sampler
        self._staging: dict[BatchSpec, tuple[Batch, torch.cuda.Event | None]] = {}
        self._deferred = DeferredWrites(self._write_rows)
        self._files = ChunkFiles(chunk_rows)
        self._gap_behind = False  # rows after the newest one were lost

    # ---------------------------------------------------------------- contents

    @property
    def columns(self) -> dict[str, ArraySpec]:
        return dict(self._columns.specs)

    @property
    def storage_device(self) -> torch.device:
        return self._columns.device

    @property
    def on_host(self) -> bool:
        return self.storage_device.type == "cpu"

    @property
    def size(self) -> int:
        """Rows stored in all streams."""
        return self.ring.stored * self.num_streams

    @property
    def capacity(self) -> int:
        """Maximum number of rows in all streams."""
        return self._columns.rows

    @property
    def total_rows(self) -> int:
        """Rows ever added to each stream; also the position after the newest row."""
        return self.ring.cursor

    @property
    def oldest_position(self) -> int:
        return self.ring.oldest

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one stored row, including its age in the episode (kept on the host)."""
        return sum(row_bytes(spec) for spec in self._columns.specs.values()) + self.ring.age.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of memory when the buffer is full."""
        return self.capacity * self.bytes_per_row

    def describe(self) -> str:
        """One line with the size and the memory estimate."""
        return (
            f"{self.capacity:,} rows ({self.num_streams} × {self.ring.capacity:,}) × {self.bytes_per_row:,} bytes = "
            f"{self.nbytes / 1e9:.2f} GB when full, {self._columns.place(self.device)}"
        )

    # ---------------------------------------------------------------- adding

    def add(self, rows: Mapping[str, Array]) -> None:
        """Store one row per stream, name -> (N, …), or T rows at once, name -> (N, T, …).

        `is_first` is read on the host: pass it as a host array, otherwise `add` waits for the device. Columns
        created by `add_column` may be omitted; they are zero until they are written.
        """
        specs = self._columns.specs
        missing = [name for name in specs if name not in rows and name not in self._added]
        unknown = [name for name in rows if name not in specs]
        if missing or unknown:
            fault = f"'{missing[0]}' is missing" if missing else f"'{unknown[0]}' is unknown"
            raise ConfigError(
                f"column {fault}: the rows have {sorted(rows)}, but the buffer stores {sorted(specs)}"
            )
        name, value = next(iter(rows.items()))
        timed = value.ndim == len(specs[name].shape) + 2
        steps = int(value.shape[1]) if timed else 1
        lead = (self.num_streams, steps) if timed else (self.num_streams,)
        tensors = {name: as_rows(name, value, specs[name], lead) for name, value in rows.items()}
        if not timed:
            tensors = {name: value.unsqueeze(1) for name, value in tensors.items()}
        self._deferred.flush(max_pending=MAX_PENDING)
        if self._gap_behind and "is_first" in tensors:  # the row before this one is lost
            tensors["is_first"] = tensors["is_first"].clone()
            tensors["is_first"][:, 0] = True
        self._gap_behind = False
        done = 0
        while done < steps:  # each run stops at the end of the ring
            count = min(steps - done, self.ring.capacity - self.ring.cursor % self.ring.capacity)
            self._add_run({name: value[:, done : done + count] for name, value in tensors.items()}, count)
            done += count

    def _add_run(self, rows: Mapping[str, torch.Tensor], count: int) -> None:
        begin = self.ring.cursor
        self._columns.put(begin, count, rows)
        never = np.zeros((self.num_streams, count), dtype=bool)
        first = rows["is_first"].cpu().numpy() if "is_first" in rows else never
        for step in range(count):
            self.ring.advance(first[:, step])
            for sampler in self._samplers.values():
                sampler.on_add(begin + step)
        self._files.touch(begin, begin + count)

    # ---------------------------------------------------------------- sampling

    def ready(self, spec: BatchSpec) -> bool:
        """Return whether a batch can be drawn."""
        return self._sampler(spec).available() > 0

    def shortage(self, spec: BatchSpec) -> str:
        """Return why a batch cannot be drawn yet, or "" if it can."""
        if self.ready(spec):
            return ""
        held = f"the buffer holds {self.ring.stored} rows per environment"
        if spec.boundary != "cross" and self.ring.stored >= spec.stored_rows:
            return f"{held}, but no episode in it has the {spec.stored_rows} rows that a sequence needs"
        return f"{held}, and a sequence needs {spec.stored_rows}"

    def make_batch(self, spec: BatchSpec, *, device: torch.device | str | None = None) -> Batch:
        """Return an empty batch for `sample(out=…)`. device: None is the training device

        A batch on the host is pinned if the training device is a GPU.
        """
        self._sampler(spec)
        place = self.device if device is None else torch.device(device)
        pin = place.type == "cpu" and self.device.type == "cuda"
        return allocate(self._columns.specs, spec, place, pin)

    def sample(self, spec: BatchSpec, *, generator: torch.Generator, out: Batch | None = None) -> Batch:
        """Fill `out` (or a new batch) with sequences. generator: a CPU generator"""
        sampler = self._sampler(spec)
        if not sampler.available():
            raise ConfigError(f"nothing to sample: {self.shortage(spec)}")
        self._deferred.flush(max_pending=MAX_PENDING)
        stream, position = sampler.draw(spec.size, generator)
        out = self.make_batch(spec) if out is None else out
        assert out.index is not None
        if out.index.stream.device.type == self.storage_device.type:
            self._fill(out, spec, stream, position)
        else:
            staging, sent = self._stage(spec, out)
            if sent is not None:
                sent.synchronize()  # the previous batch may still be copied from the same memory
            self._fill(staging, spec, stream, position)
            copy_batch(staging, out)
            if sent is not None:
                sent.record()
        return out

    def undo(self, spec: BatchSpec) -> None:
        """Undo the sampler's last draw, so that the batch can be drawn again (see BatchStream)."""
        self._sampler(spec).undo()

    def _fill(self, out: Batch, spec: BatchSpec, stream: Any, position: Any) -> None:
        """Copy the rows that begin at each start into `out`, which is on the storage device."""
        assert out.index is not None
        index = self._columns.locate(stream, position, spec.rows, out.index)
        flat_mask = None
        if out.mask is not None:
            if isinstance(position, torch.Tensor):  # drawn on the device, where `ring.age` is not
                first = torch.empty_like(out.mask)
                self._columns.gather("is_first", index, first)
                out.mask.copy_(same_episode(first, position, self.ring.cursor))
            else:
                anchor = 0 if spec.pad == "right" else spec.rows - 1
                mask = self.ring.episode_mask(stream, position, spec.rows, anchor)
                out.mask.copy_(to_device(torch.from_numpy(mask), self.storage_device))
            flat_mask = out.mask.view(-1)
        for name, value in out.columns.items():
            self._columns.gather(name, index, value, flat_mask)

    def _sampler(self, spec: BatchSpec) -> Sampler:
        """Return the sampler of a BatchSpec; it is created at the first call."""
        key = sampler_key(spec)
        if key not in self._samplers:
            if spec.rows > self.ring.capacity:
                raise ConfigError(
                    f"sequences of {spec.rows} rows do not fit into a buffer of {self.ring.capacity} rows for each of "
                    f"{self.num_streams} environments: set a capacity of at least {spec.rows * self.num_streams}"
                )
            if spec.boundary != "cross" and "is_first" not in self._columns.specs:
                raise ConfigError(
                    f"boundary '{spec.boundary}' needs the column 'is_first', which is not stored"
                )
            self._samplers[key] = make_sampler(self.ring, spec, self._factories)
            self._specs[key] = replace(spec, keys=None)
        return self._samplers[key]

    def _stage(self, spec: BatchSpec, out: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Return a batch on the storage device, to be copied to `out`, and the event of the last copy."""
        spec = replace(spec, keys=tuple(out.columns))
        if spec not in self._staging:
            event = torch.cuda.Event() if self.device.type == "cuda" else None
            self._staging[spec] = (self.make_batch(spec, device=self.storage_device), event)
        return self._staging[spec]

    # ---------------------------------------------------------------- writing to stored rows

    def write_back(self, index: RowIndex, columns: Mapping[str, torch.Tensor], *, offset: int) -> None:
        """Replace mutable columns of sampled rows.

        columns: name -> (B, L, …), for rows offset … offset+L of each sequence

        Padding and rows that were overwritten since they were sampled are skipped, without a device
        synchronization. If sequences of a batch share rows, the last one wins on the CPU and any one of them
        on a GPU.
        """
        if not columns:
            return
        self._check_mutable(columns)
        length = next(iter(columns.values())).shape[1]
        for name, value in columns.items():
            as_rows(name, value, self._columns.specs[name], (len(index.stream), length))
        if index.stream.is_cuda and self.on_host:
            small = {name: value.to(self._columns.rings[name].dtype) for name, value in columns.items()}
            self._deferred.push(index, small, offset)
        else:
            self._write_rows(index, columns, offset)
        self._files.touch_all()

    def _write_rows(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        count = next(iter(columns.values())).shape[1]
        where = self._columns.held(index, offset, count, self.ring.oldest, self.ring.cursor)
        for name, value in columns.items():
            self._columns.scatter(name, where, value.detach())

    def read(self, position: int, count: int) -> Batch:
        """Return rows position … position+count of every stream, (N, count, …), on the training device."""
        self._check_held(position, count)
        streams = torch.arange(self.num_streams, device=self.device)
        rows = self._rows(list(self.columns), position, count, self.device)
        return Batch(rows, RowIndex(streams, torch.full_like(streams, position)))

    def write(self, position: int, columns: Mapping[str, torch.Tensor]) -> None:
        """Replace mutable or added columns of consecutive rows. columns: name -> (N, count, …)"""
        self._check_mutable(columns)
        for name, value in columns.items():
            count = int(value.shape[1])
            self._check_held(position, count)
            rows = as_rows(name, value, self._columns.specs[name], (self.num_streams, count))
            self._columns.write(name, position, rows)
            self._files.touch(position, position + count)

    def add_column(self, name: str, spec: ArraySpec) -> None:
        """Add a mutable column of zeros. A second call with the same arguments does nothing."""
        present = self._columns.specs.get(name)
        if present is None:
            self._columns.allocate(name, spec)
            self._added.append(name)
            self._files.touch_all()
        elif present != spec:
            raise ConfigError(
                f"column '{name}' exists as {present.dtype} {present.shape}, not {spec.dtype} {spec.shape}"
            )

    def _check_mutable(self, columns: Mapping[str, Any]) -> None:
        allowed = [*self._mutable, *self._added]
        for name in columns:
            if name not in allowed:
                raise ConfigError(f"column '{name}' cannot be changed once stored.{closest(name, allowed)}")

    def _check_held(self, position: int, count: int) -> None:
        if position < self.ring.oldest or position + count > self.ring.cursor or count < 0:
            held = f"{self.ring.oldest} to {self.ring.cursor}"
            raise ConfigError(
                f"rows {position} to {position + count} are not stored; the buffer holds {held}"
            )

    def _rows(self, names: Sequence[str], position: int, count: int, device: torch.device) -> Rows:
        """Return copies (N, count, …) of consecutive rows of all streams."""
        self._deferred.flush()
        return {name: self._columns.read(name, position, count).to(device) for name in names}

    # ---------------------------------------------------------------- checkpoints

    def get_state(self) -> dict[str, Any]:
        """Return the state of the samplers. `checkpoint` saves the rows."""
        return samplers_state(self._samplers, self._specs)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore all saved samplers, also unused ones, because rows may be added before their first use."""
        restore_samplers(state, self._sampler)

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        """Save the rows to a folder, writing only new data. returns: {"files": …, "meta": …} for JSON"""

        def read(names: Sequence[str], first: int, last: int) -> Rows:
            return self._rows(names, first, last - first, torch.device("cpu"))

        layout = self._layout() | ({"gap_behind": True} if self._gap_behind else {})
        return self._files.save(folder, layout, self.ring.oldest, self.ring.cursor, read)

    def restore(
        self, folder: Path, entry: Mapping[str, Any], *, skip_corrupt: bool = False
    ) -> list[LostFile]:
        """Restore the rows of a checkpoint; CheckpointError if it is damaged or does not fit this buffer.

        skip_corrupt: skip damaged files and return them; see chunk_files.plan_restore
        """
        meta = entry["meta"]
        check_layout(meta, self._layout())
        for name in meta["added"]:
            self.add_column(name, ArraySpec.from_dict(meta["columns"][name]))
        self._deferred.flush()
        plan = self._plan(folder, entry, skip_corrupt)
        restore_rows(plan, self._files.load(folder, plan.entry, self._layout()), self._columns)
        self._gap_behind = plan.gap_behind
        if plan.lost:
            self._files.ignore_written()
        self._rebuild_ring(plan.cursor, plan.first)
        return plan.lost

    def _plan(self, folder: Path, entry: Mapping[str, Any], skip_corrupt: bool) -> RestorePlan:
        return plan_restore(folder, entry, self.ring.capacity, skip_corrupt=skip_corrupt)

    def _rebuild_ring(self, cursor: int, oldest: int = 0) -> None:
        """Recompute where episodes begin after rows were restored."""
        first = None
        if "is_first" in self._columns.specs:
            begin = max(oldest, cursor - self.ring.capacity)
            first = self._columns.read("is_first", begin, cursor - begin).cpu().numpy()
        self.ring.rebuild(cursor, first, oldest)

    def _layout(self) -> dict[str, Any]:
        return {
            "num_streams": self.num_streams,
            "capacity": self.capacity,
            "columns": {name: spec.to_dict() for name, spec in self._columns.specs.items()},
            "mutable": list(self._mutable),
            "added": list(self._added),
        }
