"""EpisodeStore: append-only episode files of a folder, deleted oldest first, readable after a crash.

    layout.json              columns of a row, rows of a block
    index.log                one record for each episode; see table.py
    chunk-00000000.episodes  compressed episodes, a few dozen megabytes per file

An episode is appended first to its chunk and then to the index. Written bytes never change. A complete chunk
is sealed: it is flushed to disk with fsync, and its checksum is added to the index.
"""

from __future__ import annotations

import errno
import os
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

from rl_lab.buffers.chunk_files import LostFile
from rl_lab.buffers.episodes.recovery import (
    CODEC_NUMBERS,
    INDEX,
    BlockLocation,
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
from rl_lab.buffers.episodes.table import (
    DroppedEpisode,
    EpisodeRecord,
    EpisodeTable,
    FirstKept,
    Record,
    Seal,
    pack,
)
from rl_lab.buffers.ring import differences
from rl_lab.buffers.row_layout import LAYOUT, Bytes, RowLayout, read_layout, write_layout
from rl_lab.errors import ConfigError, LabError
from rl_lab.utils.files import RunLock, crc32_of, free_bytes, sync_folder, write_atomic
from rl_lab.utils.stopping import STOP

FULL = (errno.ENOSPC, errno.EDQUOT)
ROOM_TIMEOUT_S = 60.0  # to wait for space on a full disk
ROOM_POLL_S = 0.5

SPARE_RECORDS = 4096  # outdated records that the index may have before it is rewritten


class EpisodeStore:
    """The files of one folder. One process may write to a folder; any number may read it.

    capacity:    maximum rows of finished episodes; None: no limit
    max_bytes:   maximum size of all chunk files; None: no limit
    chunk_bytes: maximum size of one chunk
    index:       read this index file instead of index.log
    fresh:       ignore the episodes in the folder; they are deleted when the first new episode is written
    report:      receives messages about repairs and lost episodes
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
        report: Callable[[str], None] = print,
    ) -> None:
        self.folder = folder
        self.read_only = read_only
        self.capacity, self.max_bytes = capacity, max_bytes
        self.chunk_bytes = chunk_bytes if max_bytes is None else min(chunk_bytes, max(1, max_bytes // 8))
        self.compression = choose_compression(compression)
        self._compress = compressor(self.compression)
        self._report = report
        self._lock: RunLock | None = None
        self._index: FileIO | None = None
        self._chunk: FileIO | None = None  # the chunk that is being written
        self._chunk_crc = 0
        if not read_only:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be created ({error}); set another folder") from None
            self._lock = RunLock(folder).acquire()
        self.has_stale_files = fresh
        self.layout = self._check_layout(layout)
        self._reader = ChunkReader(folder, threads)
        self.lost: list[LostFile] = []
        self.load(Recovered(EpisodeTable()) if fresh else recover(folder, index=index, verify=verify))

    def _check_layout(self, wanted: RowLayout) -> RowLayout:
        """Return the layout of the folder; a writer creates it if it is missing."""
        if self.read_only:
            return wanted
        if self.has_stale_files or not (self.folder / LAYOUT).exists():
            write_layout(self.folder, wanted)
            return wanted
        there = read_layout(self.folder)
        differ = differences(wanted.columns, there.columns)
        if wanted.action and there.action and wanted.action != there.action:
            differ = [
                *differ,
                f"actions are {wanted.action} in this run and {there.action} in the stored data",
            ]
        if differ:
            raise ConfigError(
                f"{self.folder} has episodes with other columns or actions ({'; '.join(differ)}); use another folder"
            )
        return there

    # ---------------------------------------------------------------- opening

    def load(self, found: Recovered, *, quiet: bool = False) -> None:
        """Use the recovered contents of the folder; a writer also removes unused files."""
        self.table, self.seals, self.lost = found.table, found.seals, found.lost
        for note in [] if quiet else [*found.notes, *(f"{lost}: lost" for lost in found.lost)]:
            self._report(f"episodes: {note}")
        files = chunk_files(self.folder)
        self.next_chunk = max([-1, *files, *self.seals]) + 1
        self._sizes = {} if self.has_stale_files else {n: path.stat().st_size for n, path in files.items()}
        self._chunk_size = 0
        if not self.read_only and not self.has_stale_files:
            self._clean_up(found, files)

    def _clean_up(self, found: Recovered, files: dict[int, Path]) -> None:
        rows, chunks = self.table.column("rows"), self.table.column("chunk")
        used = set(chunks[rows > 0].tolist())
        damaged = set(chunks[(rows == 0) & (self.table.column("size") > 0)].tolist())
        sealed = []
        for chunk, path in files.items():
            if chunk not in used:
                if chunk in damaged:  # keep it for a manual repair
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
        if found.index_is_complete and not found.lost and found.index_records:
            self._index = FileIO(self.folder / INDEX, "r+")
            self._index_size, self._index_records = found.index_size, found.index_records
            self._log(sealed)
        else:
            self._rewrite_index()
        self._enforce_limits()

    def close(self) -> None:
        """Seal the current chunk, close all files and release the lock."""
        self.seal()
        self.stop_writing()
        self._reader.close()
        if self._lock is not None:
            self._lock.release()

    def stop_writing(self) -> None:
        """Close the files without sealing the current chunk."""
        for file in (self._chunk, self._index):
            if file is not None:
                file.close()
        self._chunk = self._index = None
        for chunk in list(self._sizes):
            self._reader.close_file(chunk)

    # ---------------------------------------------------------------- writing

    def append(
        self, rows: Bytes, count: int, *, stream: int, start: int, flags: int, total_reward: float
    ) -> int:
        """Store an episode, enforce the limits and return its number. rows: column -> (count, bytes)"""
        if self.has_stale_files:
            self.delete_stale_files()
        step = self.layout.block_rows
        blocks = [
            self._compress(self.layout.pack(rows, k, min(k + step, count))) for k in range(0, count, step)
        ]
        episode = EpisodeRecord(
            number=self.table.end,
            chunk=self.next_chunk - 1,
            offset=self._chunk_size,
            stream=stream,
            start=start,
            rows=count,
            flags=flags,
            codec=CODEC_NUMBERS[self.compression],
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
        self._enforce_limits()
        return episode.number

    def delete_stale_files(self) -> None:
        """Delete the episodes of earlier runs (see `fresh`)."""
        for path in chunk_files(self.folder).values():
            path.unlink()
        self.has_stale_files = False
        self._rewrite_index()

    def seal(self) -> None:
        """Finish the current chunk and flush it to disk; the next episode starts a new chunk."""
        if self._chunk is None:
            return
        number = self.next_chunk - 1
        try:
            os.fsync(self._chunk.fileno())
            self._chunk.close()
        except OSError as error:
            raise self._write_error(error) from error
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
            raise self._write_error(error) from error
        self.next_chunk += 1
        self._chunk_size = self._chunk_crc = 0

    def _log(self, records: Iterable[Record]) -> None:
        assert self._index is not None
        packed = [pack(record) for record in records]
        self._write(self._index, b"".join(packed), self._index_size)
        self._index_size += sum(map(len, packed))
        self._index_records += len(packed)

    def _write(self, file: FileIO, data: bytes, size: int) -> None:
        """Append all data; on an error, truncate the file to its previous `size` bytes.

        On a full disk it is tried again for a while: other programs may free space.
        """
        waited = 0.0
        while True:
            rest = memoryview(data)
            try:
                file.seek(size)
                while rest:
                    rest = rest[file.write(rest) or 0 :]
                return
            except OSError as error:
                file.truncate(size)
                if error.errno not in FULL or waited >= ROOM_TIMEOUT_S or STOP.since is not None:
                    raise self._write_error(error) from error
                if not waited:
                    warnings.warn(
                        f"{self.folder}: the disk is full; waiting up to {ROOM_TIMEOUT_S:g} s for space",
                        stacklevel=2,
                    )
                waited += ROOM_POLL_S
                time.sleep(ROOM_POLL_S)

    def _write_error(self, error: OSError) -> LabError:
        return LabError(
            f"{self.folder} cannot be written ({error.strerror}, {free_bytes(self.folder) / 1e9:.2f} GB free); free some "
            "space and resume from the last checkpoint, or set max_bytes or another folder"
        )

    # ---------------------------------------------------------------- limits

    @property
    def disk_bytes(self) -> int:
        """Size of all chunk files."""
        return sum(self._sizes.values())

    def _enforce_limits(self) -> None:
        """Evict the oldest episodes until the limits hold; a chunk is deleted with its last episode.

        `max_bytes` is compared with the bytes of the kept episodes plus one chunk, because the oldest chunk
        may be partly unused. So the files stay below `max_bytes`, and chunk boundaries do not affect which
        episodes are evicted.
        """
        table, first = self.table, self.table.first
        most = None if self.max_bytes is None else self.max_bytes - self.chunk_bytes
        while table.episodes > 1 and (
            (self.capacity is not None and table.rows > self.capacity)
            or (most is not None and (table.size > most or self.disk_bytes > (self.max_bytes or 0)))
        ):
            table.evict_oldest()
            self._delete_unused()
        if table.first > first:
            self._log([FirstKept(table.first)])
            if self._index_records > 2 * table.episodes + SPARE_RECORDS:
                self._rewrite_index()

    def _delete_unused(self) -> None:
        oldest = self.table.oldest_chunk()
        for chunk in [chunk for chunk in self._sizes if chunk < oldest]:
            # Logged before the deletion, so that a missing chunk counts as evicted.
            self._log([FirstKept(self.table.first)])
            self._reader.close_file(chunk)
            chunk_path(self.folder, chunk).unlink(missing_ok=True)
            self._sizes.pop(chunk)
            self.seals.pop(chunk, None)

    def write_index(self, path: Path) -> tuple[int, int]:
        """Write an index without outdated records; return its bytes and crc32."""
        records: list[Record] = [FirstKept(self.table.first), *self.seals.values()]
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
            raise self._write_error(error) from error
        self._index_records = self.table.episodes

    # ---------------------------------------------------------------- reading

    def read(self, wanted: Iterable[tuple[int, int]]) -> list[Bytes]:
        """Return blocks given by (episode, block); DamagedBlock if a file is damaged."""
        layout, table = self.layout, self.table
        blocks, counts = [], []
        for number, index in wanted:
            offset, size, crc = table.block(number, index)
            counts.append(layout.rows_in(index, table.fact(number, "rows")))
            raw = counts[-1] * layout.row_bytes
            blocks.append(
                BlockLocation(
                    table.fact(number, "chunk"), offset, size, crc, table.fact(number, "codec"), raw
                )
            )
        return [layout.unpack(data, count) for data, count in zip(self._reader.read(blocks), counts)]

    def drop_damaged(self, damage: DamagedBlock) -> LostFile:
        """Check all blocks of a damaged chunk and remove its damaged episodes."""
        before, found = self.table.episodes, list[LostFile]()
        numbers = self.table.in_chunk(damage.chunk)
        check_chunks(self.folder, self.table, [damage.chunk], found)
        if (
            self.table.episodes == before
        ):  # the check found no damage, but the chunk is unreliable: drop it all
            rows = int(self.table.column("rows")[numbers - self.table.first].sum())
            self.table.drop(set(numbers.tolist()))
            found.append(
                LostFile(str(chunk_path(self.folder, damage.chunk)), rows, damage.reason, len(numbers))
            )
        self._reader.close_file(damage.chunk)
        if not self.read_only:
            dropped = [n for n in numbers.tolist() if not self.table.fact(n, "rows")]
            self._log([DroppedEpisode(number) for number in dropped])
            self.reseal(damage.chunk)
        self.lost += found
        self._report(f"episodes: {found[0]}: lost; the other episodes are used")
        return found[0]

    def drop(self, numbers: Sequence[int]) -> None:
        """Remove episodes; their numbers are not used again."""
        self.table.drop(set(numbers))
        self._log([DroppedEpisode(number) for number in numbers])

    def reseal(self, chunk: int) -> None:
        """Seal a damaged chunk again with its current size and checksum; its intact episodes are used."""
        path = chunk_path(self.folder, chunk)
        if path.exists() and chunk in self.seals:
            self.seals[chunk] = Seal(chunk, path.stat().st_size, crc32_of(path))
            self._sizes[chunk] = self.seals[chunk].size
            self._log([self.seals[chunk]])

    def files(self) -> dict[str, dict[str, int]]:
        """Seal all chunks and return name -> bytes and crc32."""
        self.seal()
        facts: dict[str, dict[str, int]] = {}
        for chunk in sorted(self._sizes):
            path = chunk_path(self.folder, chunk)
            if chunk not in self.seals:
                self.seals[chunk] = Seal(chunk, path.stat().st_size, crc32_of(path))
            facts[path.name] = {"bytes": self.seals[chunk].size, "crc32": self.seals[chunk].crc}
        return facts
