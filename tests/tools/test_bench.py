from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from rl_lab.errors import LabError
from rl_lab.tools import bench

FAKE = '''"""Counts to three.

More words.
"""
import numpy

def run(argv):
    return [
        {"name": "fake/three", "value": numpy.float32(3.0), "unit": "ms"},
        {"name": "fake/bad", "value": float("nan"), "unit": "ms"},
        {"name": "fake/options", "value": len(argv), "unit": "words"},
    ]
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A folder of benchmarks in place of the checkout's."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "fake.py").write_text(FAKE)
    (tmp_path / "benchmarks" / "_help.py").write_text("")
    (tmp_path / "benchmarks" / "empty.py").write_text('"""Has no run."""\n')
    monkeypatch.setattr(bench, "checkout", lambda: tmp_path)
    return tmp_path / "benchmarks"


def run_bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.main(parser.parse_args(arguments))


@pytest.mark.parametrize("first", [True, False])
def test_table_and_json(folder: Path, capsys, first: bool) -> None:
    target = folder / "out" / "fake.json"
    option = ["--json", str(target)]
    assert run_bench(*(option if first else []), "fake", "--size", "3", *([] if first else option)) == 0
    printed = capsys.readouterr().out
    assert "fake/three" in printed and "ms" in printed
    kept = json.loads(target.read_text())
    assert list(kept) == ["benchmark", "commit", "date", "machine", "command", "rows"]
    assert kept["benchmark"] == "fake" and kept["command"] == "rl-lab bench fake --size 3"
    assert {"cpu", "cpus", "gpu", "memory_gib", "python", "torch"} <= set(kept["machine"])
    assert kept["machine"]["cpus"] >= 1 and kept["machine"]["memory_gib"] > 0
    assert kept["rows"] == [
        {"name": "fake/three", "value": 3.0, "unit": "ms"},
        {"name": "fake/bad", "value": None, "unit": "ms"},
        {"name": "fake/options", "value": 2, "unit": "words"},
    ]


def test_unknown_name_suggests_closest(folder: Path) -> None:
    with pytest.raises(LabError, match=r"'fke': there is no benchmark of that name.*Did you mean 'fake'"):
        run_bench("fke")
    for name in ("_help", "../fake", ""):
        with pytest.raises(LabError, match="there is no benchmark"):
            bench.load_benchmark(name)


def test_no_name_lists_benchmarks(folder: Path, capsys) -> None:
    assert run_bench() == 0
    assert capsys.readouterr().out.splitlines() == ["empty  Has no run.", "fake  Counts to three."]


def test_invalid_benchmarks_raise(folder: Path) -> None:
    with pytest.raises(LabError, match=r"no function run\(argv\)"):
        bench.run_benchmark("empty")
    for row in ('{"name": "x", "value": 1.0}', '{"name": "x", "value": "fast", "unit": "ms"}', "3"):
        (folder / "odd.py").write_text(f"def run(argv):\n    return [{row}]\n")
        with pytest.raises(LabError, match="not name, value"):
            bench.run_benchmark("odd")


def test_installed_without_a_checkout(monkeypatch) -> None:
    monkeypatch.setattr(bench, "checkout", lambda: None)
    with pytest.raises(LabError, match="clone the repository"):
        bench.run_benchmark("loop")


def test_loop_benchmark_of_the_checkout() -> None:
    result = bench.run_benchmark("loop", ["--actions", "600", "--repeats", "1"])
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["loop/actions"]["value"] == 600
    overhead = rows["loop/overhead_ms_per_action"]
    assert overhead["unit"] == "ms" and math.isfinite(overhead["value"])
    # The bar is 0.2 ms on a quiet machine (benchmarks/README.md); a busy one gets room, a mistake does not.
    assert 0 < overhead["value"] < 2
    assert rows["loop/scheduler_us_per_action"]["value"] < 1000 * overhead["value"]


def test_data_benchmark_converts_to_a_format_and_back(tmp_path: Path) -> None:
    """Each part in a process of its own; the file of --json has the rows so far, without a file of tensors."""
    words = ["--formats", "npz", "--sizes", "400", "--length", "100", "--batches", "2"]
    scratch = tmp_path / "new" / "scratch"
    result = bench.run_benchmark("data", [*words, "--folder", str(scratch)], tmp_path / "data.json")
    rows = {row["name"]: row["value"] for row in result["rows"]}
    assert rows["data/npz/400_arrays_that_differ"] == 0
    assert {f"data/npz/{work}_400_per_second" for work in ("write", "read", "random_episodes")} < set(rows)
    assert all(value > 0 for name, value in rows.items() if name.endswith("second"))
    assert rows["data/npz/400_bytes_per_row"] > 20
    kept = json.loads((tmp_path / "data.json").read_text())["rows"]
    assert {row["name"] for row in kept} < set(rows)
    assert not [*scratch.iterdir()]
    assert {path.name for path in tmp_path.iterdir()} == {"data.json", "new"}
