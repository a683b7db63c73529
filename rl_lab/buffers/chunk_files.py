"""ChunkFiles: the rows of a ring in checkpoint files, of which each save writes only the new ones.

Columns that never change are written once, in chunks of `chunk_rows` positions × all streams:
`chunk-00000012.pt`. The incomplete last chunk is `tail-<cursor>.pt`. Mutable columns (latents, priorities)
are stored per chunk as `mutable-00000012-<save>.pt`, and only written again if they changed. A save never
overwrites a file of an earlier or restored checkpoint; files that no kept checkpoint lists may be deleted.

`plan_restore` finds the rows that can be restored: all of them or, if asked, those in intact files. In the
second case the rows before and after a lost file become adjacent, and the first row after the gap gets
`is_first`, so that it does not continue an earlier episode. The rows get positions that were never used, so
later files have new names and an old RowIndex matches no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_lab.buffers.ring import Columns, differences
from rl_lab.errors import CheckpointError
from rl_lab.records import ArraySpec
from rl_lab.utils.files import crc32_of, write_atomic

FORMAT = 1  # of the entry's meta

Rows = dict[str, torch.Tensor]  # name -> (N, count, …) on the host
Read = Callable[[Sequence[str], int, int], Rows]  # columns, first position, position after the last


class ChunkFiles:
    """Tracks which files of one folder hold which rows."""

    def __init__(self, chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self.saves = 0
        self._folder: Path | None = None
        self._known: dict[str, dict[str, int]] = {}  # file name -> bytes, crc32, start, end
        self._mutable: dict[int, str] = {}  # chunk -> file with the current values of its mutable columns

    def touch(self, begin: int, end: int) -> None:
        """Mark the mutable columns at these positions as changed."""
        for chunk in range(begin // self.chunk_rows, (end - 1) // self.chunk_rows + 1):
            self._mutable.pop(chunk, None)

    def touch_all(self) -> None:
        self._mutable.clear()

    def ignore_written(self) -> None:
        """Ignore all files written so far; the next save writes all rows to files with new names."""
        self._folder = None

    def save(
        self, folder: Path, layout: Mapping[str, Any], begin: int, end: int, read: Read
    ) -> dict[str, Any]:
        """Write the missing files for positions begin … end of a ring. layout: see ReplayBuffer._layout

        returns: {"files": {name: {"bytes", "crc32"}}, "meta": …}, JSON-serializable
        """
        mutable = [*layout["mutable"], *layout["added"]]
        fixed = [name for name in layout["columns"] if name not in mutable]
        if self._folder != folder.resolve():  # a new folder has none of these files
            self._folder, self._known = folder.resolve(), {}
            self.touch_all()
        self.saves += 1
        parts: dict[str, list[str]] = {"fixed": [], "mutable": []}
        used: dict[str, dict[str, int]] = {}

        def keep(kind: str, name: str, columns: Sequence[str], first: int, last: int) -> None:
            if name not in self._known or not (folder / name).exists():
                self._known[name] = _write(folder / name, read(columns, first, last), first, last)
            used[name] = self._known[name]
            parts[kind].append(name)

        for chunk, first, last in self._chunks(begin, end):
            if fixed:
                complete = last == (chunk + 1) * self.chunk_rows
                name = f"chunk-{chunk:08d}.pt" if complete else f"tail-{last:012d}.pt"
                keep("fixed", name, fixed, first, last)
            if mutable:
                name = self._mutable.setdefault(chunk, f"mutable-{chunk:08d}-{self.saves:08d}.pt")
                keep("mutable", name, mutable, first, last)
        self._known = used
        files = {name: {"bytes": info["bytes"], "crc32": info["crc32"]} for name, info in used.items()}
        spans = {
            kind: [[name, used[name]["start"], used[name]["end"]] for name in parts[kind]] for kind in parts
        }
        meta = {"format": FORMAT, **layout, "begin": begin, "cursor": end, "parts": spans}
        return {"files": files, "meta": meta | {"chunk_rows": self.chunk_rows, "saves": self.saves}}

    def load(
        self, folder: Path, entry: Mapping[str, Any], layout: Mapping[str, Any]
    ) -> Iterator[tuple[int, int, Rows]]:
        """Yield start, end and rows of every file of a saved entry; later saves reuse these files."""
        meta, files = entry["meta"], entry["files"]
        for kind in ("fixed", "mutable"):
            for name, start, end in meta["parts"][kind]:
                if name not in files or Path(name).name != name:
                    raise CheckpointError(
                        f"replay file '{name}' is not in the checkpoint's list of files; resume from another checkpoint"
                    )
                rows = _read(folder / name, files[name]["bytes"], start)
                _check_shapes(folder / name, rows, meta, end - start)
                yield start, end, rows
        self.saves = int(meta["saves"])
        self._folder = folder.resolve()
        self._known, self._mutable = {}, {}
        if meta["chunk_rows"] == self.chunk_rows and meta["mutable"] == layout["mutable"]:
            spans = [span for kind in ("fixed", "mutable") for span in meta["parts"][kind]]
            self._known = {name: {**files[name], "start": start, "end": end} for name, start, end in spans}
            self._mutable = {start // self.chunk_rows: name for name, start, _ in meta["parts"]["mutable"]}

    def _chunks(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        for chunk in range(begin // self.chunk_rows, -(-end // self.chunk_rows)):
            first = chunk * self.chunk_rows
            yield chunk, max(begin, first), min(end, first + self.chunk_rows)


def check_layout(meta: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the saved rows fit a ring of this layout. Added columns may differ."""
    if "num_streams" not in meta or "capacity" not in meta:
        raise CheckpointError(
            "buffer: the saved replay is not a ring buffer; use the buffer type of the saved run"
        )
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"replay format {meta.get('format')} cannot be read; this version reads {FORMAT}"
        )
    for what in ("num_streams", "capacity"):
        if meta[what] != layout[what]:
            raise CheckpointError(
                f"the saved replay has {what} {meta[what]}, but this run's config asks for {layout[what]}: "
                "restore the saved value, or start a new run"
            )
    here, saved = (
        {n: ArraySpec.from_dict(spec) for n, spec in side["columns"].items() if n not in side["added"]}
        for side in (layout, meta)
    )
    if differ := differences(here, saved):
        raise CheckpointError(f"columns of the saved replay differ: {'; '.join(differ)}")


def _check_shapes(path: Path, rows: Rows, meta: Mapping[str, Any], count: int) -> None:
    for name, value in rows.items():
        expected = (meta["num_streams"], count, *meta["columns"].get(name, {}).get("shape", ()))
        if name not in meta["columns"] or tuple(value.shape) != expected:
            raise CheckpointError(
                f"replay file {path} has '{name}' of shape {tuple(value.shape)}, not {expected}: it is damaged"
            )


def _write(path: Path, rows: Rows, start: int, end: int) -> dict[str, int]:
    size, crc = write_atomic(path, lambda file: torch.save({"start": start, "columns": rows}, file))
    return {"bytes": size, "crc32": crc, "start": start, "end": end}


def _read(path: Path, size: int, start: int) -> Rows:
    """Return the rows of one file, memory-mapped to avoid a second copy in memory."""
    try:
        if path.stat().st_size != size:
            raise CheckpointError(
                f"replay file {path} has {path.stat().st_size:,} bytes, but {size:,} were written: it is damaged"
            )
        content = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
        rows = dict(content["columns"])
        if content["start"] != start:
            raise CheckpointError(f"replay file {path} begins at row {content['start']}, not at {start}")
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"replay file {path} is missing") from None
    except Exception as error:  # torch.load raises many types for damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"replay file {path} cannot be read: it is damaged ({reason[0][:200]})"
        ) from None
    return rows


# --- Partial restore ----------------------------------------------------------------------------


@dataclass(frozen=True)
class LostFile:
    """A damaged or missing file, and the rows that were lost with it."""

    file: str
    rows: int  # of all streams
    reason: str
    episodes: int = 0  # 0: not counted

    def __str__(self) -> str:
        what = (
            f"{self.episodes:,} episodes with {self.rows:,} rows" if self.episodes else f"{self.rows:,} rows"
        )
        return f"{self.file} ({what}) {self.reason}"


@dataclass(frozen=True)
class RestorePlan:
    """Maps the rows of a saved ring to positions in this ring.

    entry:      the saved entry without damaged files
    spans:      (first saved position, saved position after the last, first new position), in order
    """

    entry: Mapping[str, Any]
    spans: list[tuple[int, int, int]]
    first: int  # new position of the oldest row
    cursor: int  # new position after the newest row
    after_gap: list[int] = field(default_factory=list)  # new positions of the rows after a gap
    gap_behind: bool = False  # the newest rows are lost: the next row to be added follows a gap
    lost: list[LostFile] = field(default_factory=list)
    partial: bool = False  # rows that are in no file keep their values

    @property
    def rows(self) -> int:
        return self.cursor - self.first

    def moves(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield first row, row after the last and new position of the rows in a file of start … end."""
        for first, last, target in self.spans:
            low, high = max(start, first), min(end, last)
            if low < high:
                yield low, high, target + low - first


def plan_restore(folder: Path, entry: Mapping[str, Any], capacity: int, *, skip_corrupt: bool) -> RestorePlan:
    """Plan the restore of an entry of ChunkFiles into a ring of `capacity` rows per stream."""
    meta = entry["meta"]
    cursor = int(meta["cursor"])
    begin = max(int(meta.get("begin", 0)), cursor - capacity)
    gap_behind = bool(meta.get("gap_behind", False))
    damaged = find_damaged(folder, entry) if skip_corrupt else {}
    if not damaged:
        return RestorePlan(entry, [(begin, cursor, begin)], begin, cursor, gap_behind=gap_behind)
    holes, lost = [], []
    for kind in ("fixed", "mutable"):
        for name, start, end in meta["parts"][kind]:
            if name in damaged:
                low, high = max(start, begin), min(end, cursor)
                holes.append((low, high))
                lost.append(LostFile(name, max(0, high - low) * int(meta["num_streams"]), damaged[name]))
    kept = _between(begin, cursor, sorted(holes))
    marked = "is_first" in meta["columns"]
    if not marked:  # without is_first a gap cannot be marked
        kept = [span for span in kept[-1:] if span[1] == cursor]
    chunk = int(meta["chunk_rows"])
    first = target = -(-cursor // chunk) * chunk
    spans, after_gap = [], []
    for low, high in kept:
        spans.append((low, high, target))
        if low > begin and marked:
            after_gap.append(target)
        target += high - low
    cut = gap_behind or not kept or kept[-1][1] < cursor
    parts = {kind: [part for part in meta["parts"][kind] if part[0] not in damaged] for kind in meta["parts"]}
    readable = {**entry, "meta": {**meta, "parts": parts}}
    return RestorePlan(readable, spans, first, target, after_gap, cut, lost)


def restore_rows(plan: RestorePlan, files: Iterable[tuple[int, int, Rows]], columns: Columns) -> None:
    """Write the rows of each file (start, end, name -> (N, count, …)) to the positions of the plan."""
    found = dict.fromkeys(plan.entry["meta"]["columns"], 0)
    for start, end, rows in files:
        for first, last, target in plan.moves(start, end):
            for name, value in rows.items():
                columns.write(name, target, value[:, first - start : last - start])
                found[name] += last - first
    if not plan.partial and any(count != plan.rows for count in found.values()):
        raise CheckpointError(f"replay files do not hold all of the {plan.rows} rows: {found}")
    for position in plan.after_gap:
        columns.write("is_first", position, torch.ones(columns.num_streams, 1, dtype=torch.bool))


def find_damaged(folder: Path, entry: Mapping[str, Any], *, sizes_only: bool = False) -> dict[str, str]:
    """Return file -> reason for each damaged or missing file of an entry."""
    found = {}
    for name, facts in entry["files"].items():
        path = folder / Path(name).name
        try:
            size = path.stat().st_size
            if size != facts["bytes"]:
                found[name] = f"has {size:,} bytes instead of {facts['bytes']:,}"
            elif not sizes_only and crc32_of(path) != facts["crc32"]:
                found[name] = "has changed since it was written (checksum)"
        except FileNotFoundError:
            found[name] = "is missing"
        except OSError as error:
            found[name] = f"cannot be read ({error})"
    return found


def _between(begin: int, end: int, holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans of begin … end outside the holes."""
    kept, position = [], begin
    for low, high in holes:
        if low > position:
            kept.append((position, low))
        position = max(position, high)
    if position < end:
        kept.append((position, end))
    return kept
