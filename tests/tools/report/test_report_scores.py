"""Scores of runs, aggregates over seeds and tasks, and comparison with published scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rl_lab.run_folder import RunFolder
from rl_lab.tools.published import Task
from rl_lab.tools.report import command as report
from rl_lab.tools.report.curves import Metrics
from rl_lab.tools.report.runs import RunData, load_runs
from rl_lab.tools.report.scores import (
    MethodScores,
    aggregate_table,
    final_score,
    improvement_table,
    method_scores,
    published_aggregates,
    published_sources,
    published_tables,
    scale_name,
    task_table,
)

MakeRun = Callable[..., Path]
PONG, BREAKOUT, BOXING = (Task("atari100k", name) for name in ("pong", "breakout", "boxing"))


def run_of(rows: list[dict]) -> RunData:
    return RunData(RunFolder("nowhere"), {}, Metrics(rows))


def scores(method: str, **values: list[float]) -> MethodScores:
    tasks = {Task("atari100k", name): np.array(found) for name, found in values.items()}
    return MethodScores(method, tasks, dict.fromkeys(tasks, 400_000))


def test_score_uses_last_tenth():
    rows = [{"step": step, "eval/return_mean": float(step)} for step in range(0, 101, 5)]
    assert final_score(run_of(rows)) == pytest.approx(np.mean([90, 95, 100]))
    assert final_score(run_of([*rows, {"step": 200}])) == 100.0  # evaluated long ago: the last one counts
    assert final_score(run_of([{"step": 1, "collect/return_mean": 7.0}])) == 7.0
    assert final_score(run_of([{"step": 1}])) is None


def test_methods_and_tasks(make_run: MakeRun):
    folders = [
        make_run(
            name=name,
            seed=seed,
            lines=20,
            media=False,
            environment=f"suite: atari100k, task: {task}",
            level=level,
        )
        for name, level in (("a", 100.0), ("b", 400.0))
        for task in ("pong", "breakout")
        for seed in (0, 1)
    ]
    runs = load_runs([RunFolder(folder) for folder in folders])
    methods = method_scores(runs)
    assert [found.method for found in methods] == ["a", "b"]
    assert list(methods[0].tasks) == [PONG, BREAKOUT] and len(methods[0].tasks[PONG]) == 2
    assert scale_name(methods) == "human-normalised"
    assert methods[0].aggregates["iqm"].value < methods[1].aggregates["iqm"].value
    paths = report.write_report(folders, out="all", keys=["train/loss/reward"])
    assert {"efficiency.png", "aggregates.png", "profiles.png", "curve.png"} <= {path.name for path in paths}
    for path in paths[1:]:
        with Image.open(path) as image:
            assert np.asarray(image.convert("L")).std() > 3
    page = paths[0].read_text()
    assert (
        "human-normalised scores over tasks" in page and "Micheli et al. 2023" in page and "ours: a" in page
    )


def test_tables_by_hand():
    first = scores("first", pong=[14.6, -20.7], breakout=[30.5, 30.5])
    second = scores("second", pong=[-20.7], boxing=[0.1])
    from rl_lab.tools import statistics

    for found in (first, second):
        assert found.normalised is not None
        found.aggregates = statistics.intervals(list(found.normalised.values()), statistics.NORMALISED)
    table = aggregate_table([first, second])
    assert table is not None and table.rows[0][:3] == ("first", "2", "4")
    assert table.rows[0][3].startswith("0.75 (0.5 to 1")  # pong 1/2, breakout 1
    assert table.rows[1][3] == "0"  # single runs have no interval
    improvement = improvement_table([first, second])
    assert improvement is not None and improvement.rows[0][2] == "75%"  # pong: one better, one even
    assert improvement_table([first]) is None
    by_task = task_table([first])
    assert by_task.rows[0][:5] == ("first", "atari100k/pong", "2", "400,000", "-3.05")
    assert by_task.rows[0][-1] == "0.5"


def test_no_aggregates_without_normalisation():
    plain = MethodScores("m", {Task("", "X-v0"): np.array([1.0]), PONG: np.array([1.0])}, {})
    assert scale_name([plain]) == "" and aggregate_table([plain]) is None and plain.normalised is None


def test_published_scores_in_report():
    few = published_tables([scores("ours", pong=[20.0])])
    assert len(few) == 1 and few[0].strong == [0]
    agents = [row[1] for row in few[0].rows]
    assert agents[0] == "ours: ours" and {"IRIS", "Δ-IRIS", "DreamerV3"} <= set(agents)
    many = published_tables([scores("ours", pong=[20.0], breakout=[10.0], boxing=[1.0])])
    assert many[0].header[:2] == ("atari100k", "ours: ours") and "IRIS (400k)" in many[0].header
    assert many[0].rows[0][many[0].header.index("IRIS (400k)")] == "14.6"
    together = published_aggregates([scores("ours", pong=[14.6], breakout=[30.5])])
    assert together is not None
    iris = next(row for row in together.rows if row[0] == "ours / IRIS")
    # Ours are human on both; IRIS has 14.6 and 83.7: (1 + (83.7 - 1.7) / 28.8) / 2.
    assert iris[1:3] == ("2", f"1 / {(1 + 82 / 28.8) / 2:.3g}")
    assert published_tables([MethodScores("m", {Task("", "X-v0"): np.array([1.0])}, {})]) == []
    assert any("arXiv 2209.00588" in line for line in published_sources([scores("ours", pong=[20.0])]))
