"""The workflow of docs/howto/new_algorithm.md, extracted from the page: it learns and resumes exactly."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.cli import main
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import stopped_at

PAGE = Path(__file__).resolve().parents[1] / "docs" / "howto" / "new_algorithm.md"


@pytest.fixture
def project(tmp_path: Path, monkeypatch) -> Path:
    """A project made from the page: every block with the heading `path`: is written to that path."""
    for path, _, block in re.findall(r"^`([\w/.]+)`:\n\n```(\w+)\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "small_q", raising=False)
    return tmp_path


def test_new_algorithm_learns_cartpole(project: Path):
    run = rl_lab.train("small_q_cartpole", ["logging.progress=off", "training.total_timesteps=6000"])
    assert 6000 <= run.counters["env_steps"] < 6004  # four environments; resets are not counted
    assert run.return_mean is not None and run.return_mean > 80  # a random policy gets 22


def test_the_agent_is_evaluated_played_and_loaded(project: Path, capsys):
    """`act` gives all of them, and best.pt; the page teaches it first."""
    words = ["logging.progress=off", "logging.tensorboard=false", "training.total_timesteps=1200"]
    words += ["training.evaluate.every_env_steps=600", "training.evaluate.episodes=2"]
    run = rl_lab.train("small_q_cartpole", words)
    assert (
        (run.path / "checkpoints" / "best.pt").exists() and run.best_step is not None and run.best_step >= 600
    )
    result = rl_lab.evaluate(run.path, checkpoint="best", episodes=3)
    assert len(result["returns"]) == 3
    assert rl_lab.load_agent(run.path).act(np.zeros(4, np.float32)) in (0, 1)
    assert main(["play", str(run.path), "--video", "--steps", "20"]) == 0
    assert ".mp4" in capsys.readouterr().out


def test_new_algorithm_resumes_exactly(project: Path, monkeypatch):
    words = ["logging.progress=off", "logging.tensorboard=false", "training.total_timesteps=1200"]
    whole = rl_lab.train("small_q_cartpole", words)
    with stopped_at(monkeypatch, 700):
        half = rl_lab.train("small_q_cartpole", words)
    assert half.interrupted and half.counters["env_steps"] == 700
    resume(half.path)
    states = [CheckpointManager(run.path / "checkpoints").load().state for run in (whole, half)]
    for name, weights in states[0]["components"]["q_network"].items():
        assert torch.equal(weights, states[1]["components"]["q_network"][name])
    assert states[0]["workflow_custom"] == states[1]["workflow_custom"]
    assert states[0]["phase_state"] == states[1]["phase_state"]
