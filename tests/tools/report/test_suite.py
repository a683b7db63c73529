"""Reports on suites: aggregates worked out by hand, published values at equal frames, docs/results.md."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from rl_lab.cli import main
from rl_lab.tools.published import CURVES, Task, benchmarks, normalisation, published_curves
from rl_lab.tools.report import suite_page
from rl_lab.tools.report.suite import (
    Reference,
    SuiteReport,
    absent_lines,
    aggregates,
    load_report,
    method_tables,
    spread,
    task_table,
    verdict,
)
from rl_lab.tools.statistics import intervals
from rl_lab.tools.suite.definition import Suite, load_suite, parse_suite, suite_names
from rl_lab.tools.suite.results import SuiteFolder

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "results"
# Of published_curves.yaml, read in the authors' files at 100,000 frames (seeds 1, 2, 3).
WALKER = [966.7, 947.7, 971.3]
CHEETAH = [454.4, 613.8, 489.2]


def dmc_suite(**change: object) -> Suite:
    method = {
        "title": "TD-MPC2 (5m)",
        "experiment": "tdmpc2_dmc_state",
        "tasks": ["walker_walk", "cheetah_run", "dog_run"],
        "seeds": [1, 2, 3],
        "frames": 100_000,
        "published": ["TD-MPC2"],
        **change,
    }
    return parse_suite("dmc", {"text": "three tasks", "methods": {"tdmpc2": method}})


def add(folder: SuiteFolder, task: str, seed: int, score: float | None, **change: object) -> None:
    content = {
        "name": f"tdmpc2.{task}.seed{seed}",
        "method": "tdmpc2",
        "task": task,
        "seed": seed,
        "status": "done",
        "score": score,
        "score_frames": 100_000,
        "frames": 100_000,
        "seconds": 600.0,
        "gpu_hours": 0.02,
        "evaluations": [{"frames": 50_000, "return_mean": 1.0}, {"frames": 100_000, "return_mean": score}],
        "commit": "abc",
        "command": "rl-lab train",
        "machine": {"gpu": "NVIDIA H200"},
        **change,
    }
    folder.write(content)


@pytest.fixture
def folder(tmp_path: Path) -> SuiteFolder:
    found = SuiteFolder(tmp_path / "dmc")
    for seed, (walker, cheetah) in enumerate([(950.0, 620.0), (960.0, 700.0), (970.0, 660.0)], start=1):
        add(found, "walker_walk", seed, walker)
        add(found, "cheetah_run", seed, cheetah)
    add(found, "dog_run", 1, 12.0, status="partial", frames=60_000, score_frames=50_000)
    add(found, "dog_run", 2, None, status="failed", frames=0, error="out of memory")
    return found


def test_published_seeds_are_the_authors():
    curves = {curve.agent: curve for curve in published_curves(Task("dmc", "walker_walk", "proprio"))}
    assert curves["TD-MPC2"].points[100_000] == WALKER
    assert "nicklashansen/tdmpc2 at e9f5932" in curves["TD-MPC2"].source
    (cheetah,) = [c for c in published_curves(Task("dmc", "cheetah_run", "proprio")) if c.agent == "TD-MPC2"]
    assert cheetah.points[100_000] == CHEETAH
    (pong,) = [c for c in published_curves(Task("atari100k", "pong")) if c.agent == "DreamerV3"]
    assert pong.points[400_000] == [-4.67, -9.25, -1.33, -2.5, -3.33]
    assert published_curves(Task("dmc", "walker_walk", "both")) == []


def test_published_seeds_agree_with_the_table_of_means():
    """published.yaml has means of the same files."""
    for block in benchmarks():
        for name, score in block.scores.items():
            for curve in published_curves(Task(block.suite, name, block.observe)):
                if curve.agent == block.agent == "TD-MPC2" and block.frames in curve.points:
                    assert np.mean(curve.points[block.frames]) == pytest.approx(score, abs=0.51), (
                        name,
                        block.frames,
                    )


def test_aggregates_by_hand(folder: SuiteFolder):
    """Two finished tasks of three seeds; dog_run is partial and does not count."""
    (report,) = load_report(dmc_suite(), folder).methods
    found = aggregates(report)
    assert list(found) == ["TD-MPC2 (5m) (2 tasks)", "TD-MPC2, published (2 tasks)"]
    runs, ours = found["TD-MPC2 (5m) (2 tasks)"]
    # Task means 0.96 and 0.66. IQM: six runs, a quarter of six is one at each end: 0.66, 0.70, 0.95, 0.96 remain.
    assert runs == 6
    assert ours["mean"].value == pytest.approx((0.96 + 0.66) / 2)
    assert ours["median"].value == pytest.approx((0.96 + 0.66) / 2)
    assert ours["iqm"].value == pytest.approx((0.66 + 0.70 + 0.95 + 0.96) / 4)
    _, theirs = found["TD-MPC2, published (2 tasks)"]
    assert theirs["mean"].value == pytest.approx((np.mean(WALKER) + np.mean(CHEETAH)) / 2000)
    assert theirs["iqm"].value == pytest.approx((489.2 + 613.8 + 947.7 + 966.7) / 4000)


def test_bootstrap_of_the_iqm_matches_a_slow_loop():
    """Stratified: runs are drawn with replacement within each task (rliable's get_interval_estimates)."""
    tasks = [np.array([0.95, 0.96, 0.97]), np.array([0.62, 0.70, 0.66]), np.array([0.1, 0.5])]
    generator = np.random.default_rng(3)
    drawn = []
    for _ in range(20_000):
        pooled = sorted(
            value for scores in tasks for value in generator.choice(scores, size=len(scores), replace=True)
        )
        cut = len(pooled) // 4
        drawn.append(sum(pooled[cut : len(pooled) - cut]) / (len(pooled) - 2 * cut))
    low, high = np.percentile(drawn, [2.5, 97.5])
    found = intervals(tasks)["iqm"]
    assert found.low == pytest.approx(low, abs=0.01) and found.high == pytest.approx(high, abs=0.01)


def test_human_normalised_aggregates_by_hand(tmp_path: Path):
    suite = parse_suite(
        "games",
        {
            "methods": {
                "d": {
                    "title": "Dreamer",
                    "experiment": "dreamer_atari100k",
                    "tasks": ["pong", "boxing"],
                    "seeds": [1],
                    "frames": 400_000,
                    "published": ["DreamerV3"],
                }
            }
        },
    )
    folder = SuiteFolder(tmp_path)
    for task, score in (("pong", -3.05), ("boxing", 6.1)):
        content = {"name": f"d.{task}.seed1", "method": "d", "task": task, "seed": 1, "status": "done"}
        folder.write({**content, "score": score, "score_frames": 400_000, "frames": 400_000})
    (report,) = load_report(suite, folder).methods
    runs, ours = aggregates(report)["Dreamer (2 tasks)"]
    # Pong: random -20.7, human 14.6; Boxing: 0.1 and 12.1. Both scores are halfway.
    assert (
        runs == 2 and ours["mean"].value == pytest.approx(0.5) and ours["median"].value == pytest.approx(0.5)
    )
    assert not ours["mean"].bounded  # one seed a task: there is no interval
    scale = normalisation(Task("atari100k", "pong"))
    assert scale is not None and scale(-3.05) == pytest.approx(0.5)


def test_place_relative_to_the_published_seeds():
    reference = Reference("X", 100_000, (10.0, 20.0, 30.0), "source")
    assert verdict(np.array([9.0, 10.0]), reference, 100_000) == "below"
    assert verdict(np.array([29.0, 31.0]), reference, 100_000) == "inside"
    assert verdict(np.array([31.0]), reference, 100_000) == "above"
    assert verdict(np.array([20.0]), reference, 60_000) == "–"  # other frames
    mean_only = Reference("X", 100_000, (20.0,), "source", single_seeds=False)
    assert verdict(np.array([20.0]), mean_only, 100_000) == "–"
    assert spread([1.0]) == "1" and spread([10.0, 30.0]) == "20.0 (10.0 to 30.0)"


def test_task_table(folder: SuiteFolder):
    (report,) = load_report(dmc_suite(), folder).methods
    rows = {row[0]: row for row in task_table(report).rows}
    assert rows["walker_walk"][1:6] == [
        "3",
        "100k",
        "960.0 (950.0 to 970.0)",
        "961.9 (947.7 to 971.3)",
        "inside",
    ]
    assert rows["cheetah_run"][5] == "above"
    assert rows["dog_run"][2:6] == ["50k (partial)", "12.0", "26.6 (7.6 to 39.1) at 100k", "–"]
    assert rows["walker_walk"][-2:] == ["10.0", "0.06"]
    assert report.counts == {"done": 6, "partial": 1, "failed": 1, "missing": 1}
    assert report.absent == {"out of memory": {"dog_run": [2]}, "missing": {"dog_run": [3]}}


def test_crafter_score_is_beside_the_published_ones(tmp_path: Path):
    methods = {
        name: {
            "title": f"Dreamer {name}",
            "experiment": "dreamer_crafter",
            "tasks": ["reward"],
            "seeds": [1, 2],
            "frames": 100_000,
            "published": ["DreamerV2", "DreamerV3 XL"],
        }
        for name in ("new", "kept")
    }
    folder = SuiteFolder(tmp_path)
    for name, seed, found in (("new", 1, 2.0), ("new", 2, 4.0), ("kept", 1, None)):
        content = {"name": f"{name}.reward.seed{seed}", "method": name, "task": "reward", "seed": seed}
        score = {} if found is None else {"crafter_score": found}
        folder.write(
            {**content, **score, "status": "done", "score": 3.0, "score_frames": 78_000, "frames": 78_000}
        )
    report = load_report(parse_suite("worlds", {"methods": methods}), folder)
    new, kept = (method_tables(method) for method in report.methods)
    assert new[-1].header[0] == "crafter_score, % (all training episodes)"
    assert new[-1].rows == [
        ["Dreamer new", "78k", "3 (2 to 4)"],
        ["DreamerV2, published", "1M", "10.0"],
        ["DreamerV3 XL, published", "80k", "3"],
    ]
    assert kept[-1].rows[0] == ["Dreamer kept", "78k", "not recorded"]
    assert any("symoon11/dreamerv3-flax" in source for source in report.sources)
    assert "| DreamerV3 XL, published | 80k | 3 |" in suite_page.markdown([report], tmp_path / "r.md", "c")
    assert all(table.header[0] == "task" for table in method_tables(load_dmc(tmp_path).methods[0]))


def test_scores_of_demonstrations_are_over_updates(tmp_path: Path):
    """Push-T: max_reward beside published values, which cost no frames either."""
    suite, folder = load_suite("pusht"), SuiteFolder(tmp_path / "pusht")
    for seed, score in ((1, 0.90), (2, 0.92)):
        folder.write(
            {
                "name": f"diffusion_policy_state.keypoints.seed{seed}",
                "method": "diffusion_policy_state",
                "task": "keypoints",
                "seed": seed,
                "status": "done",
                "score": score,
                "score_frames": 0,
                "frames": 0,
                "updates": 200_000,
                "evaluations": [
                    {"frames": 0, "updates": at, "return_mean": 90.0, "max_reward": score}
                    for at in (100_000, 200_000)
                ],
                "final_evaluation": {"return_mean": 91.0, "max_reward": 0.93},
            }
        )
    report = load_report(suite, folder)
    method = report.methods[0]
    (row,) = task_table(method).rows
    assert row[:4] == ["keypoints", "2", "200k updates", "0.91 (0.9 to 0.92)"]
    header = task_table(method).header
    assert row[header.index("Diffusion Policy (U-Net), published")] == "0.91"
    assert row[header.index("new episodes")] == "0.93 (0.93 to 0.93)"
    curve = suite_page.curve_of(method.tasks[0].results[0], method.method)
    assert curve.x.tolist() == [100_000, 200_000] and curve.y.tolist() == [0.9, 0.9]
    assert suite_page.draw_curves(report, tmp_path / "a.png")
    text = suite_page.markdown([report], tmp_path / "r.md", "c")
    assert "2 done, 1 missing of 3 runs. A run's score: max_reward of the last 10 evaluations" in text


def load_dmc(path: Path) -> SuiteReport:
    folder = SuiteFolder(path / "control")
    add(folder, "dog_run", 1, 12.0, status="partial", frames=60_000, score_frames=50_000)
    return load_report(dmc_suite(), folder)


def test_page_and_markdown(folder: SuiteFolder, tmp_path: Path, capsys):
    file = tmp_path / "dmc.yaml"
    suite = {
        "text": "three tasks",
        "methods": {
            "tdmpc2": {
                "title": "TD-MPC2 (5m)",
                "experiment": "tdmpc2_dmc_state",
                "tasks": ["walker_walk", "cheetah_run", "dog_run"],
                "seeds": [1, 2, 3],
                "frames": 100_000,
                "published": ["TD-MPC2"],
            }
        },
    }
    file.write_text(json.dumps(suite))
    assert main(["report", "--suite", str(file), "--results", str(tmp_path)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == folder.path / "report" / "index.html"
    text = page.read_text()
    for expected in (
        "Suite dmc",
        "960.0 (950.0 to 970.0)",
        "inside",
        "data:image/png",
        "NVIDIA H200",
        "out of memory",
    ):
        assert expected in text
    assert (
        main(
            ["report", "--suite", str(file), "--results", str(tmp_path), "--markdown", str(tmp_path / "r.md")]
        )
        == 0
    )
    markdown = (tmp_path / "r.md").read_text()
    assert "| walker_walk | 3 | 100k | 960.0 (950.0 to 970.0) | 961.9 (947.7 to 971.3) | inside |" in markdown
    assert "TD-MPC2 (5m): 6 done, 1 partial, 1 failed, 1 missing of 9 runs" in markdown
    assert "](dmc/curves.png)" in markdown and (folder.path / "curves.png").is_file()
    assert max(len(line) for line in markdown.splitlines() if not line.startswith(("|", "Made by"))) <= 120


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--suite", "dmc_proprio", "--serve"], "--suite cannot be combined"),
        (["--markdown", "x.md"], "--results and --markdown need --suite"),
    ],
)
def test_wrong_options(words: list[str], says: str, capsys):
    assert main(["report", *words]) == 1
    assert says in capsys.readouterr().err


def test_missing_runs_are_grouped_and_seeds_beside_the_plan_are_named(folder: SuiteFolder):
    add(folder, "walker_walk", 0, 940.0)
    suite = dmc_suite(tasks=["walker_walk", "dog_run", "hopper_hop", "fish_swim"])
    (report,) = load_report(suite, folder).methods
    assert absent_lines(report) == [
        "out of memory: seed 2 of dog_run",
        "missing: seed 3 of dog_run",
        "missing: seeds 1, 2, 3 of hopper_hop, fish_swim",
    ]
    assert [result["name"] for result in report.unplanned][-1] == "tdmpc2.walker_walk.seed0"
    assert "seed 0 of walker_walk (done)" in suite_page.unplanned_line(report)
    assert report.counts == {"done": 3, "partial": 1, "failed": 1, "missing": 7}


def test_suites_without_results(tmp_path: Path, capsys):
    assert main(["report", "--suite", "dmc_proprio", "--results", str(tmp_path)]) == 1
    assert f"{tmp_path / 'dmc_proprio'}: no results: run rl-lab suite dmc_proprio" in capsys.readouterr().err
    add(SuiteFolder(tmp_path / "dmc_proprio"), "walker_walk", 1, 950.0)
    words = ["--results", str(tmp_path), "--markdown", str(tmp_path / "r.md")]
    assert main(["report", "--suite", "dmc_vision", "dmc_proprio", *words]) == 0
    text = (tmp_path / "r.md").read_text()
    assert "No results yet." in text and "missing: seed 1 of walker_walk, cheetah_run" in text
    assert "TD-MPC2 (5m): 1 done, 29 missing of 30 runs" in text
    assert not (tmp_path / "dmc_vision").exists()


def test_panels_of_a_figure_are_environments(tmp_path: Path, monkeypatch):
    """State and pixels of one task are two panels; published values far behind ours are only in the table."""
    titles, drawn = [], []
    monkeypatch.setattr(suite_page, "step_axis", lambda axes, ticks: titles.append(axes.get_title()))
    draw = suite_page._draw_reference
    monkeypatch.setattr(
        suite_page, "_draw_reference", lambda axes, ref, *rest: drawn.append((ref, draw(axes, ref, *rest)))
    )
    report = load_report(load_suite("dreamer_settings"), SuiteFolder(DOCS / "suites" / "dreamer_settings"))
    assert suite_page.draw_curves(report, tmp_path / "a.png")
    # Drawn twice: for a page and for a phone.
    assert titles == ["walker_walk (proprio)", "walker_walk (vision)"] * 2 and all(
        shown for _, shown in drawn
    )
    drawn.clear()
    report = load_report(load_suite("carracing"), SuiteFolder(DOCS / "suites" / "carracing"))
    assert suite_page.draw_curves(report, tmp_path / "b.png")
    assert [(ref.frames, shown) for ref, shown in drawn] == [(25_000_000, False)] * 2


def test_results_page_is_what_the_report_writes(tmp_path: Path, monkeypatch):
    """docs/results.md is made from docs/results/suites by the command that its first lines name."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs" / "results.md").read_text()
    words = text.partition("`rl-lab report --suite ")[2].partition("`")[0].split()
    names = words[: words.index("--results")]
    reports = [
        load_report(suite, folder)
        for suite, folder in suite_page.suite_folders(names, Path("docs/results/suites"))
    ]
    assert names == ["all"] and {report.suite.name for report in reports} == set(suite_names())
    assert {path.name for path in Path("docs/results/suites").iterdir()} <= set(suite_names())
    command = f"rl-lab report --suite {' '.join(words)}"
    assert suite_page.markdown(reports, Path("docs/results.md"), command) == text
    assert os.path.getsize(CURVES) < 50_000
