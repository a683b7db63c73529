"""What the live page says of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_lab.run_folder import RunFolder
from rl_lab.tools.report.status import last_rows, run_status
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION, write_manifest
from rl_lab.utils.files import RunLock, is_locked

MakeRun = Callable[..., Path]


def write_lines(run: Path, *lines: dict[str, Any]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_checkpoint(run: Path, step: int) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    state = {"file": f"step_{step:09d}.pt", "bytes": 1, "crc32": 0}
    manifest = {"version": CHECKPOINT_VERSION, "step": step, "kind": "full", "state": state}
    manifest |= {"buffers": {}, "info": {}}
    write_manifest(run / "checkpoints" / f"step_{step:09d}.json", manifest)


def test_running_with_time_left(make_run: MakeRun) -> None:
    run = make_run(lines=2, media=False)
    now = 1000.0
    write_lines(run, {"step": 100, "time": 900.0}, {"step": 300, "time": 980.0}, {"step": 500, "time": 990.0})
    with RunLock(run):
        assert is_locked(run)
        status = run_status(RunFolder(run), 1000, now)
        assert (status.state, status.progress, status.age) == ("running", 0.5, 10.0)
        # 400 steps took 90 s, so 500 take 112.5; 10 s of them are over.
        assert status.left == pytest.approx(102.5)
        (run / "metrics.jsonl").unlink()
        assert run_status(RunFolder(run), 1000, now).note == "no log line yet"
    assert not is_locked(run) and not is_locked(run / "nowhere")


def test_phases_log_their_own_share(make_run: MakeRun) -> None:
    run = make_run(lines=2, media=False)
    write_lines(run, {"step": 5, "time": 10.0, "time/run_done": 0.25, "time/seconds_left": 60.0})
    with RunLock(run):
        status = run_status(RunFolder(run), None, 12.0)
    assert (status.progress, status.left) == (0.25, 58.0)


def test_finished(make_run: MakeRun) -> None:
    run = make_run(lines=2, media=False)
    write_lines(run, {"step": 1000, "time": 10.0})
    assert run_status(RunFolder(run), 1000).state == "finished"
    write_lines(run, {"step": 5, "time": 10.0, "workflow/phase_progress": 1.0})
    assert run_status(RunFolder(run), None).state == "finished"


def test_stopped_or_killed(make_run: MakeRun) -> None:
    run = make_run(lines=2, media=False)
    write_lines(run, {"step": 500, "time": 10.0})
    write_checkpoint(run, 400)
    status = run_status(RunFolder(run), 1000)
    assert (status.state, status.note) == ("crashed", "it ended without saving")
    write_checkpoint(run, 500)
    assert run_status(RunFolder(run), 1000).state == "stopped"


def test_crashed_says_why(make_run: MakeRun) -> None:
    run = make_run(lines=2, media=False)
    write_lines(run, {"step": 500, "time": time.time()})
    write_checkpoint(run, 500)
    try:
        raise ValueError("the reward is not a number")
    except ValueError as error:
        file = RunFolder(run).write_error("report failed at step 3", error)
        assert run_status(RunFolder(run), 1000).state == "stopped", "a side job does not end a run"
        RunFolder(run).write_error("the run failed", error)
    status = run_status(RunFolder(run), 1000)
    assert (status.state, status.note) == ("crashed", "ValueError: the reward is not a number")
    os.utime(file, (1, 1))  # an error before the run was resumed
    assert run_status(RunFolder(run), 1000).state == "stopped"


def test_last_rows_of_odd_files(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert last_rows(file) == [] and last_rows(tmp_path) == []
    file.write_text('{"step": 1}\n[2]\n{"step": 3}\n{"ste')
    assert last_rows(file) == [{"step": 1}, {"step": 3}]
    file.write_text("".join(f'{{"step": {i}, "text": "{"x" * 1000}"}}\n' for i in range(1000)))
    rows = last_rows(file)
    assert rows[-1]["step"] == 999 and 100 < len(rows) < 200
