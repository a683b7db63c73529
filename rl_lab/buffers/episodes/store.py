"""Episodes in the files of a folder: written once, in order, deleted from the oldest on, readable after any kill.

    layout.json              columns of a row, rows of a block
    index.log                a record for each episode; see episode_records.py
    chunk-00000000.episodes  the episodes themselves, packed, a few dozen megabytes of them in each

An episode is first written to its chunk and then to the index, each with one append. Nothing that was written is ever
changed. When a chunk is complete it is sealed: brought to the disk, with its checksum in the index.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from io import FileIO
from pathlib import Path

from rl_lab.buffers.chunk_files import Lost
from rl_lab.buffers.episodes.recovery import (
    INDEX,
    NUMBERS,
    Block,
    ChunkReader,
    DamagedBlock,
    Recovered,
    check_chunks,
    choose_compression,
    chunk_files,
    chunk_path,
    compressor,
    recover,
)
from rl_lab.buffers.episodes.table import Dropped, Episode, EpisodeTable, First, Record, Seal, pack
from rl_lab.buffers.row_layout import LAYOUT, Bytes, RowLayout, differences, read_layout, write_layout
from rl_lab.errors import ConfigError, LabError
from rl_lab.utils.files import RunLock, crc32_of, free_bytes, sync_folder, write_atomic

SPARE_RECORDS = 4096  # records that the index may have beyond those in use, before it is written anew


class EpisodeStore:
    """The files of one folder. Only one process may write to a folder; any number may read it.

    capacity:    rows of finished episodes that are kept, None: all
    max_bytes:   of the chunk files, None: any
    chunk_bytes: of one chunk
    index:       for reading: an index of another name than the usual one
    fresh:       begin without the episodes that lie in the folder; they are deleted when the first new one is written
    """

    def __init__(
        self,
        folder: Path,
        layout: RowLayout,
        *,
        compression: str = "auto",
        capacity: int | None = None,
        max_bytes: int | None = None,
        chunk_bytes: int = 64 << 20,
        read_only: bool = False,
        fresh: bool = False,
        verify: bool = False,
        index: Path | None = None,
        threads: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.read_only = read_only
        self.capacity, self.max_bytes = capacity, max_bytes
        self.chunk_bytes = chunk_bytes if max_bytes is None else min(chunk_bytes, max(1, max_bytes // 8))
        self.compression = choose_compression(compression)
        self._compress = compressor(self.compression)
        self._say = say
        self._lock: RunLock | None = None
        self._index: FileIO | None = None
        self._chunk: FileIO | None = None  # the chunk that is being written
        self._chunk_crc = 0
        if not read_only:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"episodes cannot be kept in {folder}: {error}") from None
            self._lock = RunLock(folder).acquire()
        self.leftover = fresh
        self.layout = self._check_layout(layout)
        self._reader = ChunkReader(folder, threads)
        self.lost: list[Lost] = []
        self.take(Recovered(EpisodeTable()) if fresh else recover(folder, index=index, verify=verify))

    def _check_layout(self, wanted: RowLayout) -> RowLayout:
        """The layout of the folder, which a writer makes if there is none."""
        if self.read_only:
            return wanted
        if self.leftover or not (self.folder / LAYOUT).exists():
            write_layout(self.folder, wanted)
            return wanted
        there = read_layout(self.folder)
        differ = differences(wanted.columns, there.columns)
        if wanted.action and there.action and wanted.action != there.action:
            differ = [*differ, f"actions are {wanted.action} here and {there.action} there"]
        if differ:
            raise ConfigError(
                f"the episodes in {self.folder} are of another kind: {'; '.join(differ)}. Use another folder."
            )
        return there

    # ---------------------------------------------------------------- opening

    def take(self, found: Recovered, *, quiet: bool = False) -> None:
        """Go on with what was found in the folder; a writer also tidies up there."""
        self.table, self.seals, self.lost = found.table, found.seals, found.lost
        for note in [] if quiet else [*found.notes, *(f"{lost}: lost" for lost in found.lost)]:
            self._say(f"episodes: {note}")
        files = chunk_files(self.folder)
        self.next_chunk = max([-1, *files, *self.seals]) + 1
        self._sizes = {} if self.leftover else {n: path.stat().st_size for n, path in files.items()}
        self._chunk_size = 0
        if not self.read_only and not self.leftover:
            self._tidy(found, files)

    def _tidy(self, found: Recovered, files: dict[int, Path]) -> None:
        rows, chunks = self.table.column("rows"), self.table.column("chunk")
        used = set(chunks[rows > 0].tolist())
        damaged = set(chunks[(rows == 0) & (self.table.column("size") > 0)].tolist())
        sealed = []
        for chunk, path in files.items():
            if chunk not in used:
                if chunk in damaged:  # perhaps a person can make something of it
                    path.rename(path.with_name(path.name + ".damaged"))
                else:
                    path.unlink()
                self._sizes.pop(chunk)
                self.seals.pop(chunk, None)
            elif chunk not in self.seals and chunk in found.ends:  # it was being written
                os.truncate(path, min(found.ends[chunk], self._sizes[chunk]))
                self._sizes[chunk] = path.stat().st_size
                self.seals[chunk] = Seal(chunk, self._sizes[chunk], crc32_of(path))
                sealed.append(self.seals[chunk])
        if found.index_is_whole and not found.lost and found.index_records:
            self._index = FileIO(self.folder / INDEX, "r+")
            self._index_size, self._index_records = found.index_size, found.index_records
            self._log(sealed)
        else:
            self._rewrite_index()
        self._trim()

    def close(self) -> None:
        """Seal what is being written, and let others in."""
        self.seal()
        self.stop_writing()
        self._reader.close()
        if self._lock is not None:
            self._lock.release()

    def stop_writing(self) -> None:
        """Let go of the files, as they are: they are about to be closed or replaced."""
        for file in (self._chunk, self._index):
            if file is not None:
                file.close()
        self._chunk = self._index = None
        for chunk in list(self._sizes):
            self._reader.forget(chunk)

    # ---------------------------------------------------------------- writing

    def append(
        self, rows: Bytes, count: int, *, stream: int, start: int, flags: int, total_reward: float
    ) -> int:
        """Store an episode and keep the budget; returns its number. rows: column -> (count, bytes)"""
        if self.leftover:
            self.start_empty()
        step = self.layout.block_rows
        blocks = [
            self._compress(self.layout.pack(rows, k, min(k + step, count))) for k in range(0, count, step)
        ]
        episode = Episode(
            number=self.table.end,
            chunk=self.next_chunk - 1,
            offset=self._chunk_size,
            stream=stream,
            start=start,
            rows=count,
            flags=flags,
            codec=NUMBERS[self.compression],
            total_reward=total_reward,
            blocks=tuple((len(block), zlib.crc32(block)) for block in blocks),
        )
        if self._chunk is None or (self._chunk_size and self._chunk_size + episode.size > self.chunk_bytes):
            self.seal()
            self._open_chunk()
            episode = replace(episode, chunk=self.next_chunk - 1, offset=0)
        assert self._chunk is not None
        data = b"".join([pack(episode), *blocks])
        self._write(self._chunk, data, self._chunk_size)
        try:
            self._log([episode])
        except LabError:
            self._chunk.truncate(self._chunk_size)
            raise
        self._chunk_size += len(data)
        self._chunk_crc = zlib.crc32(data, self._chunk_crc)
        self._sizes[episode.chunk] = self._chunk_size
        self.table.extend([episode])
        self._trim()
        return episode.number

    def start_empty(self) -> None:
        """Delete what was in the folder before."""
        for path in chunk_files(self.folder).values():
            path.unlink()
        self.leftover = False
        self._rewrite_index()

    def seal(self) -> None:
        """Complete the chunk that is being written, and bring it to the disk; the next episode begins another."""
        if self._chunk is None:
            return
        number = self.next_chunk - 1
        try:
            os.fsync(self._chunk.fileno())
            self._chunk.close()
        except OSError as error:
            raise self._no_room(error) from error
        self._chunk = None
        if not self._chunk_size:
            chunk_path(self.folder, number).unlink()
            return
        self.seals[number] = Seal(number, self._chunk_size, self._chunk_crc)
        self._log([self.seals[number]])
        if self._index is not None:
            os.fsync(self._index.fileno())
        sync_folder(self.folder)

    def _open_chunk(self) -> None:
        path = chunk_path(self.folder, self.next_chunk)
        try:
            self._chunk = FileIO(path, "xb")
        except OSError as error:
            raise self._no_room(error) from error
        self.next_chunk += 1
        self._chunk_size = self._chunk_crc = 0

    def _log(self, records: Iterable[Record]) -> None:
        assert self._index is not None
        packed = [pack(record) for record in records]
        self._write(self._index, b"".join(packed), self._index_size)
        self._index_size += sum(map(len, packed))
        self._index_records += len(packed)

    def _write(self, file: FileIO, data: bytes, size: int) -> None:
        """Append all of it, or leave the file as it was: `size` bytes."""
        rest = memoryview(data)
        try:
            file.seek(size)
            while rest:
                rest = rest[file.write(rest) or 0 :]
        except OSError as error:
            file.truncate(size)
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> LabError:
        return LabError(
            f"episodes cannot be written to {self.folder}: {error.strerror}; {free_bytes(self.folder) / 1e9:.2f} GB are free "
            "there. Make room and resume from the last checkpoint, or set max_bytes or another folder."
        )

    # ---------------------------------------------------------------- the budget

    @property
    def disk_bytes(self) -> int:
        """Of all chunk files."""
        return sum(self._sizes.values())

    def _trim(self) -> None:
        """Let the oldest episodes go until the budget is kept; a chunk is deleted with its last one.

        What counts is the bytes of the episodes that are kept, with room for one more chunk that is partly unused: so the
        files stay below `max_bytes`, and which episodes go does not depend on where chunks begin.
        """
        table, first = self.table, self.table.first
        most = None if self.max_bytes is None else self.max_bytes - self.chunk_bytes
        while table.episodes > 1 and (
            (self.capacity is not None and table.rows > self.capacity)
            or (most is not None and (table.size > most or self.disk_bytes > (self.max_bytes or 0)))
        ):
            table.forget_oldest()
            self._delete_unused()
        if table.first > first:
            self._log([First(table.first)])
            if self._index_records > 2 * table.episodes + SPARE_RECORDS:
                self._rewrite_index()

    def _delete_unused(self) -> None:
        oldest = self.table.oldest_chunk()
        for chunk in [chunk for chunk in self._sizes if chunk < oldest]:
            self._log(
                [First(self.table.first)]
            )  # said before it is done: a chunk that is gone is then no loss
            self._reader.forget(chunk)
            chunk_path(self.folder, chunk).unlink(missing_ok=True)
            self._sizes.pop(chunk)
            self.seals.pop(chunk, None)

    def write_index(self, path: Path) -> tuple[int, int]:
        """An index of what there is now, without what is past; returns bytes and crc32."""
        records: list[Record] = [First(self.table.first), *self.seals.values()]
        records += self.table.records(self.table.numbers().tolist())
        return write_atomic(path, lambda file: file.write(b"".join(pack(record) for record in records)))

    def _rewrite_index(self) -> None:
        if self._index is not None:
            self._index.close()
        path = self.folder / INDEX
        try:
            self._index_size, _ = self.write_index(path)
            self._index = FileIO(path, "r+")
        except OSError as error:
            raise self._no_room(error) from error
        self._index_records = self.table.episodes

    # ---------------------------------------------------------------- reading

    def read(self, wanted: Iterable[tuple[int, int]]) -> list[Bytes]:
        """Blocks by (episode, block); DamagedBlock when a file is not what was written."""
        layout, table = self.layout, self.table
        blocks, counts = [], []
        for number, index in wanted:
            offset, size, crc = table.block(number, index)
            counts.append(layout.rows_in(index, table.fact(number, "rows")))
            raw = counts[-1] * layout.row_bytes
            blocks.append(
                Block(table.fact(number, "chunk"), offset, size, crc, table.fact(number, "codec"), raw)
            )
        return [layout.unpack(data, count) for data, count in zip(self._reader.read(blocks), counts)]

    def drop_damaged(self, damage: DamagedBlock) -> Lost:
        """Check the whole chunk in which damage was met, and do without its damaged episodes from now on."""
        before, found = self.table.episodes, list[Lost]()
        numbers = self.table.in_chunk(damage.chunk)
        check_chunks(self.folder, self.table, [damage.chunk], found)
        if (
            self.table.episodes == before
        ):  # it can be read now: what cannot be trusted is not used all the same
            rows = int(self.table.column("rows")[numbers - self.table.first].sum())
            self.table.drop(set(numbers.tolist()))
            found.append(Lost(str(chunk_path(self.folder, damage.chunk)), rows, damage.reason, len(numbers)))
        self._reader.forget(damage.chunk)
        if not self.read_only:
            gone = [n for n in numbers.tolist() if not self.table.fact(n, "rows")]
            self._log([Dropped(number) for number in gone])
            self.reseal(damage.chunk)
        self.lost += found
        self._say(f"episodes: {found[0]}: lost; the others are used")
        return found[0]

    def reseal(self, chunk: int) -> None:
        """Note what a damaged chunk is now; the rest of its episodes is used."""
        path = chunk_path(self.folder, chunk)
        if path.exists() and chunk in self.seals:
            self.seals[chunk] = Seal(chunk, path.stat().st_size, crc32_of(path))
            self._sizes[chunk] = self.seals[chunk].size
            self._log([self.seals[chunk]])

    def files(self) -> dict[str, dict[str, int]]:
        """Name -> bytes and crc32 of every chunk; all of them are sealed."""
        self.seal()
        facts: dict[str, dict[str, int]] = {}
        for chunk in sorted(self._sizes):
            path = chunk_path(self.folder, chunk)
            if chunk not in self.seals:
                self.seals[chunk] = Seal(chunk, path.stat().st_size, crc32_of(path))
            facts[path.name] = {"bytes": self.seals[chunk].size, "crc32": self.seals[chunk].crc}
        return facts
