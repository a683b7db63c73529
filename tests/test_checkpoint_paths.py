"""Relative paths to checkpoints: every place that takes one, from any current folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

import rl_lab
from rl_lab.agent import checkpoint_path
from rl_lab.cli import main
from rl_lab.errors import CheckpointError, LabError
from rl_lab.run_folder import RunFolder, find_run
from rl_lab.training import resume
from rl_lab.utils.checkpoint.loading import load_checkpoint
from rl_lab.utils.checkpoint.manager import CheckpointManager

TINY = ["debug=tiny", "training.total_timesteps=40", "logging.progress=off", "logging.tensorboard=false"]
TINY += ["training.evaluate.every_env_steps=40", "training.report.every_env_steps=null"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """The folder with a run in runs/one."""
    root = tmp_path_factory.mktemp("paths")
    rl_lab.train("dreamer_cartpole", [*TINY, f"run_dir={root / 'runs' / 'one'}"])
    return root


@pytest.mark.parametrize("path", ["runs/one", "runs/one/checkpoints", "runs/one/checkpoints/last.pt"])
@pytest.mark.parametrize("weights", [False, True])
def test_relative_path_of_run_folder_and_file(path: str, weights: bool, root: Path, monkeypatch):
    monkeypatch.chdir(root)
    loaded = load_checkpoint(path, weights=weights)
    assert loaded.path.is_absolute()
    assert loaded.step == 40


def test_home_folder_and_parent_folder(root: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(root))
    monkeypatch.chdir(root / "runs" / "one" / "media")
    assert load_checkpoint("~/runs/one").step == 40
    assert load_checkpoint("../checkpoints/best.pt", weights=True).step == 40
    with pytest.raises(CheckpointError, match=r"nowhere\.pt: there is no checkpoint"):
        load_checkpoint("~somebody/nowhere.pt")


def test_manager_with_relative_folder(root: Path, monkeypatch):
    monkeypatch.chdir(root)
    assert CheckpointManager(Path("runs/one/checkpoints")).load().step == 40


def test_load_agent_and_agent_load(root: Path, monkeypatch):
    monkeypatch.chdir(root)
    agent = rl_lab.load_agent("runs/one/checkpoints/last.pt", device="cpu")
    assert agent.act(np.zeros(4, np.float32)) in (0, 1)
    assert "components.encoder" in agent.load("runs/one/checkpoints/best.pt")
    assert rl_lab.load_agent("runs/one", checkpoint="runs/one/checkpoints/best.pt").step == 40
    monkeypatch.chdir(root / "runs" / "one" / "checkpoints")
    assert find_run("last.pt", Path("outputs")).path == root / "runs" / "one"
    assert rl_lab.load_agent("last.pt").step == 40
    assert agent.load("last.pt")


def test_checkpoint_name_is_also_a_path_in_the_run_folder(root: Path, monkeypatch, tmp_path: Path):
    folder = RunFolder(root / "runs" / "one")
    monkeypatch.chdir(tmp_path)  # the run is elsewhere
    assert checkpoint_path(folder, "checkpoints/best.pt") == folder.checkpoints / "best.pt"
    with pytest.raises(CheckpointError, match=r"no checkpoint 'checkpoints/bset\.pt'"):
        checkpoint_path(folder, "checkpoints/bset.pt")


def test_eval_in_the_run_folder(root: Path, monkeypatch):
    monkeypatch.chdir(root / "runs" / "one")
    assert main(["eval", ".", "--checkpoint", "checkpoints/best.pt", "--episodes", "1"]) == 0
    assert main(["eval", "checkpoints/last.pt", "--episodes", "1"]) == 0


def test_load_path_and_resume_path(root: Path, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(root)
    words = [*TINY, "experiment.seed=1", "load.path=runs/one"]
    run = rl_lab.train("dreamer_cartpole", [*words, f"run_dir={tmp_path / 'loaded'}"])
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    assert saved["load"]["path"] == str(root / "runs" / "one")
    # The same command again, and a resume from another folder.
    rl_lab.train("dreamer_cartpole", [*words, f"run_dir={tmp_path / 'loaded'}"])
    monkeypatch.chdir(tmp_path)
    assert resume("loaded", ["training.total_timesteps=44"]).counters["env_steps"] >= 44

    monkeypatch.chdir(root)
    longer = [*TINY, "training.total_timesteps=44", "training.resume_path=runs/one/checkpoints/last.pt"]
    resumed = rl_lab.train("dreamer_cartpole", [*longer, f"run_dir={tmp_path / 'resumed'}"])
    assert resumed.counters["env_steps"] == 44
    source, new = (
        torch.load(path / "checkpoints" / "last.pt", weights_only=True)["global_step"]
        for path in (root / "runs" / "one", resumed.path)
    )
    assert (source, new) == (40, 44)


def test_resume_does_not_read_the_loaded_weights_again(root: Path, monkeypatch, tmp_path: Path):
    """They are part of the checkpoint, and the other run may have been deleted since."""
    copy = tmp_path / "copy.pt"
    copy.write_bytes((root / "runs" / "one" / "checkpoints" / "best.pt").read_bytes())
    run = rl_lab.train("dreamer_cartpole", [*TINY, f"load.path={copy}", f"run_dir={tmp_path / 'run'}"])
    copy.unlink()
    assert resume(run.path, ["training.total_timesteps=44"]).counters["env_steps"] >= 44


def test_missing_paths_are_named(root: Path, monkeypatch, capsys):
    monkeypatch.chdir(root)
    for word in ("load.path=runs/two", "training.resume_path=runs/two/checkpoints/last.pt"):
        assert main(["train", *TINY, word]) == 1
        assert "runs/two" in capsys.readouterr().err
    with pytest.raises(LabError, match="runs/two is not a run"):
        rl_lab.load_agent("runs/two")
    assert main(["eval", "runs/one", "--checkpoint", "runs/two/last.pt"]) == 1
    assert "no checkpoint 'runs/two/last.pt'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["eval", "resume", "report", "export"])
def test_mistyped_folder_in_a_run_is_not_the_run(verb: str, root: Path, monkeypatch, capsys):
    monkeypatch.chdir(root)
    assert main([verb, "runs/one/chekpoints"]) == 1
    assert "runs/one/chekpoints is not a run: it does not exist" in capsys.readouterr().err


def test_resume_of_an_older_checkpoint_is_refused(root: Path, tmp_path: Path, monkeypatch, capsys):
    """A run continues from its newest checkpoint; another one is not passed over without a word."""
    shutil.copytree(root / "runs" / "one", tmp_path / "one", symlinks=True)
    monkeypatch.chdir(tmp_path)
    for name in ("last.pt", "step_000000040.pt"):
        assert main(["resume", f"one/checkpoints/{name}"]) == 0
    capsys.readouterr()
    for name in ("best.pt", "step_000000020.pt"):
        assert main(["resume", f"one/checkpoints/{name}"]) == 1
        said = capsys.readouterr().err
        assert f"one/checkpoints/{name}: a run continues from its newest checkpoint" in said
        assert "step_000000040.pt" in said
        assert f"training.resume_path=one/checkpoints/{name}" in said


def test_exported_agent_is_not_resumed(root: Path, tmp_path: Path, capsys):
    """It has no replay: a new run in its folder would take the place of its weights."""
    folder = tmp_path / "agent"
    rl_lab.export(root / "runs" / "one", folder, episodes=0)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert main(["resume", str(folder)]) == 1
    said = capsys.readouterr().err
    assert (
        "is an exported agent and cannot be resumed" in said
        and f"load.path={folder}/agent.safetensors" in said
    )
    assert main(["train", "+experiment=dreamer_cartpole", *TINY, f"run_dir={folder}"]) == 1
    assert "is an exported agent" in capsys.readouterr().err
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    run = rl_lab.train(
        "dreamer_cartpole", [*TINY, f"load.path={folder}/agent.safetensors", f"run_dir={tmp_path / 'new'}"]
    )
    assert run.counters["env_steps"] == 40
