"""Evaluation, videos, reports and logging that fail do not end training; what does end it saves first."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import rl_lab
from rl_lab.environments.vector import VectorEnv
from rl_lab.errors import EnvironmentFaultError, LabError
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.orchestration.side_jobs import MOST_REPORTS, SideJobs
from rl_lab.orchestration.updates import HookRunner, Storage
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow
from tests.same_run import assert_same
from tests.test_faults import train

LEARNED = ("components", "controllers", "optimizers", "generators", "collector", "phase_state")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("side") / "run"
    train(folder, *SIDE)
    return CheckpointManager(folder / "checkpoints").load().state


SIDE = (
    *("training.report.every_env_steps=10", "training.evaluate.every_env_steps=10"),
    *("training.evaluate.episodes=1", "training.log.every_env_steps=8"),
)


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_failing_side_jobs_leave_training_as_it_is(tmp_path: Path, monkeypatch, undisturbed, capsys):
    """A report that raises, then gives a float image and text; a render() that raises; metrics that are text."""
    calls = []

    def report(self, batch):
        calls.append(batch)
        if len(calls) == 1:
            raise ValueError("a bug in the image code")
        return {"image": np.zeros((1, 3, 4, 4), np.float32), "words": "text", "number": 2.0}

    def frame(self):
        raise RuntimeError("render fails")

    monkeypatch.setattr(DreamerWorkflow, "report", report)
    monkeypatch.setattr(VectorEnv, "frame", frame)
    run = tmp_path / "run"
    train(run, *SIDE, "training.evaluate.video=true")
    text = (run / "error.txt").read_text()
    for error in (
        "ValueError: a bug in the image code",
        "rl_lab.errors.LabError: 'report/image' cannot be shown",
        "ValueError: could not convert string to float: 'text'",
        "RuntimeError: render fails",
    ):
        assert text.count(f"\n{error}") == 1, f"{error} is there once"
    said = capsys.readouterr().out.splitlines()
    failures = [line for line in said if "training continues" in line]
    assert len(failures) == 4 and all("the traceback is in error.txt" in line for line in failures)
    assert any("side jobs failed" in line and "report" in line for line in said)
    last = rows(run)[-1]
    assert last["failures/video"] >= 3 and last["failures/report"] == 1 + 2 * (len(calls) - 1)
    assert any("eval/return_mean" in row for row in rows(run)), "the evaluation itself did not fail"
    assert any(row.get("report/number") == 2.0 for row in rows(run)), "the rest of the report is logged"
    state = CheckpointManager(run / "checkpoints").load().state
    for name in LEARNED:
        assert_same(state[name], undisturbed[name], name)


def test_failing_evaluation_is_skipped(tmp_path: Path, monkeypatch, undisturbed, capsys):
    def run_nothing(self, *args, **kwargs):
        raise EnvironmentFaultError("environment 0 raised ValueError: the wheel came off")

    monkeypatch.setattr(Evaluator, "run", run_nothing)
    run = tmp_path / "run"
    train(run, *SIDE)
    assert capsys.readouterr().out.count("evaluation failed at step") == 1, "reported once"
    assert rows(run)[-1]["failures/evaluation"] >= 3
    state = CheckpointManager(run / "checkpoints").load().state
    for name in LEARNED:
        assert_same(state[name], undisturbed[name], name)


def test_side_failure_stops_if_configured_after_a_checkpoint(tmp_path: Path, monkeypatch):
    def report(self, batch):
        raise ValueError("a bug in the image code")

    monkeypatch.setattr(DreamerWorkflow, "report", report)
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="a bug in the image code"):
        train(run, *SIDE, "training.on_side_failure=stop", "training.checkpoint.every_env_steps=null")
    monkeypatch.undo()
    assert CheckpointManager(run / "checkpoints").steps(), "saved before the run ended"
    assert "Traceback" in (run / "error.txt").read_text()
    assert resume(run, say=lambda line: None).counters["env_steps"] >= 48


def test_evaluation_phase_needs_its_evaluation(tmp_path: Path, monkeypatch):
    def run_nothing(self, *args, **kwargs):
        raise LabError("no episode")

    monkeypatch.setattr(Evaluator, "run", run_nothing)
    phases = "training.phases=[{name: joint, type: online, buffer: replay, workflow_hooks: [collect], duration_steps: 8},"
    phases += "{name: test, type: eval_only, workflow_hooks: [evaluate], duration_cycles: 1}]"
    with pytest.raises(LabError, match="no episode"):
        rl_lab.train(
            "random_cartpole", [phases, f"run_dir={tmp_path / 'run'}", "logging.progress=off"], say=len
        )


@pytest.mark.parametrize("where", ["update", "act", "store", "exit"])
def test_error_in_the_loop_saves_first(tmp_path: Path, monkeypatch, where: str):
    """Without any earlier checkpoint: nothing but the failed action is lost."""
    calls = {"update": 0, "act": 0, "store": 0}
    classes = {
        "update": (HookRunner, "perform"),
        "act": (DreamerWorkflow, "act"),
        "store": (Storage, "store"),
    }
    owner, name = classes["update" if where == "exit" else where]
    original = getattr(owner, name)

    def fails(self, *args, **kwargs):
        calls[name if name != "perform" else "update"] += 1
        if sum(calls.values()) == {"update": 6, "exit": 6}.get(where, 15):
            raise SystemExit(0) if where == "exit" else KeyError("reward")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    run = tmp_path / "run"
    quiet = ("training.evaluate.every_env_steps=null", "training.checkpoint.every_env_steps=null")
    with pytest.raises(
        LabError if where == "exit" else KeyError, match="sys.exit" if where == "exit" else "reward"
    ):
        train(run, *quiet)
    monkeypatch.undo()
    manager = CheckpointManager(run / "checkpoints")
    saved = manager.load().state
    assert saved["global_step"] > 0 and "Traceback" in (run / "error.txt").read_text()
    environment = saved["collector"]["environment"]
    assert bool(environment["forgotten"]) == (where == "store"), (
        "rows that were not stored end their episodes"
    )
    said: list[str] = []
    with pytest.warns(UserWarning, match="start a new episode") if where == "store" else nullcontext():
        result = resume(run, say=said.append)
    assert result.counters["env_steps"] >= 48 and any("resumed at step" in line for line in said)


def test_failures_are_reported_once_and_counted():
    said: list[str] = []
    written: list[str] = []
    jobs = SideJobs(say=said.append, write=lambda title, error: written.append(title))
    for number in range(3):
        with jobs.guard("report", number):
            raise ValueError(f"text {number}")
    jobs.failed("training video", 4, "Traceback\n  File a.py, line 1\nRuntimeError: render fails")
    jobs.failed("training video", 5, "Traceback\n  File a.py, line 1\nRuntimeError: render fails again")
    assert [line.partition(",")[0] for line in said] == [
        "report failed at step 0",
        "training video failed at step 4",
    ]
    assert written == ["report failed at step 0", "training video failed at step 4"]
    assert jobs.metrics() == {"failures/report": 3.0, "failures/training video": 2.0}
    assert "report 3 times, training video 2 times" in jobs.summary()
    again = SideJobs(say=said.append)
    again.set_state(jobs.get_state())
    assert again.counts == jobs.counts
    for number in range(2 * MOST_REPORTS):
        jobs.failed("report", number, f"Traceback\n  File a.py, line {number}\nRuntimeError: many")
    assert len(written) == MOST_REPORTS


def test_full_disk_does_not_hide_a_side_failure():
    def full(title, error):
        raise OSError(28, "No space left on device")

    said: list[str] = []
    jobs = SideJobs(say=said.append, write=full)
    with jobs.guard("report", 7):
        raise ValueError("odd")
    assert said == ["report failed at step 7, training continues: ValueError: odd"]
    with pytest.raises(KeyboardInterrupt), jobs.guard("report", 8):
        raise KeyboardInterrupt
