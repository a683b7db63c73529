"""An extension without a fork: wheels of RL Lab and of `examples/extension`, installed in another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl_lab.config import compose as extensions
from rl_lab.config.compose import compose_config, with_search_path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "extension"


def python(*words: str, cwd: Path, **environ: str) -> str:
    result = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environ}
    )
    assert result.returncode == 0, f"{words}\n{result.stdout[-2000:]}\n{result.stderr[-3000:]}"
    return result.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with both wheels unpacked, as `pip install` does; it does not use the checkout."""
    pytest.importorskip("setuptools", minversion="77")
    work = tmp_path_factory.mktemp("extension")
    # Building writes beside the sources, so it is done on copies.
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(EXAMPLE, work / "example", ignore=ignore)
    shutil.copytree(ROOT / "rl_lab", work / "lab" / "rl_lab", ignore=ignore)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, work / "lab")
    quiet = ("--quiet", "--disable-pip-version-check", "--no-deps", "--no-index")
    sources = (str(work / "lab"), str(work / "example"))
    python(
        "-m", "pip", "wheel", *quiet, "--no-build-isolation", "-w", str(work / "wheels"), *sources, cwd=work
    )
    wheels = [str(file) for file in (work / "wheels").glob("*.whl")]
    assert len(wheels) == 2
    python("-m", "pip", "install", *quiet, "--target", str(work / "site"), *wheels, cwd=work)
    return work / "site"


def test_extension_trains_from_wheels(installed: Path, tmp_path: Path):
    site = {"PYTHONPATH": str(installed)}
    where = python(
        "-c",
        "import rl_lab, lab_extension; print(rl_lab.__file__, lab_extension.__file__)",
        cwd=tmp_path,
        **site,
    )
    assert all(Path(file).is_relative_to(installed) for file in where.split())
    listing = python("-m", "rl_lab", "list", cwd=tmp_path, **site)
    for name in ("double_q_corridor", "double_q", "q_network/dueling", "corridor"):
        assert name in listing, name
    words = ["-m", "rl_lab", "train", "+experiment=double_q_corridor", "debug=tiny", "environment.workers=1"]
    output = python(*words, f"run_dir={tmp_path / 'run'}", "logging.progress=off", cwd=tmp_path, **site)
    assert "done: " in output
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("train/loss" in line for line in lines) and any("eval/return_mean" in line for line in lines)
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["components"]["q_network"]["_target_"] == "lab_extension.dueling.DuelingNetwork"
    assert config["_dims"] == {"observation": 3, "action": 2}


@pytest.mark.learning
def test_extension_learns_resumes_and_evaluates(installed: Path, tmp_path: Path):
    site, run = {"PYTHONPATH": str(installed)}, str(tmp_path / "run")
    words = [
        "-m",
        "rl_lab",
        "train",
        "+experiment=double_q_corridor",
        "logging.progress=off",
        f"run_dir={run}",
    ]
    python(*words, "training.total_timesteps=3000", cwd=tmp_path, **site)
    python("-m", "rl_lab", "resume", run, "training.total_timesteps=6000", cwd=tmp_path, **site)
    python("-m", "rl_lab", "eval", run, "--episodes", "20", "--json", "eval.json", cwd=tmp_path, **site)
    assert json.loads((tmp_path / "eval.json").read_text())["return_mean"] > 0.9  # at random about 0


def test_extension_by_search_path(tmp_path: Path, monkeypatch):
    """The same configs by `hydra.searchpath`, by `--config-dir`, and together with the user's ./configs."""
    configs = EXAMPLE / "lab_extension" / "configs"
    words = ["+experiment=double_q_corridor"]
    by_word = compose_config([*words, f"hydra.searchpath=[file://{configs}]"])
    by_folder = compose_config(words, config_dirs=[configs])
    assert by_word == by_folder
    assert by_word.workflow._target_ == "lab_extension.double_q.DoubleQWorkflow"
    (tmp_path / "configs" / "size").mkdir(parents=True)
    (tmp_path / "configs" / "size" / "mine.yaml").write_text("# @package algorithm.size\nunits: 7\n")
    monkeypatch.chdir(tmp_path)
    both = compose_config([*words, f"hydra.searchpath=[file://{configs}]", "size=mine"])
    assert both.algorithm.size.units == 7


def test_folder_names_are_quoted(tmp_path: Path):
    folder = tmp_path / "it's a, [strange] folder = yes"
    (folder / "size").mkdir(parents=True)
    (folder / "size" / "mine.yaml").write_text("# @package algorithm.size\nunits: 7\n")
    assert compose_config(["size=mine"], config_dirs=[folder]).algorithm.size.units == 7


def test_broken_entry_point_warns(monkeypatch):
    class Point:
        name, value = "broken", "no_such_package.configs"

    monkeypatch.setattr(extensions, "entry_points", lambda group: [Point()])
    with pytest.warns(UserWarning, match="no_such_package.configs"):
        assert extensions.config_folders() == []
    with pytest.warns(UserWarning):
        assert compose_config([]).experiment.name == "dreamer_cartpole"


def test_search_path_is_one_override(tmp_path: Path):
    words = with_search_path(["a=1", "hydra.searchpath=[pkg://x, file:///y]"], [tmp_path])
    assert words[0] == "a=1" and len(words) == 2
    assert words[1].startswith("hydra.searchpath=[pkg://x,file:///y,'file://")
