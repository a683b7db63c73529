"""Kept results of docs/results count as runs of a suite."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rl_lab.cli import main
from rl_lab.errors import ConfigError, LabError
from rl_lab.tools.suite.definition import load_suite
from rl_lab.tools.suite.results import SuiteFolder
from rl_lab.tools.suite.take_in import take_in

DOCS = Path(__file__).resolve().parents[3] / "docs" / "results"


def test_kept_atari_runs_are_listed_as_done(tmp_path: Path, capsys):
    files = [str(DOCS / f"dreamer_{game}_12m.json") for game in ("pong", "krull", "boxing")]
    assert main(["suite", "atari100k", "--folder", str(tmp_path), "--import", *files]) == 0
    assert main(["suite", "atari100k", "--folder", str(tmp_path), "--list"]) == 0
    listed = {
        line.split()[1]: line for line in capsys.readouterr().out.splitlines() if "dreamer_12m  " in line
    }
    assert " done " in listed["pong"] and " done " in listed["krull"]
    # Boxing has another seed than the suite, and ended at 359,744 of 400,000 frames.
    assert "partial (not in the suite)" in listed["boxing"]
    pong = SuiteFolder(tmp_path).read("dreamer_12m.pong.seed1")
    kept = json.loads((DOCS / "dreamer_pong_12m.json").read_text())
    assert pong is not None and pong["score"] == kept["training_episodes_by_frames"]["400000"]
    assert pong["final_evaluation"]["return_mean"] == -4.2 and pong["commit"] == kept["commit"]
    boxing = SuiteFolder(tmp_path).read("dreamer_12m.boxing.seed0")
    assert boxing is not None and boxing["frames"] == 359_744


def test_results_of_another_folder_are_taken(tmp_path: Path):
    suite = load_suite("atari100k")
    first, second = SuiteFolder(tmp_path / "a"), SuiteFolder(tmp_path / "b")
    (line,) = take_in(suite, first, [DOCS / "dreamer_pong_12m.json"])
    assert line == "dreamer_12m.pong.seed1: done, 400,000 frames"
    file = first.result_file("dreamer_12m.pong.seed1")
    assert list(take_in(suite, second, [file])) == [line]
    shorter = {**json.loads(file.read_text()), "frames": 10, "status": "partial"}
    (tmp_path / "short.json").write_text(json.dumps(shorter))
    assert "not taken" in next(take_in(suite, second, [tmp_path / "short.json"]))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "tdmpc2_walker_walk.json",
            "is of experiment tdmpc2_dmc_state .* which no method of suite atari100k has",
        ),
        ("bench_loop.json", r"is of no experiment \(its command names none\)"),
    ],
)
def test_files_of_other_runs_are_refused(name: str, says: str, tmp_path: Path):
    with pytest.raises(LabError, match=says):
        list(take_in(load_suite("atari100k"), SuiteFolder(tmp_path), [DOCS / name]))


def test_other_hyperparameters_are_another_method(tmp_path: Path):
    kept = json.loads((DOCS / "dreamer_pong_12m.json").read_text())
    kept["command"] = kept["command"].replace("size=12m", "size=12m algorithm.entropy=3e-3")
    (tmp_path / "other.json").write_text(json.dumps(kept))
    with pytest.raises(LabError, match=r"with algorithm.entropy=3e-3, size=12m, which no method"):
        list(take_in(load_suite("atari100k"), SuiteFolder(tmp_path), [tmp_path / "other.json"]))


# The *_2023 and *_2024 experiments became the whole agents of these years after these runs.
OLDER = sorted(
    file.name
    for file in DOCS.glob("*.json")
    if re.search(r'"command": ".*experiment=\w+_202[34]\b', file.read_text())
)


@pytest.mark.parametrize("name", ["dreamer_versions", "dmc_vision"])
def test_runs_with_settings_of_a_year_are_not_its_agent(name: str, tmp_path: Path):
    suite, refused = load_suite(name), 0
    for file in OLDER:
        kept = json.loads((DOCS / file).read_text())
        if "curve" in kept:
            with pytest.raises(ConfigError, match=r"suite_method is null|is of method settings_202"):
                list(take_in(suite, SuiteFolder(tmp_path), [DOCS / file]))
            refused += 1
    assert refused == len([file for file in OLDER if "speed" not in file]) > 20


def test_a_kept_run_may_name_its_method(tmp_path: Path):
    (line,) = take_in(load_suite("carracing"), SuiteFolder(tmp_path), [DOCS / "og_wm_carracing_h200.json"])
    assert line == "world_models_short.continuous.seed0: done, 1,755,392 frames"
    result = SuiteFolder(tmp_path).read("world_models_short.continuous.seed0")
    # Of the three evaluations that were kept, the one of the last generation: as the suite's own runs.
    assert result is not None and result["score"] == pytest.approx(665.83, abs=0.01)
    assert result["taken_from"] == "og_wm_carracing_h200.json"


@pytest.mark.parametrize("name", sorted(path.name for path in (DOCS / "suites").iterdir()))
def test_results_that_were_taken_in_are_the_kept_ones(name: str, tmp_path: Path):
    """docs/results/suites has what --import makes of the kept files today."""
    suite, folder = load_suite(name), SuiteFolder(tmp_path)
    for file in sorted((DOCS / "suites" / name / "results").glob("*.json")):
        result = json.loads(file.read_text())
        if "taken_from" in result:
            list(take_in(suite, folder, [DOCS / result["taken_from"]]))
            assert folder.read(result["name"]) == result
