"""Opening a folder of episodes, however the process that wrote it ended.

The index is read up to the first record that is not whole. Episodes that reached a chunk and not the index are found in the
chunk itself, so a kill loses at most the episode that was being written, and those that were still open. Whatever is
missing or damaged is said once, by file, with the number of episodes and rows; the rest is used.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rl_lab.buffers.chunk_reader import chunk_path
from rl_lab.buffers.episode_records import (
    HEAD,
    LONGEST,
    DamagedRecord,
    Dropped,
    Episode,
    First,
    Record,
    Seal,
    read_log,
    unpack,
)
from rl_lab.buffers.episode_table import EpisodeTable
from rl_lab.buffers.salvage import Lost

INDEX = "index.log"
CHANGED = "has changed since it was written (checksum)"


@dataclass
class Recovered:
    """What was found in a folder."""

    table: EpisodeTable
    seals: dict[int, Seal] = field(default_factory=dict)
    ends: dict[int, int] = field(
        default_factory=dict
    )  # chunk -> bytes up to the end of its last whole record
    lost: list[Lost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what happened, in words
    index_is_whole: bool = True  # and says all there is
    index_size: int = 0
    index_records: int = 0


def chunk_files(folder: Path) -> dict[int, Path]:
    """Chunk number -> file, in order."""
    found = {}
    for path in folder.glob("chunk-*.episodes"):
        match = re.fullmatch(r"chunk-(\d+)\.episodes", path.name)
        if match:
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def recover(folder: Path, *, index: Path | None = None, verify: bool = False) -> Recovered:
    """Read a folder. verify: check every block of every chunk, not only of the one written last."""
    index = index or folder / INDEX
    data = index.read_bytes() if index.exists() else b""
    records, good = read_log(data)
    files = chunk_files(folder)
    found = Recovered(table_of(records), index_size=good, index_records=len(records))
    found.seals = {record.chunk: record for record in records if isinstance(record, Seal)}
    if good < len(data):
        found.notes.append(f"{index} was cut at byte {good:,} of {len(data):,}: what follows is not whole")
    elif files and not data:
        found.notes.append(f"{index} is missing and was made again from the chunk files")
    found.index_is_whole = good == len(data) and bool(data or not files)
    _find_unlisted(files, found)
    _find_missing(folder, files, found)
    newest = [chunk for chunk in files if chunk not in found.seals]
    damaged = check_chunks(folder, found.table, list(files) if verify else newest, found.lost)
    for chunk in damaged:  # a seal no longer says what the file is
        found.seals.pop(chunk, None)
    return found


def table_of(records: Iterable[Record]) -> EpisodeTable:
    """The table that an index describes."""
    records = list(records)
    episodes = [record for record in records if isinstance(record, Episode)]
    first = max([record.number for record in records if isinstance(record, First)], default=0)
    table = EpisodeTable(min([first, *(episode.number for episode in episodes[:1])]))
    run: list[Episode] = []
    for episode in episodes:
        if episode.number != table.end + len(run):
            table.extend(run)
            table.skip_to(episode.number)
            run = []
        if episode.number == table.end + len(run):
            run.append(episode)
    table.extend(run)
    while table.first < min(first, table.end):
        table.forget_oldest()
    if not len(table.column("rows")):
        table = EpisodeTable(max(first, table.end))
    table.drop({record.number for record in records if isinstance(record, Dropped)})
    return table


def _find_unlisted(files: dict[int, Path], found: Recovered) -> None:
    """Add episodes that reached a chunk and not the index, and note where each chunk's whole records end."""
    table = found.table
    stored = table.column("size") > 0
    chunk, end = table.column("chunk")[stored], (table.column("offset") + table.column("size"))[stored]
    ends = np.zeros(chunk.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(ends, chunk, end)
    found.ends = {number: int(ends[number]) for number in np.unique(chunk).tolist()}
    listed = max(found.ends, default=-1)
    before = table.end
    for number, path in files.items():
        if number < listed or number in found.seals:
            continue
        last = number == max(files)
        content = _Content(path, found.ends.get(number, 0))
        while (episode := content.next(number)) is not None:
            table.skip_to(episode.number)
            if episode.number != table.end:  # it is known already
                continue
            table.extend([episode])
            if not content.is_whole(episode):
                found.lost.append(_lose(table, np.array([episode.number]), path, CHANGED))
        if content.position < content.size:
            found.notes.append(f"{path}: {content.describe_rest(last)}")
            found.index_is_whole = False
        found.ends[number] = content.position
    if table.end > before:
        found.index_is_whole = False


class _Content:
    """A chunk file, read record by record from a position on."""

    def __init__(self, path: Path, position: int) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed when forgotten
        self.size = path.stat().st_size
        self.position = position

    def next(self, chunk: int) -> Episode | None:
        """The episode here, if all of it is in the file; the position is then behind it."""
        record = self._record()
        if not isinstance(record, Episode) or (record.chunk, record.offset) != (chunk, self.position):
            return None
        if self.position + record.size > self.size:
            return None
        self.position += record.size
        return record

    def is_whole(self, episode: Episode) -> bool:
        return _is_whole(self._file, episode)

    def describe_rest(self, last: bool) -> str:
        rest = f"{self.size - self.position:,} bytes"
        if not last:
            return f"its last {rest} cannot be read, and the episodes in them are lost"
        record = self._record()
        what = f"an episode of {record.rows:,} rows" if isinstance(record, Episode) else "an episode"
        return f"{what} was being written when it ended, and is lost ({rest})"

    def _record(self) -> Record | None:
        self._file.seek(self.position)
        head = self._file.read(HEAD.size)
        if len(head) < HEAD.size or (length := HEAD.unpack(head)[0]) > LONGEST:
            return None
        try:
            return unpack(head + self._file.read(length), 0)[0]
        except DamagedRecord:
            return None


def _find_missing(folder: Path, files: dict[int, Path], found: Recovered) -> None:
    """Take out episodes whose chunk is gone, or too short to hold them."""
    table = found.table
    oldest = min(files, default=0)
    for chunk in np.unique(table.column("chunk")[table.column("rows") > 0]).tolist():
        numbers = table.in_chunk(chunk)
        if chunk not in files:
            if (
                chunk < oldest and not found.index_is_whole
            ):  # deleted for the budget; the note of it was cut off
                table.drop(set(numbers.tolist()))
            else:
                found.lost.append(_lose(table, numbers, chunk_path(folder, chunk), "is missing"))
            continue
        at = numbers - table.first
        beyond = numbers[(table.column("offset") + table.column("size"))[at] > files[chunk].stat().st_size]
        if len(beyond):
            found.lost.append(_lose(table, beyond, files[chunk], "is cut off"))
            found.seals.pop(chunk, None)


def check_chunks(folder: Path, table: EpisodeTable, chunks: Iterable[int], lost: list[Lost]) -> list[int]:
    """Compare every block of these chunks with its checksum, and take damaged episodes out of the table.

    returns: chunks in which there were any
    """
    found = []
    for chunk in chunks:
        path = chunk_path(folder, chunk)
        numbers = table.in_chunk(chunk)
        try:
            with open(path, "rb") as file:
                damaged = [e.number for e in table.records(numbers.tolist()) if not _is_whole(file, e)]
            reason = CHANGED
        except OSError as error:
            damaged, reason = numbers.tolist(), f"cannot be read ({error.strerror})"
        if damaged:
            lost.append(_lose(table, np.array(damaged), path, reason))
            found.append(chunk)
    return found


def _is_whole(file: BinaryIO, episode: Episode) -> bool:
    file.seek(episode.offset + episode.head_size)
    return all(zlib.crc32(file.read(size)) == crc for size, crc in episode.blocks)


def _lose(table: EpisodeTable, numbers: np.ndarray, path: Path, reason: str) -> Lost:
    rows = int(table.column("rows")[numbers - table.first].sum())
    table.drop(set(numbers.tolist()))
    return Lost(str(path), rows, reason, episodes=len(numbers))
