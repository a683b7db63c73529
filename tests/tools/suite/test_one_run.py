"""The process of one run: overrides in decisions, exit statuses, what a repeated start does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rl_lab.errors import LabError, RunLockedError
from rl_lab.launch import pack
from rl_lab.tools.suite import one_run
from rl_lab.training import RunResult
from rl_lab.utils.files import RunLock


@pytest.fixture
def order(tmp_path: Path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(
        pack, "stop_with_parent", lambda parent: None
    )  # it would bind this process to its parent
    return {
        "parent": os.getpid(),
        "experiment": "random_cartpole",
        "overrides": ["debug=tiny", "logging.tensorboard=false", "environment.action_repeat=4"],
        "task": "CartPole-v1",
        "seed": 3,
        "run_dir": str(tmp_path / "run"),
        "facts": str(tmp_path / "facts.json"),
        "in_frames": {
            "training.total_timesteps": 400,
            "training.evaluate.every_env_steps": 200,
            "training.checkpoint.every_env_steps": None,
        },
        "counts": {"training.evaluate.episodes": 1},
        "final": {"episodes": 2},
        "weights": None,
        "commit": "abc",
    }


def start(tmp_path: Path, order: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    (tmp_path / "job.json").write_text(json.dumps(order))
    status = one_run.main([str(tmp_path / "job.json")])
    return status, json.loads((tmp_path / "facts.json").read_text())


def test_frames_become_decisions_and_the_run_is_evaluated(tmp_path: Path, order, monkeypatch):
    status, facts = start(tmp_path, order)
    assert status == 0 and facts["finished"] and facts["counters"]["env_steps"] == 100
    assert "training.total_timesteps=100" in facts["command"] and "every_env_steps=50" in facts["command"]
    assert "run_dir" not in facts["command"] and facts["commit"]
    assert len(facts["final"]["returns"]) == 2 and facts["final"]["frames"] == 400
    # A second start, after a kill in the last moment, neither trains nor evaluates again.
    monkeypatch.setattr(one_run, "_train", lambda overrides: pytest.fail("trained again"))
    monkeypatch.setattr(one_run, "_evaluate", lambda order: pytest.fail("evaluated again"))
    assert start(tmp_path, order)[0] == 0


def test_stopped_run(tmp_path: Path, order, monkeypatch):
    stopped = RunResult(tmp_path / "run", interrupted=True)
    monkeypatch.setattr(one_run, "_train", lambda overrides: stopped)
    status, facts = start(tmp_path, order)
    assert status == one_run.STOPPED and not facts["finished"] and "final" not in facts


def test_larger_budget_trains_and_evaluates_again(tmp_path: Path, order, monkeypatch):
    (tmp_path / "facts.json").write_text(json.dumps({"trained": 200, "final": {"return_mean": 0.0}}))
    finished = RunResult(tmp_path / "run", interrupted=False, counters={"env_steps": 100})
    monkeypatch.setattr(one_run, "_train", lambda overrides: finished)
    monkeypatch.setattr(one_run, "_evaluate", lambda order: {"return_mean": 1.0})
    _, facts = start(tmp_path, order)
    assert facts["trained"] == 400 and facts["final"] == {"return_mean": 1.0}


def test_run_folder_that_is_still_saving_is_waited_for(tmp_path: Path, monkeypatch):
    lock = RunLock(tmp_path).acquire()
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        lock.release()

    monkeypatch.setattr(one_run.time, "sleep", sleep)
    assert one_run.wait_for_lock(lambda: RunLock(tmp_path).acquire().held) and waited == [2.0]
    monkeypatch.setattr(one_run, "LOCK_SECONDS", -1.0)
    held = RunLock(tmp_path).acquire()
    with pytest.raises(RunLockedError):
        one_run.wait_for_lock(lambda: RunLock(tmp_path).acquire())
    held.release()


def test_final_episodes_have_the_named_statistic(order, monkeypatch):
    found = {"step": 0, "task": "pusht/keypoints", "episodes": 2, "return_mean": 9.0, "log/max_reward": 0.8}
    monkeypatch.setattr("rl_lab.tools.evaluate.evaluate", lambda run, **options: found)
    monkeypatch.setattr(one_run, "_action_repeat", lambda run_dir: 1)
    kept = one_run._evaluate({**order, "metric": "max_reward"})
    assert kept["max_reward"] == 0.8 and kept["return_mean"] == 9.0
    with pytest.raises(
        LabError, match=r"^score\.metric is success, which episodes of pusht/keypoints do not log"
    ):
        one_run._evaluate({**order, "metric": "success"})
