"""EpisodeReader: copies drawn sequences into batches through a cache of blocks, and writes columns back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rl_lab.buffers.episodes.samplers import Episodes
from rl_lab.buffers.episodes.store import EpisodeStore
from rl_lab.buffers.row_layout import Bytes, RowLayout
from rl_lab.records import ArraySpec, Batch, BatchSpec, RowIndex

Key = tuple[int, int]  # episode, block


class Piece(NamedTuple):
    """Consecutive rows of one episode and their place in a batch."""

    sequence: int
    time: int
    episode: int
    row: int
    rows: int


class EpisodeReader:
    """Reads rows of episodes, from the cache if possible.

    columns: of the batches; those not stored with the same shape and dtype are zero until they are written
    mutable: columns that may be written back
    """

    def __init__(
        self,
        store: EpisodeStore,
        episodes: Episodes,
        cache: BlockCache,
        written: WrittenBlocks,
        columns: Mapping[str, ArraySpec],
        mutable: Sequence[str],
    ) -> None:
        self._store, self._episodes = store, episodes
        self._cache, self._written = cache, written
        self._mutable = list(mutable)
        self._layout = store.layout
        self._wanted = RowLayout(columns, store.layout.block_rows)
        self._absent = {name for name, spec in columns.items() if store.layout.columns.get(name) != spec}

    def fill(self, out: Batch, spec: BatchSpec, episode: np.ndarray, begin: np.ndarray) -> None:
        """Copy the sequences that start at rows `begin` (B,) of episodes (B,) into a batch on the host."""
        assert out.index is not None
        columns = {name: _bytes(value, 2) for name, value in out.columns.items()}
        streams, positions = out.index.stream.numpy(), out.index.position.numpy()
        mask = None if out.mask is None else out.mask.numpy()
        pieces: list[Piece] = []
        facts = [each.tolist() for each in self._episodes.facts_of(episode)]
        for sequence, (number, first, stream, start, rows) in enumerate(
            zip(episode.tolist(), begin.tolist(), *facts)
        ):
            streams[sequence], positions[sequence] = stream, start + first
            low = time = max(0, -first)
            row = first + time
            while time < spec.rows:
                if row >= rows:
                    if spec.boundary != "cross":
                        break
                    number, start, rows = self._following(stream, start + rows)
                    row = 0
                count = min(spec.rows - time, rows - row)
                pieces.append(Piece(sequence, time, number, row, count))
                time, row = time + count, row + count
            if mask is not None:
                mask[sequence] = False
                mask[sequence, low:time] = True
                for value in columns.values():
                    value[sequence, :low] = 0
                    value[sequence, time:] = 0
        blocks = self._blocks(pieces)
        for piece in pieces:
            for at, count, source, offset in self._sources(piece, blocks):
                for name, value in columns.items():
                    stored = source.get(name)
                    value[piece.sequence, at : at + count] = (
                        0 if stored is None else stored[offset : offset + count]
                    )

    def _following(self, stream: int, position: int) -> tuple[int, int, int]:
        """Return number, start and rows of the episode that begins at a position."""
        episode = self._episodes.at(stream, position)
        assert episode is not None, "the sampler drew a sequence that is not stored"
        return episode, *self._episodes.facts(episode)[1:]

    def _blocks(self, pieces: Sequence[Piece]) -> dict[Key, Bytes]:
        """Return all blocks of the stored pieces; blocks that are not cached are read together."""
        step = self._layout.block_rows
        blocks: dict[Key, Bytes] = {}
        missing: list[Key] = []
        for piece in pieces:
            if piece.episode < 0:
                continue
            for block in range(piece.row // step, (piece.row + piece.rows - 1) // step + 1):
                key = (piece.episode, block)
                if key in blocks:
                    continue
                found = self._cache.get(key)
                blocks[key] = {} if found is None else found
                if found is None:
                    missing.append(key)
        for key, content in zip(missing, self._store.read(missing)):
            for name in self._absent:
                content.pop(name, None)
            blocks[key] = content
            self._cache.put(key, content)
        return blocks

    def _sources(self, piece: Piece, blocks: Mapping[Key, Bytes]) -> Iterator[tuple[int, int, Bytes, int]]:
        """Yield time in the batch, number of rows, block, and first row in it, for each block of a piece."""
        if piece.episode < 0:
            stream, start, _ = self._episodes.facts(piece.episode)
            first = start + piece.row
            rows = self._episodes.unfinished.read(stream, first, first + piece.rows)
            yield piece.time, piece.rows, rows, 0
            return
        step, row, end = self._layout.block_rows, piece.row, piece.row + piece.rows
        while row < end:
            block = row // step
            count = min(end, (block + 1) * step) - row
            key = (piece.episode, block)
            changed = self._written.get(key)
            content = blocks[key] if changed is None else {**blocks[key], **changed}
            yield piece.time + row - piece.row, count, content, row - block * step
            row += count

    def write(self, index: RowIndex, columns: Mapping[str, torch.Tensor], offset: int) -> None:
        """Write mutable columns (B, L, …) to rows offset … of each sequence. All tensors are on the host."""
        values = {name: self._wanted.as_bytes(name, value, 2) for name, value in columns.items()}
        length = next(iter(values.values())).shape[1]
        mask: Any = getattr(index, "mask", None)
        for sequence, (stream, position) in enumerate(zip(index.stream.tolist(), index.position.tolist())):
            time = 0
            while time < length:
                at = position + offset + time
                real = mask is None or bool(mask[sequence, offset + time])
                episode = self._episodes.at(stream, at) if real else None
                if episode is None:
                    time += 1
                    continue
                _, start, rows = self._episodes.facts(episode)
                count = min(length - time, start + rows - at)
                if mask is not None:  # padding begins at the end of the episode or earlier
                    count = min(count, int(mask[sequence, offset + time : offset + length].sum()))
                piece = {name: value[sequence, time : time + count] for name, value in values.items()}
                self._write_piece(episode, at - start, count, piece)
                time += count

    def _write_piece(self, episode: int, row: int, count: int, values: Bytes) -> None:
        if episode < 0:
            stream, start, _ = self._episodes.facts(episode)
            self._episodes.unfinished.write(stream, start + row, values)
            return
        step, done = self._layout.block_rows, 0
        while done < count:
            block = (row + done) // step
            low = row + done - block * step
            here = min(count - done, step - low)
            content = self._mutable_block((episode, block))
            for name, value in values.items():
                content[name][low : low + here] = value[done : done + here]
            self._written.put((episode, block), content)
            done += here

    def _mutable_block(self, key: Key) -> Bytes:
        """Return a writable copy of the mutable columns of a block with their current values."""
        content = self._written.get(key)
        if content is not None:
            return content
        block = self._blocks([Piece(0, 0, key[0], key[1] * self._layout.block_rows, 1)])[key]
        rows = len(next(iter(block.values())))
        return {
            name: block[name].copy()
            if name in block
            else np.zeros((rows, self._wanted.widths[name]), np.uint8)
            for name in self._mutable
        }


def _bytes(tensor: torch.Tensor, lead: int) -> np.ndarray:
    """View the memory of a contiguous tensor as (lead dimensions …, bytes)."""
    return tensor.view(*tensor.shape[:lead], -1).view(torch.uint8).numpy()


# --- Caches -------------------------------------------------------------------------------------


OVERHEAD = 512  # bytes of a block's dict entry
COLUMN_OVERHEAD = 320  # bytes of a column's two array objects


class BlockCache:
    """LRU cache of blocks, with a maximum size in bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self._blocks: OrderedDict[Key, Bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._blocks)

    def get(self, key: Key) -> Bytes | None:
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def put(self, key: Key, block: Bytes) -> None:
        self.remove(key)
        self._blocks[key] = block
        self.nbytes += size_of(block)
        while self.nbytes > self.max_bytes:
            self.remove(next(iter(self._blocks)))

    def remove(self, key: Key) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.nbytes -= size_of(block)

    def keep_only(self, episodes: set[int]) -> None:
        """Remove the blocks of all other episodes."""
        for key in [key for key in self._blocks if key[0] not in episodes]:
            self.remove(key)

    def clear(self) -> None:
        self._blocks.clear()
        self.nbytes = 0


class WrittenBlocks(BlockCache):
    """Columns that were written back to rows on disk; the files never change.

    If they exceed the maximum size, the oldest writes are discarded: their rows get their stored values
    again.
    """

    def get(self, key: Key) -> Bytes | None:
        return self._blocks.get(key)  # a read does not change the order

    def get_state(self) -> dict[str, Any]:
        keys = torch.tensor(list(self._blocks), dtype=torch.int64).reshape(-1, 2)
        names = list(next(iter(self._blocks.values()), {}))
        rows = [len(next(iter(block.values()))) for block in self._blocks.values()]
        joined = {name: np.concatenate([b[name] for b in self._blocks.values()]) for name in names}
        columns = {name: torch.from_numpy(value) for name, value in joined.items()}
        return {"keys": keys, "rows": torch.tensor(rows, dtype=torch.int64), "columns": columns}

    def set_state(self, state: dict[str, Any]) -> None:
        self.clear()
        done = 0
        for key, count in zip(state["keys"].tolist(), state["rows"].tolist()):
            columns = state["columns"].items()
            block = {name: value[done : done + count].numpy().copy() for name, value in columns}
            self.put((key[0], key[1]), block)
            done += count


def size_of(block: Bytes) -> int:
    """Return the memory of a block, including the Python objects, which are often larger than short rows."""
    return OVERHEAD + sum(COLUMN_OVERHEAD + value.nbytes for value in block.values())
