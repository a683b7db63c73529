"""Run folders of an earlier commit can be evaluated, resumed, reported and played with the current code."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.cli import main

ARCHIVE = Path(__file__).parent / "fixtures" / "run_8f4d770" / "runs.tar.xz"
# run -> its last step, its updates, updates when it goes on to step 120, its hooks
RUNS = {
    "dreamer_cartpole": (61, 13, 28, {"collect", "update"}),
    "tdmpc2_cartpole": (61, 7, 13, {"collect", "update"}),
    "iris_catch": (
        100,
        9,
        12,
        {"collect", "update_tokenizer", "update_world_model", "update_actor_critic"},
    ),
}
# keys that every algorithm got at 8f4d770, and this one does not read
DROPPED = {
    "dreamer_cartpole": ("epochs", "stages", "plan", "size.encoder_units"),
    "tdmpc2_cartpole": ("epochs", "batch_length", "train_ratio", "size.deter"),
    "iris_catch": ("batch_size", "batch_length", "train_ratio", "evolution", "size.hidden"),
}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with a copy of every run."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path)  # our own archive; Python 3.11.2 has no `filter`
    return tmp_path


def last_state(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    return state


@pytest.mark.parametrize("name", RUNS)
def test_old_run_resumes(name: str, runs: Path, capsys: pytest.CaptureFixture[str]):
    step, updates, later_updates, hooks = RUNS[name]
    before = last_state(runs / name)
    rows_before = (runs / name / "metrics.jsonl").read_text().splitlines()
    assert before["phase_state"]["totals"]["updates"] == updates
    assert main(["resume", str(runs / name), "training.total_timesteps=120"]) == 0
    out = capsys.readouterr().out
    assert f"resumed at step {step} from" in out
    (line,) = [line for line in out.splitlines() if "dropped from the saved config" in line]
    assert all(f"algorithm.{key}" in line for key in DROPPED[name]) and "algorithm.entropy" not in line
    after = last_state(runs / name)
    assert after["phase_state"]["totals"]["env_steps"] in (120, 121)
    assert after["phase_state"]["totals"]["updates"] == later_updates
    assert set(after["phase_state"]["hook_calls"]) == hooks
    for group in ("components", "controllers"):
        assert after[group].keys() == before[group].keys()
        for part, tensors in before[group].items():
            assert after[group][part].keys() == tensors.keys()
            trained = [
                key for key, value in tensors.items() if not torch.equal(value, after[group][part][key])
            ]
            assert trained, f"{group}.{part} has not changed"
    rows = (runs / name / "metrics.jsonl").read_text().splitlines()
    assert rows[: len(rows_before)] == rows_before
    assert json.loads(rows[-1])["step"] >= 120


@pytest.mark.parametrize("name", RUNS)
def test_old_run_eval_script(name: str, runs: Path, monkeypatch: pytest.MonkeyPatch):
    script = runs / name / "scripts" / "eval.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--episodes", "3", "--no-video"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0
    result = json.loads((runs / name / "report" / "eval.json").read_text())
    assert result["experiment"] == name
    assert result["step"] == RUNS[name][0]
    assert len(result["returns"]) == 3
    assert all(1 <= length <= 20 for length in result["lengths"])


@pytest.mark.parametrize("checkpoint", ["last", "best"])
def test_old_agent_has_saved_weights(checkpoint: str, runs: Path):
    run = runs / "dreamer_cartpole"
    stored = torch.load(run / "checkpoints" / f"{checkpoint}.pt", weights_only=True)["controllers"]["actor"]
    agent = rl_lab.load_agent(run, checkpoint=checkpoint)
    loaded = dict(agent.workflow.context.controller_manager.modules())["actor"].state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], stored[key]) for key in stored)
    assert agent.act(np.zeros(4, dtype=np.float32)) in (0, 1)


def test_report_on_old_runs(runs: Path):
    names = list(RUNS)
    out = runs / "page"
    assert main(["report", *(str(runs / name) for name in names), "--out", str(out), "--keys", "eval/*"]) == 0
    page = (out / "index.html").read_text()
    assert all(name in page for name in names)
    assert "17.0 ± 3" in page and "17.0 at 51" in page  # dreamer_cartpole's evaluation
    assert (out / "curve.png").stat().st_size > 1000


def test_old_agent_in_world_model_env(runs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    run = runs / "iris_catch"
    assert main(["play", str(run), "-a", "--video", "--steps", "5", "--ends", "never", "--seed", "1"]) == 0
    (film,) = (run / "media" / "recordings").glob("*_dream_*.mp4")
    assert film.stat().st_size > 0
    with np.load(film.with_suffix(".npz")) as episode:
        assert len(episode["actions"]) == 5


def test_old_run_play_script_writes_video(runs: Path):
    run = runs / "dreamer_cartpole"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    result = subprocess.run(
        [str(run / "scripts" / "play.sh"), "--video", "--steps", "4"],
        env={**os.environ, "SDL_VIDEODRIVER": "dummy", "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    (film,) = (run / "media" / "recordings").glob("*_real_*.mp4")
    assert film.stat().st_size > 0
