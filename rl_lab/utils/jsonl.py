"""One JSON object per line, and numbers that JSON has no words for.

JSON has no NaN and no infinities. They are written as the strings "NaN", "Infinity" and "-Infinity", which
`float()` reads back and every JSON parser accepts; `read_jsonl` turns them into floats again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def json_safe(value: Any) -> Any:
    """The value as strict JSON can hold it: numpy and 0-d tensors as numbers, NaN and infinities as strings."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(item) for item in value]
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
        if isinstance(value, bool):
            return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return str(value)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a file; a torn last line and lines that are not objects are left out."""
    rows = []
    with open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict) and line.endswith(b"\n"):
                    rows.append({key: _number(value) for key, value in row.items()})
    return rows


def _number(value: Any) -> Any:
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


class JsonlWriter:
    """Appends lines to a file; each is handed to the system at once, so a killed process loses none.

    resume_bytes: cut the file to this length first, what a checkpoint says it had; 0 starts over. None goes
    on at the end. A torn last line is always cut off.
    """

    def __init__(self, path: Path, *, resume_bytes: int | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - stays open for the life of the writer
        self._size = self._cut(resume_bytes)
        self._complained = False

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. A disk that is full costs the line and a warning, not the run."""
        line = json.dumps(json_safe(row), allow_nan=False).encode() + b"\n"
        try:
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) :]
            self._size += len(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # never leave half a line before the next one
            if not self._complained:
                warnings.warn(
                    f"{self.path} could not be written ({error}): lines are lost until it can", stacklevel=2
                )
                self._complained = True

    def size(self) -> int:
        """Bytes written so far, made durable first: for a checkpoint's manifest."""
        if not self._file.closed:
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
        return self._size

    def close(self) -> None:
        self._file.close()

    def _cut(self, resume_bytes: int | None) -> int:
        size = os.fstat(self._file.fileno()).st_size
        if resume_bytes is not None and resume_bytes > size > 0:  # 0: the checkpoint is another run's
            warnings.warn(
                f"{self.path} has {size} bytes where the checkpoint saw {resume_bytes}: the lines between are lost",
                stacklevel=3,
            )
        end = size if resume_bytes is None else min(size, resume_bytes)
        end = self._end_of_last_line(end)
        if end != size:
            self._file.truncate(end)
        return end

    def _end_of_last_line(self, end: int) -> int:
        block = 1 << 16
        while end > 0:
            begin = max(0, end - block)
            newline = os.pread(self._file.fileno(), end - begin, begin).rfind(b"\n")
            if newline >= 0:
                return begin + newline + 1
            end = begin
        return 0
