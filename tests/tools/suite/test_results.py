from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_lab.environments.suites.crafter import crafter_score
from rl_lab.errors import LabError
from rl_lab.tools.suite.definition import Score
from rl_lab.tools.suite.results import (
    SuiteFolder,
    build_result,
    mean_of_episodes,
    run_score,
    status_of,
    training_episodes,
)
from tests.tools.suite.suite_case import make_suite

# Episodes by log line: 2 of mean 1 up to frame 100, none up to 200, 3 of mean 5 up to 300, 1 of 9 up to 400.
ROWS = [
    {"step": 50, "frames": 100, "updates": 1, "collect/return_mean": 1.0, "collect/episodes": 2},
    {"step": 100, "frames": 200, "updates": 2, "collect/episodes": 2},
    {"step": 150, "frames": 300, "updates": 3, "collect/return_mean": 5.0, "collect/episodes": 5},
    {"step": 150, "frames": 300, "updates": 3, "eval/return_mean": 7.0, "eval/return_std": 2.0},
    {"step": 200, "frames": 400, "updates": 4, "collect/return_mean": 9.0, "collect/episodes": 6},
]


def test_scores_by_hand():
    assert run_score(Score("eval"), ROWS, None) == (7.0, 300)
    assert run_score(Score("train", window=200), ROWS, None) == ((3 * 5.0 + 9.0) / 4, 400)
    assert run_score(Score("train", window=100), ROWS, None) == (9.0, 400)
    assert run_score(Score("final"), ROWS, {"return_mean": 3.0, "frames": 400}) == (3.0, 400)
    assert run_score(Score("final"), ROWS, None) == (7.0, 300)  # stopped before it: the last evaluation
    assert run_score(Score("eval"), ROWS[:2], None) == (None, None)


def test_a_score_may_be_another_statistic_and_the_mean_of_evaluations(tmp_path: Path):
    """Trained on stored data: no frames pass, and updates are the axis of the curve."""
    rows = [
        {"step": 0, "frames": 0, "updates": 10 * k, "eval/return_mean": 50.0, "eval/max_reward": 0.2 * k}
        for k in (1, 2, 3)
    ]
    assert run_score(Score("eval", metric="max_reward"), rows, None) == (pytest.approx(0.6), 0)
    assert run_score(Score("eval", metric="max_reward", last=2), rows, None) == (pytest.approx(0.5), 0)
    assert run_score(Score("eval", metric="max_reward", last=9), rows, None) == (pytest.approx(0.4), 0)
    assert run_score(Score("eval", metric="success"), rows, None) == (None, None)
    final = {"return_mean": 3.0, "max_reward": 0.9, "frames": 0}
    assert run_score(Score("final", metric="max_reward"), rows, final) == (0.9, 0)
    suite = make_suite(["a"], [1], score={"from": "eval", "metric": "max_reward", "last": 2}, frames=None)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = build_result(suite, suite.runs()[0], tmp_path, status="done", facts={}, segments=[])
    assert result["score_from"] == "max_reward of the last 2 evaluations during training"
    assert [(point["updates"], point["max_reward"]) for point in result["evaluations"]] == [
        (10, 0.2),
        (20, 0.4),
        (30, pytest.approx(0.6)),
    ]
    # Statistics of training episodes: only the last two log lines have this one.
    logged = [dict(row) for row in ROWS]
    logged[2]["collect/success"], logged[4]["collect/success"] = 0.5, 1.0
    assert run_score(Score("train", 200, "success"), logged, None) == ((3 * 0.5 + 1.0) / 4, 400)
    assert [point.get("success") for point in training_episodes(logged, 200, "success")] == [None, 0.625]


def test_training_curve_by_hand():
    assert training_episodes(ROWS, 200) == [
        {"frames": 200, "return_mean": 1.0, "episodes": 2},
        {"frames": 400, "return_mean": (3 * 5.0 + 9.0) / 4, "episodes": 4},
    ]


def test_achievements_are_weighted_by_episodes(tmp_path: Path):
    rows = [dict(row) for row in ROWS]
    for index, rate in ((0, 0.5), (2, 1.0), (4, 0.0)):
        rows[index]["collect/achievement_collect_wood"] = rate
    rates = mean_of_episodes(rows, "collect/achievement_")
    assert rates == {"collect_wood": pytest.approx((2 * 0.5 + 3 * 1.0 + 1 * 0.0) / 6)}
    suite = make_suite(["a"], [1])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = build_result(suite, suite.runs()[0], tmp_path, status="done", facts={}, segments=[])
    assert result["crafter_score"] == pytest.approx(crafter_score(rates))


def test_result_of_a_run_folder(tmp_path: Path):
    suite = make_suite(["a"], [1], frames=400)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"half')
    (tmp_path / "config.yaml").write_text("experiment: {seed: 1}\nrun_dir: /home/me/run\n")
    segments = [
        {"start": 0.0, "seconds": 60.0, "gpu_seconds": 15.0},
        {"start": 9.0, "seconds": 30.0, "gpu_seconds": 3.0},
    ]
    facts = {"command": "rl-lab train", "commit": "abc", "machine": {"gpu": "x"}}
    result = build_result(suite, suite.runs()[0], tmp_path, status="partial", facts=facts, segments=segments)
    assert (result["frames"], result["steps"], result["updates"]) == (400, 200, 4)
    assert result["evaluations"] == [{"frames": 300, "updates": 3, "return_mean": 7.0, "return_std": 2.0}]
    assert (result["seconds"], result["gpu_hours"]) == (90.0, 0.005)
    assert result["config"] == {"experiment": {"seed": 1}} and result["commit"] == "abc"
    empty = build_result(
        suite, suite.runs()[0], tmp_path / "none", status="failed", facts={}, segments=[], error="x"
    )
    assert (empty["frames"], empty["score"], empty["error"]) == (0, None, "x")


def test_longer_result_is_kept(tmp_path: Path):
    folder = SuiteFolder(tmp_path)
    base = {"name": "m.a.seed1", "method": "m", "task": "a", "seed": 1, "budget_frames": 100}
    assert folder.write({**base, "status": "partial", "frames": 60})
    assert not folder.write({**base, "status": "partial", "frames": 20})
    assert not folder.write({**base, "status": "failed", "frames": 0})
    assert folder.write({**base, "status": "done", "frames": 100})
    assert not folder.write({**base, "status": "failed", "frames": 0})
    found = folder.read("m.a.seed1")
    assert found is not None and found["status"] == "done"
    # The budget was raised, and the run goes on.
    assert folder.write({**base, "status": "partial", "frames": 150, "budget_frames": 200})


def test_raised_budget_makes_a_done_run_partial():
    (run,) = make_suite(["a"], [1], frames=400).runs()
    assert status_of(run, None) == "missing"
    assert status_of(run, {"status": "done", "frames": 400}) == "done"
    assert status_of(run, {"status": "done", "frames": 200}) == "partial"
    assert status_of(run, {"status": "failed", "frames": 400}) == "failed"


def test_damaged_results_are_named(tmp_path: Path):
    folder = SuiteFolder(tmp_path)
    folder.make()
    folder.result_file("m.a.seed1").write_text("{")
    folder.result_file("other").write_text('{"rows": []}')
    results, bad = folder.read_all()
    assert results == [] and len(bad) == 2 and "is not the result of a run" in bad[1]
    with pytest.raises(LabError, match="cannot be read as JSON"):
        folder.read("m.a.seed1")
