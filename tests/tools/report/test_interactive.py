"""Interactive plots without a browser: the curves that a page holds, and what is said without plotly."""

from __future__ import annotations

import argparse
import base64
import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl_lab.run_folder import RunFolder
from rl_lab.tools.report import command as report
from rl_lab.tools.report import interactive
from rl_lab.tools.report.curves import Metrics
from rl_lab.tools.report.runs import load_runs

MakeRun = Callable[..., Path]


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of plotly.js."""
    file = tmp_path / "plotly.min.js"
    file.write_text("window.Plotly = {};")
    monkeypatch.setattr(interactive, "library", lambda: file)
    return file


def unpacked(page: str, name: str) -> str:
    (text,) = re.findall(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    return gzip.decompress(base64.b64decode(text)).decode()


def test_page_holds_library_and_curves(make_run: MakeRun, library: Path, tmp_path: Path) -> None:
    runs = [make_run(seed=seed, lines=12) for seed in (0, 1)]
    index, *pictures = report.write_report(runs, out=tmp_path / "report")
    page = index.read_text()
    assert unpacked(page, "chart-library") == library.read_text()
    data = json.loads(unpacked(page, "chart-data"))
    assert [run["label"] for run in data["runs"]] == ["dreamer_cartpole, seed 0", "dreamer_cartpole, seed 1"]
    assert data["several"] and data["runs"][0]["color"] == data["runs"][1]["color"]
    assert data["runs"][0]["x"]["step"][-1] == 20_000 and data["runs"][0]["x"]["seconds"][0] == 0
    (specs,) = [re.findall(r'data-chart="([^"]+)"', page)]
    keys = {key for spec in specs for key in json.loads(spec.replace("&quot;", '"'))["keys"]}
    assert keys >= {"collect/return_mean", "eval/return_mean", "train/loss/reward", "time/updates_per_second"}
    assert not re.search(r"""(src|href)\s*=\s*["']?\s*(https?:)?//""", page), "no address of another site"
    # The pictures are still written, for papers; the page shows only those that are not interactive.
    names = {picture.name for picture in pictures}
    assert {"curve.png", "metrics_train.png", "speed.png", "aggregates.png"} <= names
    assert page.count('class="plot"') == len(names) - len({"curve", "speed"}) - sum(
        "metrics" in n for n in names
    )


def test_static_page_on_request(make_run: MakeRun, library: Path) -> None:
    page = report.write_report([make_run(lines=12)], interactive=False)[0].read_text()
    assert "chart-data" not in page and "pip install" not in page and 'alt="curve"' in page


def test_without_plotly_one_line_says_what_to_install(make_run: MakeRun, capsys) -> None:
    run = make_run(lines=2, media=False)
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    assert report.main(parser.parse_args([str(run)])) == 0
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert "pip install" in line and "report]" in line and "pip" not in output.out
    page = (run / "report" / "index.html").read_text()
    assert "pip install" in page and "<script" not in page


def test_library_is_that_of_the_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the fixture of this folder
    package = tmp_path / "plotly"
    (package / "package_data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plotly", raising=False)
    assert interactive.library() is None, "a package without the file"
    (package / "package_data" / "plotly.min.js").write_text("// here")
    assert interactive.library() == package / "package_data" / "plotly.min.js"


def test_long_curves_are_averaged_and_odd_values_left_out() -> None:
    count = 3 * interactive.MOST_POINTS + 1
    rows: list[dict[str, Any]] = [
        {"step": i + 1, "frames": 2 * i, "updates": i, "time": 100.0 + i, "a": float(i)} for i in range(count)
    ]
    rows[0]["a"] = float("nan")
    rows[4]["b"] = 7.25
    x, y = interactive.curves(Metrics(rows))
    bucket = 4
    assert len(x["step"]) == -(-count // bucket) <= interactive.MOST_POINTS
    assert x["step"][:2] == [4, 8] and x["step"][-1] == count
    lines, values = y["a"]
    assert (
        lines is None and values[0] == pytest.approx(np.mean([1, 2, 3])) and values[1] == pytest.approx(5.5)
    )
    assert y["b"] == [[1], [7.25]]
    short = Metrics(
        [{"step": 1, "a": 1.0}, {"step": 2, "a": True, "b": float("inf")}, {"step": "x", "a": 3.0}]
    )
    x, y = interactive.curves(short)
    assert x["step"] == [1, 2] and x["seconds"] == [None, None] and y == {"a": [[0], [1]]}
    assert interactive.curves(Metrics([]))[1] == {}


def test_wall_time_has_no_pauses() -> None:
    times = [0.0, 10.0, 20.0, 5000.0, 5010.0]
    metrics = Metrics([{"step": i, "time": at} for i, at in enumerate(times)])
    assert metrics.elapsed(metrics.rows).tolist() == [0, 10, 20, 20, 30]
    assert metrics.seconds() == 30
    unknown = metrics.elapsed([{"time": 1.0}, {}, {"time": 3.0}])
    assert unknown[[0, 2]].tolist() == [0, 2] and np.isnan(unknown[1])


def test_evaluations_are_points(make_run: MakeRun) -> None:
    folder = make_run(lines=5, media=False)
    result = {
        "step": 9006,
        "return_mean": 350.5,
        "return_intervals": {"mean": [338.0, 389.0]},
        "episodes": 20,
    }
    (folder / "report").mkdir()
    (folder / "report" / "eval_000009006_seed1.json").write_text(json.dumps(result))
    (folder / "report" / "eval_000009007_seed1.json").write_text("{}")
    (run,) = load_runs([RunFolder(folder)])
    assert interactive.evaluated(run) == [
        {"step": 9006.0, "mean": 350.5, "low": 338.0, "high": 389.0, "episodes": 20}
    ]
