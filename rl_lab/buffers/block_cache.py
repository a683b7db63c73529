"""Blocks of rows in memory, up to a number of bytes: those read last, and those written back last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.row_layout import Bytes

Key = tuple[int, int]  # episode, block
OVERHEAD = 512  # bytes of a block's entry in the dictionary
COLUMN_OVERHEAD = 320  # bytes of a column's two array objects


class BlockCache:
    """The blocks that were used last."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
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
        while self.nbytes > self.most_bytes:
            self.remove(next(iter(self._blocks)))

    def remove(self, key: Key) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.nbytes -= size_of(block)

    def keep_only(self, episodes: set[int]) -> None:
        """Forget all other episodes."""
        for key in [key for key in self._blocks if key[0] not in episodes]:
            self.remove(key)

    def clear(self) -> None:
        self._blocks.clear()
        self.nbytes = 0


class WrittenBlocks(BlockCache):
    """Columns that were written back to rows on disk, which themselves never change.

    When they take more than their bytes, the ones written longest ago are forgotten: their rows are then again as
    they were stored.
    """

    def get(self, key: Key) -> Bytes | None:
        return self._blocks.get(key)  # reading does not make it newer

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
    """Bytes of memory, with what Python needs to keep a block of short rows: often more than the rows."""
    return OVERHEAD + sum(COLUMN_OVERHEAD + value.nbytes for value in block.values())
