from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.utils.files import crc32_of, write_atomic


class ChunkBuffer:
    """A fake buffer: complete chunks of ten rows are written once, other rows under a new name each time."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.saves = 0
        self.facts: dict[Path, dict[str, int]] = {}  # of files written or restored, as they were then

    def fill(self, count: int) -> ChunkBuffer:
        self.rows += range(len(self.rows), len(self.rows) + count)
        return self

    def checkpoint(self, folder: Path) -> dict[str, Any]:
        self.saves += 1
        names = {f"chunk_{i}.json": self.rows[10 * i : 10 * i + 10] for i in range(len(self.rows) // 10)}
        names[f"tail_{self.saves}.json"] = self.rows[len(self.rows) // 10 * 10 :]
        for name, rows in names.items():
            path = folder / name
            if name.startswith("tail") or not path.exists():
                size, crc = write_atomic(path, lambda file, rows=rows: file.write(json.dumps(rows).encode()))
                self.facts[path] = {"bytes": size, "crc32": crc}
            elif path not in self.facts:
                self.facts[path] = {"bytes": path.stat().st_size, "crc32": crc32_of(path)}
        files = {name: self.facts[folder / name] for name in names}
        return {"files": files, "meta": {"saves": self.saves}}

    def restore(self, folder: Path, entry: dict[str, Any]) -> None:
        self.rows = [row for name in entry["files"] for row in json.loads((folder / name).read_bytes())]
        self.saves = entry["meta"]["saves"]


@pytest.fixture
def chunk_buffer() -> type[ChunkBuffer]:
    return ChunkBuffer


@pytest.fixture
def subprocess_env() -> dict[str, str]:
    """The environment of a process that shall find this rl_lab, from any folder."""
    return {**os.environ, "PYTHONPATH": str(Path(rl_lab.__file__).parents[1])}
