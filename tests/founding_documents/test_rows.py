"""Tries the statements of the founding documents that rows.yaml lists: none is told partly or wrongly."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from omegaconf import DictConfig, OmegaConf

import rl_lab
from rl_lab.cli import main
from rl_lab.config.compose import compose_config

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = yaml.safe_load(Path(__file__).with_name("rows.yaml").read_text(encoding="utf-8"))
ENTRIES = [(document, entry) for document, entries in DOCUMENTS.items() for entry in entries]
# Statements of each document in the audit.
COUNTS = {"delta_iris": 42, "architecture": 155, "dreamerv3": 57, "iris": 33, "dreamerv3_torch": 29}
DESCRIPTION = {"line", "what", "rows", "has", "says", "frozen"}
TRIES = {"train", "refused", "import", "fields", "file", "run", "checkpoint", "metrics", "page", "test"}
NOT_TRIED = {"later", "needs"}
PAGES = " ".join(
    " ".join((ROOT / "docs" / "howto" / name).read_text(encoding="utf-8").split())
    for name in ("coming_from.md", "new_algorithm.md")
)


def many(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def dotted(names: Any) -> list[str]:
    """Names to import; a mapping has a module or class -> its attributes."""
    if not isinstance(names, dict):
        return many(names)
    return [f"{owner}.{name}" for owner, attributes in names.items() for name in many(attributes)]


@functools.cache
def known_tests() -> set[str]:
    """Names of all test functions."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)}


@functools.cache
def composed(words: str) -> DictConfig:
    return compose_config(shlex.split(words))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    words = ["debug=tiny", "logging.progress=off", f"run_dir={folder}"]
    rl_lab.train("dreamer_cartpole", words, say=lambda line: None)
    return folder


def test_every_statement_is_listed() -> None:
    counts = {name: sum(entry.get("rows", 1) for entry in DOCUMENTS[name]) for name in COUNTS}
    assert counts == COUNTS and sum(counts.values()) == 316
    assert [entry["line"] for entry in DOCUMENTS["behaves_badly"]] == list(range(1, 20))


@pytest.mark.parametrize(
    ("document", "entry"), ENTRIES, ids=[f"{name}:{entry['line']} {entry['what']}" for name, entry in ENTRIES]
)
def test_statement(
    document: str, entry: dict[str, Any], request: Any, tmp_path: Path, monkeypatch, capsys
) -> None:
    assert set(entry) <= DESCRIPTION | TRIES | NOT_TRIED and set(entry) & (TRIES | NOT_TRIED)
    monkeypatch.chdir(tmp_path)
    for words in many(entry.get("train", [])):
        config = composed(words)
        for path, value in entry.get("has", {}).items():
            assert OmegaConf.select(config, path) == value, path
    for words in many(entry.get("refused", [])):
        assert main(["train", *shlex.split(words)]) == 1
        shown = capsys.readouterr().err.splitlines()
        assert len(shown) == 1 and shown[0].startswith("error: ") and entry["says"] in shown[0]
    for name in dotted(entry.get("import", [])):
        found(name)
    for name, fields in entry.get("fields", {}).items():
        kind = found(name)
        assert set(fields) <= {field.name for field in dataclasses.fields(kind)}
        assert kind.__dataclass_params__.frozen or not entry.get("frozen")
    for path in many(entry.get("file", [])):
        assert (ROOT / path).exists(), path
    for words in many(entry.get("page", [])):
        assert words in PAGES
    assert set(many(entry.get("test", []))) <= known_tests()
    if set(entry) & {"run", "checkpoint", "metrics"}:
        tried_in(request.getfixturevalue("run"), entry)


def found(name: str) -> Any:
    """Return the module, class or attribute of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            result: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            result = getattr(result, part)
        return result
    raise AssertionError(f"{name} cannot be imported")


def tried_in(run: Path, entry: dict[str, Any]) -> None:
    for path in many(entry.get("run", [])):
        assert (run / path).exists(), path
    if "checkpoint" in entry:
        state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
        assert set(entry["checkpoint"]) <= set(state)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    logged = {key for line in lines for key in json.loads(line)}
    for prefix in many(entry.get("metrics", [])):
        assert any(key.startswith(prefix) for key in logged), prefix
