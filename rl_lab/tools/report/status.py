"""What a run is doing now: running, finished, stopped or crashed, how far it is, and the time left."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rl_lab.errors import CheckpointError, LabError
from rl_lab.orchestration.run_log import DONE, ENDED_EARLY, SECONDS_LEFT
from rl_lab.run_folder import RunFolder
from rl_lab.utils.checkpoint.manifest import read_manifest
from rl_lab.utils.files import is_locked
from rl_lab.utils.untrusted import open_regular

State = Literal["running", "finished", "stopped", "crashed"]
TAIL = 1 << 17  # bytes of metrics.jsonl that are read: the last lines
LARGEST_ERROR = 1 << 16  # bytes of error.txt that are read, from the end
FAILED = "the run failed"  # title of an error in error.txt that ended the run
SLACK_S = 60.0  # between the last log line and the error that ended the run


@dataclass(frozen=True)
class Status:
    """What the live page shows of a run. None: unknown."""

    state: State
    progress: float | None = None  # 0 to 1
    left: float | None = None  # seconds
    age: float | None = None  # seconds since the last log line
    phase: str = ""
    note: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def run_status(folder: RunFolder, total_steps: int | None, now: float | None = None) -> Status:
    """Look at the lock, the last log lines, error.txt and the checkpoints of a run.

    total_steps: at which it ends, from its config
    """
    now = time.time() if now is None else now
    rows = last_rows(folder.metrics)
    last = rows[-1] if rows else {}
    step = _number(last.get("step"))
    share, left = _number(last.get(DONE)), _number(last.get(SECONDS_LEFT))
    if share is None and step is not None and total_steps:
        share = min(1.0, step / total_steps)
        left = _extrapolate(rows, total_steps)
    at = _number(last.get("time"))
    age = None if at is None else max(0.0, now - at)
    if is_locked(folder.path):
        shown = None if left is None or age is None else max(0.0, left - age)
        return Status("running", share, shown, age, note="" if rows else "no log line yet")
    if last.get(ENDED_EARLY):
        return Status("finished", 1.0, None, age, note="ended early, by training.stop_when or a callback")
    if _ended(last, step, total_steps):
        return Status("finished", 1.0, None, age)
    failure = last_failure(folder.path / "error.txt", at)
    if failure:
        return Status("crashed", share, None, age, note=failure)
    if step is not None and _saved_step(folder) < step:
        return Status("crashed", share, None, age, note="it ended without saving")
    return Status("stopped", share, None, age, note="continue with rl-lab resume")


def last_rows(file: Path) -> list[dict[str, Any]]:
    """Return the last log lines; an incomplete one, and a missing file, have none."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - TAIL))
            lines = stream.read(TAIL).splitlines()
    except (OSError, LabError):
        return []
    rows = []
    for line in lines[1:] if size > TAIL else lines:
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    return rows


def last_failure(file: Path, since: float | None) -> str:
    """Return the last line of the traceback that ended the run; "" if none was written after the last log line."""
    try:
        if since is not None and file.stat().st_mtime < since - SLACK_S:
            return ""
        with open_regular(file) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - LARGEST_ERROR))
            text = stream.read(LARGEST_ERROR).decode("utf-8", errors="replace")
    except (OSError, LabError):
        return ""
    title, _, rest = text.rpartition("\n--- ")[2].partition("\n")
    if not title.endswith(FAILED):
        return ""
    lines = [line for line in rest.splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else FAILED


def _ended(last: Mapping[str, Any], step: float | None, total_steps: int | None) -> bool:
    if total_steps:
        return step is not None and step >= total_steps
    return (_number(last.get("workflow/phase_progress")) or 0.0) >= 1.0


def _extrapolate(rows: list[dict[str, Any]], total_steps: int) -> float | None:
    """Return the seconds that the steps to come will take at the rate of the last lines."""
    points = [(_number(row.get("step")), _number(row.get("time"))) for row in rows]
    known = [(step, at) for step, at in points if step is not None and at is not None]
    if len(known) < 2:
        return None
    (begun, early), (step, late) = known[max(0, len(known) - 20)], known[-1]
    return None if step <= begun or late <= early else (total_steps - step) * (late - early) / (step - begun)


def _saved_step(folder: RunFolder) -> float:
    """Return the step of the newest checkpoint; -1 if there is none."""
    newest = -1.0
    for file in folder.checkpoints.glob("*.json"):
        with contextlib.suppress(OSError, CheckpointError, LabError, KeyError, TypeError, ValueError):
            newest = max(newest, float(read_manifest(file)["step"]))
    return newest


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if usable else None
