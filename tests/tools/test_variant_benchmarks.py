"""`rl-lab bench tokenizers` and `backbones`: files are written after every variant, and a second call skips those."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rl_lab.errors import ConfigError, LabError
from rl_lab.tools import bench
from rl_lab.tools.bench import ResultFile, load_benchmark, run_benchmark
from rl_lab.utils.checkpoint.safetensors import read_tensors

OPTIONS = ["--updates", "1", "--rows", "200", "--held-out", "200", "--device", "cpu", "--tiny"]


@pytest.fixture(autouse=True)
def one_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "commit", lambda: "abc")


def by_variant(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        *_, variant, key = row["name"].split("/")
        found.setdefault(variant, {})[key] = row["value"]
    return found


def stop_at(module: ModuleType, monkeypatch: pytest.MonkeyPatch, number: int) -> list[Any]:
    """Let the benchmark measure `number` variants, then interrupt it; returns the variants it began."""
    begun, measure = [], module.one_row

    def one_row(options: Any, variant: Any, *more: Any) -> dict[str, Any]:
        begun.append(variant)
        if len(begun) > number:
            raise KeyboardInterrupt
        return measure(options, variant, *more)

    monkeypatch.setattr(module, "one_row", one_row)
    return begun


MEASURED = {
    "token_ce",
    "reward_ce",
    "open_1",
    "open_5",
    "open_15",
    "ms",
    "memory_mb",
    "parameters",
    "seconds",
}


def test_interrupted_tokenizers_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    file, table, figure = (tmp_path / "new" / name for name in ("rows.json", "table.md", "picture.png"))
    options = [*OPTIONS, "--table", str(table), "--figure", str(figure)]
    module, only = load_benchmark("tokenizers"), ["--only", "vq,fsq"]
    begun = stop_at(module, monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        module.run([*options, *only], ResultFile("tokenizers", [*options, *only], file))
    assert len(begun) == 2
    first = json.loads(file.read_text())
    assert first["commit"] == "abc" and set(by_variant(first["rows"])) == {"vq"}
    assert set(by_variant(first["rows"])["vq"]) == MEASURED | {
        "pixel_error",
        "codes_used",
        "code_bits",
        "frame_ce",
    }
    assert all(row["value"] is not None and row["unit"] for row in first["rows"])
    assert table.read_text().count("\n") == 3 and figure.stat().st_size > 1000
    frames = read_tensors(file.with_suffix(".safetensors"))[0]["frames/vq"]
    assert frames.shape == (2, 4, 3, 8, 8) and frames.float().std() > 1

    capsys.readouterr()
    second = run_benchmark("tokenizers", [*options, *only], file)  # what was there is not measured again
    assert "rows.json: has vq" in capsys.readouterr().out
    assert second["rows"][: len(first["rows"])] == first["rows"]
    assert set(by_variant(second["rows"])) == {"vq", "fsq"} and second["rows"] == json_rows(file)
    assert table.read_text().count("\n") == 4 and "| vq |" in table.read_text()
    assert "| IRIS |" in table.read_text()  # notes too
    third = run_benchmark(
        "tokenizers", [*options, "--only", "vq"], file
    )  # other --only: rows of all are kept
    assert third["rows"] == second["rows"]


def json_rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


def test_interrupted_backbones_go_on_with_the_same_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, options = tmp_path / "rows.json", [*OPTIONS, "--only", "gru,frame_at_once"]
    module = load_benchmark("backbones")
    stop_at(module, monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        module.run(options, ResultFile("backbones", options, file))
    first = json_rows(file)
    assert set(by_variant(first)) == {"copy", "real_environment", "gru"}
    before = read_tensors(file.with_suffix(".safetensors"))[0]
    assert any(name.startswith("tokenizer/") for name in before)

    trained: list[str] = []
    module = load_benchmark("backbones")
    train = module.shared.Lab.train
    monkeypatch.setattr(
        module.shared.Lab, "train", lambda lab, part, *more: trained.append(part) or train(lab, part, *more)
    )
    rows = module.run(options, ResultFile("backbones", options, file))
    assert trained == ["world_model"]
    found = by_variant(rows)
    assert [*found] == ["copy", "real_environment", "gru", "frame_at_once"] and json_rows(file) == rows
    assert rows[: len(first)] == first
    assert set(found["frame_at_once"]) == MEASURED | {"frame_ce", "weights"}
    assert found["frame_at_once"]["weights"] >= found["frame_at_once"]["parameters"] > 0
    after = read_tensors(file.with_suffix(".safetensors"))[0]
    assert all(bool((after[name] == value).all()) for name, value in before.items())


def rows_file(file: Path, options: list[str], value: float | None = 1.0) -> ResultFile:
    result = ResultFile("tokenizers", options, file)
    result.write([{"name": "tokenizers/catch/vq/ms", "value": value, "unit": "ms"}], {})
    return result


def results(options: list[str], file: Path) -> Any:
    module = load_benchmark("tokenizers")
    parser = module.make_parser("tokenizers")
    filled = module.filled(parser.parse_args(options))
    variants = module.tokenizer_variants("catch", None)
    return module.Results("tokenizers", parser, filled, variants, ResultFile("tokenizers", options, file))


def test_rows_of_other_calls_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    file, short = tmp_path / "with a space.json", ["--updates", "7"]
    rows_file(file, [*short, "--only", "vq", "--table", "a b.md"])
    assert set(results(short, file).found) == {"vq"} and "vq" not in results(short, file).missing()
    for options, said in (
        ([], "its options are --updates 7"),
        (["--updates", "7", "--seed", "1"], "its options"),
    ):
        capsys.readouterr()
        assert not results(options, file).found
        assert said in capsys.readouterr().out
    monkeypatch.setattr(bench, "commit", lambda: "def")
    assert not results(short, file).found
    assert "its rows are measured again: its commit is abc, now def" in capsys.readouterr().out
    monkeypatch.setattr(bench, "commit", lambda: "")  # no checkout: nobody knows
    rows_file(file, short)
    assert not results(short, file).found


def test_damaged_and_strange_files_are_measured_again(tmp_path: Path, capsys):
    file = tmp_path / "rows.json"
    for text in ("{", "[]", '{"commit": "abc"}', "null"):
        rows_file(file, [])
        file.write_text(text)
        assert not results([], file).found
        assert "rows.json: its rows are measured again" in capsys.readouterr().out
    rows_file(file, [])
    file.with_suffix(".safetensors").write_bytes(b"12")
    assert not results([], file).found
    rows_file(file, [])
    file.with_suffix(".safetensors").unlink()
    assert not results([], file).found


def test_failed_variants_are_measured_again(tmp_path: Path):
    file = tmp_path / "rows.json"
    one = ResultFile("tokenizers", [], file)
    one.write([{"name": "tokenizers/catch/vq/failed", "value": 1, "unit": "variant"}], {})
    assert "vq" in results([], file).missing()
    rows_file(file, [], value=float("nan"))  # what was not measured stays so
    kept = results([], file)
    assert kept.found["vq"]["ms"] != kept.found["vq"]["ms"] and "vq" not in kept.missing()


def test_pictures_show_the_first_of_the_longest_sequences():
    shown = load_benchmark("tokenizers").Lab.shown
    lengths = torch.tensor([2, 12, 20, 20])
    real = torch.arange(20) < lengths[:, None]
    assert shown(None, real) == (2, [1, 5, 10, 15])
    assert shown(None, real[:2]) == (1, [1, 5, 10, 11])


def test_unknown_variants_are_refused():
    with pytest.raises(ConfigError, match=r"--only is 'vqq'.*Did you mean 'vq'"):
        run_benchmark("tokenizers", ["--only", "vqq"])


def test_other_rows_than_variants_are_refused_when_written(tmp_path: Path):
    with pytest.raises(LabError, match="returned a row that is not name, value"):
        ResultFile("tokenizers", [], tmp_path / "rows.json").write([{"name": "x"}], {})
