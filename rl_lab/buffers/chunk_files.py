"""Rows of a ring in files, so that saving again writes only what is new.

Columns that never change are written once, in chunks of `chunk_rows` positions × all streams, named by their
number: `chunk-00000012.pt`. The chunk still being filled is `tail-<cursor>.pt`. Columns that change later
(latents, priorities) lie beside them, per chunk, as `mutable-00000012-<save>.pt`, again only where touched. No file
that a restored or earlier checkpoint names is written over; files that no kept checkpoint names may be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_lab.buffers.ring import Columns
from rl_lab.buffers.row_layout import differences
from rl_lab.errors import CheckpointError
from rl_lab.records import ArraySpec
from rl_lab.utils.files import crc32_of, write_atomic

FORMAT = 1  # of an entry's meta

Rows = dict[str, torch.Tensor]  # name -> (N, count, …) on the host
Read = Callable[[Sequence[str], int, int], Rows]  # columns, first position, position after the last


class ChunkFiles:
    """Knows which files of one folder already hold which rows."""

    def __init__(self, chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self.saves = 0
        self._folder: Path | None = None
        self._known: dict[str, dict[str, int]] = {}  # file name -> bytes, crc32, start, end
        self._mutable: dict[int, str] = {}  # chunk -> file that holds its mutable columns as they are now

    def touch(self, begin: int, end: int) -> None:
        """Mutable columns changed at these positions."""
        for chunk in range(begin // self.chunk_rows, (end - 1) // self.chunk_rows + 1):
            self._mutable.pop(chunk, None)

    def touch_all(self) -> None:
        self._mutable.clear()

    def forget(self) -> None:
        """Trust no file written so far; the next save writes all rows, under names that are not taken."""
        self._folder = None

    def save(
        self, folder: Path, layout: Mapping[str, Any], begin: int, end: int, read: Read
    ) -> dict[str, Any]:
        """Bring the folder up to positions begin … end of a ring laid out as `layout` says.

        returns: {"files": {name: {"bytes", "crc32"}}, "meta": …}, JSON-able
        """
        mutable = [*layout["mutable"], *layout["added"]]
        fixed = [name for name in layout["columns"] if name not in mutable]
        if self._folder != folder.resolve():  # another folder has none of our files
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
                whole = last == (chunk + 1) * self.chunk_rows
                name = f"chunk-{chunk:08d}.pt" if whole else f"tail-{last:012d}.pt"
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
        """Start, end and rows of every file of a saved entry; then saving goes on from there."""
        meta, files = entry["meta"], entry["files"]
        for kind in ("fixed", "mutable"):
            for name, start, end in meta["parts"][kind]:
                if name not in files or Path(name).name != name:
                    raise CheckpointError(
                        f"the replay's list of files is damaged: '{name}' is not one of them"
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
    """CheckpointError, with both sides, unless saved rows fit a ring of this layout. Added columns may differ."""
    if "num_streams" not in meta or "capacity" not in meta:
        raise CheckpointError("what was saved is not a ring of rows: the run had another kind of buffer")
    if meta.get("format") != FORMAT:
        raise CheckpointError(
            f"replay of format {meta.get('format')} cannot be read; this version reads {FORMAT}"
        )
    for what in ("num_streams", "capacity"):
        if meta[what] != layout[what]:
            raise CheckpointError(
                f"the saved replay has {what} {meta[what]}, but this run's config asks for {layout[what]}: "
                "set it back, or start a new run"
            )
    here, saved = (
        {n: ArraySpec.from_dict(spec) for n, spec in side["columns"].items() if n not in side["added"]}
        for side in (layout, meta)
    )
    if differ := differences(here, saved):
        raise CheckpointError(f"the saved replay has other columns: {'; '.join(differ)}")


def _check_shapes(path: Path, rows: Rows, meta: Mapping[str, Any], count: int) -> None:
    for name, value in rows.items():
        expected = (meta["num_streams"], count, *meta["columns"].get(name, {}).get("shape", ()))
        if name not in meta["columns"] or tuple(value.shape) != expected:
            raise CheckpointError(
                f"replay file {path} holds '{name}' as {tuple(value.shape)}, where {expected} was saved: it is damaged"
            )


def _write(path: Path, rows: Rows, start: int, end: int) -> dict[str, int]:
    size, crc = write_atomic(path, lambda file: torch.save({"start": start, "columns": rows}, file))
    return {"bytes": size, "crc32": crc, "start": start, "end": end}


def _read(path: Path, size: int, start: int) -> Rows:
    """Rows of one file, mapped rather than read, so that loading needs no second copy in memory."""
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
    except Exception as error:  # whatever a damaged file makes of the reader
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"replay file {path} cannot be read: it is damaged ({reason[0][:200]})"
        ) from None
    return rows


# --------------------
# What of a saved ring can be put back: all of its rows, or, if asked, those whose files are still whole.
#
# Rows around a lost file are moved together, and the first row behind a gap is marked `is_first`, so that nothing
# that happened before the gap is taken for its past. The rows then get positions that were never used before: files
# that are written later have new names, and whatever remembers an old position finds it gone.


@dataclass(frozen=True)
class Lost:
    """A file that could not be used, and what was in it."""

    file: str
    rows: int  # over all streams
    reason: str
    episodes: int = 0  # where they are counted

    def __str__(self) -> str:
        what = (
            f"{self.episodes:,} episodes with {self.rows:,} rows" if self.episodes else f"{self.rows:,} rows"
        )
        return f"{self.file} ({what}) {self.reason}"


@dataclass(frozen=True)
class Plan:
    """Which rows of a saved ring go where.

    entry:      what is read: the saved entry, without damaged files
    spans:      (first position there, position after the last there, first position here), in order
    """

    entry: Mapping[str, Any]
    spans: list[tuple[int, int, int]]
    first: int  # position here of the oldest row
    cursor: int  # position here behind the newest row
    beginnings: list[int] = field(default_factory=list)  # rows here that come right after a gap
    gap_behind: bool = False  # the newest rows are lost: the next row to be added comes right after a gap
    lost: list[Lost] = field(default_factory=list)
    partial: bool = False  # rows that no file holds stay as they are

    @property
    def rows(self) -> int:
        return self.cursor - self.first

    def moves(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """First row, row after the last, and their position here, of the wanted rows in a file of start … end."""
        for first, last, here in self.spans:
            low, high = max(start, first), min(end, last)
            if low < high:
                yield low, high, here + low - first


def plan_restore(folder: Path, entry: Mapping[str, Any], capacity: int, *, skip_corrupt: bool) -> Plan:
    """How to restore an entry of ChunkFiles into a ring of `capacity` rows per stream."""
    meta = entry["meta"]
    cursor = int(meta["cursor"])
    begin = max(int(meta.get("begin", 0)), cursor - capacity)
    gap_behind = bool(meta.get("gap_behind", False))
    damaged = find_damaged(folder, entry) if skip_corrupt else {}
    if not damaged:
        return Plan(entry, [(begin, cursor, begin)], begin, cursor, gap_behind=gap_behind)
    holes, lost = [], []
    for kind in ("fixed", "mutable"):
        for name, start, end in meta["parts"][kind]:
            if name in damaged:
                low, high = max(start, begin), min(end, cursor)
                holes.append((low, high))
                lost.append(Lost(name, max(0, high - low) * int(meta["num_streams"]), damaged[name]))
    kept = _between(begin, cursor, sorted(holes))
    marked = "is_first" in meta["columns"]
    if not marked:  # a gap could not be
        kept = [span for span in kept[-1:] if span[1] == cursor]
    chunk = int(meta["chunk_rows"])
    first = here = -(-cursor // chunk) * chunk
    spans, beginnings = [], []
    for low, high in kept:
        spans.append((low, high, here))
        if low > begin and marked:
            beginnings.append(here)
        here += high - low
    cut = gap_behind or not kept or kept[-1][1] < cursor
    parts = {kind: [part for part in meta["parts"][kind] if part[0] not in damaged] for kind in meta["parts"]}
    readable = {**entry, "meta": {**meta, "parts": parts}}
    return Plan(readable, spans, first, here, beginnings, cut, lost)


def put_back(plan: Plan, files: Iterable[tuple[int, int, Rows]], columns: Columns) -> None:
    """Write the rows of each file (start, end, name -> (N, count, …)) to where the plan wants them."""
    found = dict.fromkeys(plan.entry["meta"]["columns"], 0)
    for start, end, rows in files:
        for first, last, here in plan.moves(start, end):
            for name, value in rows.items():
                columns.write(name, here, value[:, first - start : last - start])
                found[name] += last - first
    if not plan.partial and any(count != plan.rows for count in found.values()):
        raise CheckpointError(f"the replay's files do not hold all of its {plan.rows} rows: {found}")
    for position in plan.beginnings:
        columns.write("is_first", position, torch.ones(columns.num_streams, 1, dtype=torch.bool))


def find_damaged(folder: Path, entry: Mapping[str, Any], *, sizes_only: bool = False) -> dict[str, str]:
    """File -> what is wrong with it, for those of an entry that are not what was written."""
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
    """What is left of begin … end without the holes."""
    left, position = [], begin
    for low, high in holes:
        if low > position:
            left.append((position, low))
        position = max(position, high)
    if position < end:
        left.append((position, end))
    return left
