"""What of a saved ring can be put back: all of its rows, or, if asked, those whose files are still whole.

Rows around a lost file are moved together, and the first row behind a gap is marked `is_first`, so that nothing
that happened before the gap is taken for its past. The rows then get positions that were never used before: files
that are written later have new names, and whatever remembers an old position finds it gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_lab.buffers.chunk_files import Rows
from rl_lab.buffers.columns import Columns
from rl_lab.errors import CheckpointError
from rl_lab.utils.files import crc32_of


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
