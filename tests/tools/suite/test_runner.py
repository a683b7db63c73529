"""The loop of `rl-lab suite` with stand-in runs: limits, failures, stops, kills, and two machines on one folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rl_lab.errors import ConfigError
from rl_lab.launch.pack import Gpu
from rl_lab.tools.suite.definition import Needs
from rl_lab.tools.suite.results import SuiteFolder
from rl_lab.tools.suite.runner import Machine
from tests.tools.suite.suite_case import make_runner, make_suite

ROOT = Path(__file__).resolve().parents[3]
H200 = Gpu("0", "NVIDIA H200", 139.0)


def result(folder: Path, name: str) -> dict:
    found = SuiteFolder(folder).read(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("needs", "machine", "at_once"),
    [
        (Needs(15, 4, 5, 1), Machine([H200], 16, 126.0), 15),  # as many as the suite allows
        (Needs(30, 4, 5, 1), Machine([H200], 16, 126.0), 16),  # cores
        (Needs(30, 4, 10, 1), Machine([H200], 16, 126.0), 12),  # memory
        (Needs(30, 16, 5, 1), Machine([H200], 64, 900.0), 7),  # 0.9 × 139 / 16
        (Needs(30, 4, 5, 1), Machine([H200, H200], 16, 126.0), 8),  # on each of two GPUs
        (Needs(4, 200, 500, 64), Machine([H200], 16, 126.0), 1),  # never none
        (Needs(4, 8, 6, 1), Machine([], 2, 24.0), 2),  # no GPU
    ],
)
def test_runs_that_fit(needs: Needs, machine: Machine, at_once: int):
    assert machine.share(needs) == pytest.approx(1.0 / at_once)
    assert machine.share(needs, at_once=3) == pytest.approx(1.0 / 3)


def test_everything_is_run_once(tmp_path: Path):
    suite = make_suite(["a", "b"])
    runner, lines = make_runner(suite, tmp_path, at_once=2, commit="abc")
    summary = runner.run()
    assert sorted(summary.finished) == [run.name for run in suite.runs()] and not summary.failed
    assert "4 of 4 runs to do, at most 2 at a time on 4 cores, no GPU" in lines[0]
    one = result(tmp_path, "m.a.seed2")
    assert (one["status"], one["score"], one["frames"], one["commit"]) == ("done", 102.0, 1000, "abc")
    assert one["segments"][0]["seconds"] > 0.1
    again, lines = make_runner(suite, tmp_path)
    assert again.run().finished == [] and "0 of 4 runs to do" in lines[0] and len(lines) == 1
    events = [json.loads(line)["event"] for line in (tmp_path / "suite.jsonl").read_text().splitlines()]
    assert events.count("started") == events.count("done") == 4


def test_failed_run_does_not_stop_the_others(tmp_path: Path):
    runner, lines = make_runner(make_suite(["bad", "a"], [1]), tmp_path, at_once=1)
    summary = runner.run()
    assert summary.failed == {"m.bad.seed1": "environment.task is bad"} and summary.finished == ["m.a.seed1"]
    assert any("failed m.bad.seed1 at 0 frames: environment.task is bad" in line for line in lines)
    assert result(tmp_path, "m.bad.seed1")["status"] == "failed"


def test_run_that_dies_is_continued_once(tmp_path: Path):
    runner, lines = make_runner(make_suite(["dies"], [1]), tmp_path)
    summary = runner.run()
    assert summary.finished == ["m.dies.seed1"] and not summary.failed
    assert any("ended by SIGKILL; it is tried once more" in line for line in lines)
    done = result(tmp_path, "m.dies.seed1")
    assert len(done["segments"]) == 2 and done["frames"] == 1000 and "error" not in done


def test_time_limit_stops_cleanly_and_the_next_call_continues(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("STUB_DELAY", "0.25")
    suite = make_suite(["a"], [1, 2, 3])
    start = time.monotonic()
    runner, _ = make_runner(suite, tmp_path, minutes=2.0 / 60, at_once=2)
    summary = runner.run()
    assert time.monotonic() - start < 10
    assert summary.stopped == ["m.a.seed1", "m.a.seed2"] and summary.waiting == ["m.a.seed3"]
    partial = result(tmp_path, "m.a.seed1")
    assert partial["status"] == "partial" and 0 < partial["frames"] < 1000 and partial["training_episodes"]
    assert list((tmp_path / "claims").glob("*.claim")) == []
    monkeypatch.setenv("STUB_DELAY", "0.01")
    runner, lines = make_runner(suite, tmp_path)
    assert len(runner.run().finished) == 3
    assert any("continued m.a.seed1" in line for line in lines)
    assert len(result(tmp_path, "m.a.seed1")["segments"]) == 2


def test_signal_stops_cleanly(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("STUB_DELAY", "0.25")
    runner, _ = make_runner(make_suite(["a"], [1]), tmp_path)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    summary = runner.run()
    assert summary.interrupted and summary.stopped == ["m.a.seed1"]
    assert result(tmp_path, "m.a.seed1")["status"] == "partial"


def test_progress_lines_and_partial_results_while_running(tmp_path: Path, monkeypatch):
    hold = tmp_path / "hold"
    hold.touch()
    monkeypatch.setenv("STUB_HOLD", str(hold))
    runner, lines = make_runner(make_suite(["a"], [1]), tmp_path / "suite", every=0.1)
    expected = "done 0 of 1, running 1 | m.a.seed1 50% 5/s (51.0)"

    def say(text: str) -> None:
        lines.append(text)
        if expected in text:  # the run waits at half of its frames until this line was said
            hold.unlink(missing_ok=True)

    runner.say = say
    seen = []
    real = runner._write_result
    monkeypatch.setattr(runner, "_write_result", lambda *a: seen.append(a[1]) or real(*a))
    runner.run()
    assert "partial" in seen and seen[-1] == "done"
    assert any(expected in line for line in lines)


def test_runs_of_another_machine_are_waited_for_and_taken_over(tmp_path: Path):
    """The other machine claimed a run and died: its claim is taken when its heartbeat is old."""
    suite = make_suite(["a"], [1, 2])
    claims = tmp_path / "claims"
    claims.mkdir()
    (claims / "m.a.seed1.claim").write_text(json.dumps({"machine": "x", "host": "x", "pid": 1}))
    runner, _ = make_runner(suite, tmp_path, stale=1.5)
    start = time.monotonic()
    summary = runner.run()
    assert summary.finished == ["m.a.seed2", "m.a.seed1"] and time.monotonic() - start > 1.0


def test_two_machines_share_a_folder(tmp_path: Path, monkeypatch):
    """Two processes with the same folder do every run once."""
    monkeypatch.setenv("STUB_DELAY", "0.05")
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.tools.suite.suite_case import make_runner, make_suite\n"
        "folder = Path(sys.argv[1]); (folder / sys.argv[2]).touch()\n"
        "while len(list(folder.glob('ready_*'))) < 2: time.sleep(0.01)\n"
        "runner, lines = make_runner(make_suite(['a', 'b', 'c']), folder, at_once=1)\n"
        "print(len(runner.run().finished))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path), f"ready_{number}"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(2)
    ]
    counts = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(counts) == 6 and min(counts) > 0
    events = [json.loads(line) for line in (tmp_path / "suite.jsonl").read_text().splitlines()]
    assert sorted(event["run"] for event in events if event["event"] == "started") == [
        f"m.{task}.seed{seed}" for task in "abc" for seed in (1, 2)
    ]


def test_suite_killed_with_sigkill_continues(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("STUB_DELAY", "0.2")
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.tools.suite.suite_case import make_runner, make_suite\n"
        "make_runner(make_suite(['a'], [1]), Path(sys.argv[1]))[0].run()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    metrics = tmp_path / "runs" / "m.a.seed1" / "metrics.jsonl"
    limit = time.monotonic() + 60
    while time.monotonic() < limit and not metrics.exists():
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert (tmp_path / "claims" / "m.a.seed1.claim").exists()  # nobody could remove it
    monkeypatch.setenv("STUB_DELAY", "0.01")
    runner, _ = make_runner(make_suite(["a"], [1]), tmp_path)
    assert runner.run().finished == ["m.a.seed1"]


def test_damaged_result_is_done_again(tmp_path: Path):
    folder = SuiteFolder(tmp_path)
    folder.make()
    folder.result_file("m.a.seed1").write_text("{")
    runner, lines = make_runner(make_suite(["a"], [1]), tmp_path)
    assert runner.run().finished == ["m.a.seed1"] and "cannot be read as JSON" in lines[0]
    assert (tmp_path / "results" / "m.a.seed1.damaged").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [({"minutes": 0.0}, "--minutes must be above 0"), ({"at_once": 0}, "--at-once must be at least 1")],
)
def test_wrong_options(options: dict, says: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=says):
        make_runner(make_suite(["a"]), tmp_path, **options)
