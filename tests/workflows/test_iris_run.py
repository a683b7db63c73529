"""IRIS' runs: resumed equals never stopped, stored episodes train without collecting, and the benchmark runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from same_run import assert_same

import rl_lab
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.tools.bench import run_benchmark
from rl_lab.training import resume
from rl_lab.utils.checkpoint import CheckpointManager

QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny", "training.total_timesteps=120"]
QUIET += ["training.evaluate.every_env_steps=null", "training.report.every_env_steps=null"]

# Whole runs: minutes on two cores.
pytestmark = pytest.mark.learning


@pytest.mark.parametrize("name", ["iris_catch", "delta_iris_catch"])
def test_half_and_half_equals_the_whole(name: str, tmp_path: Path, monkeypatch):
    """Codebooks, slow copies and the counts of drawn episodes included."""
    rl_lab.train(name, [*QUIET, f"run_dir={tmp_path / 'whole'}"])
    with monkeypatch.context() as patch:
        do = Orchestrator.do

        def stop_late(self, action, phase):
            do(self, action, phase)
            self.interrupted = self.scheduler.totals["env_steps"] >= 90  # in the middle of an epoch

        patch.setattr(Orchestrator, "do", stop_late)
        half = rl_lab.train(name, [*QUIET, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    states = [CheckpointManager(tmp_path / run / "checkpoints").load().state for run in ("whole", "half")]
    assert_same(*states)
    assert "episodes:world_model" in str(states[0]["storage"])  # how often each episode was drawn


def test_another_runs_episodes_and_its_frozen_tokenizer(tmp_path: Path):
    """No environment step: the tokenizer is loaded and stays as it is, the other parts learn from stored episodes."""
    stored = rl_lab.train("iris_catch", [*QUIET, f"run_dir={tmp_path / 'stored'}"])
    words = ["+buffer@buffers.offline=offline_episodes", f"buffers.offline.path={stored.path}"]
    words += [f"load.path={stored.path}", "load.components=[tokenizer]"]
    phase = "name: learn, type: offline, buffer: offline, freeze: [tokenizer], duration_cycles: 2"
    words += [f"training.phases=[{{{phase}, workflow_hooks: [update_world_model, update_actor_critic]}}]"]
    run = rl_lab.train("iris_catch", [*QUIET, *words, f"run_dir={tmp_path / 'learned'}"])
    assert run.counters["updates"] == 4 and run.counters["env_steps"] == 0
    before, after = (
        CheckpointManager(tmp_path / name / "checkpoints").load().state["components"]
        for name in ("stored", "learned")
    )
    assert all(torch.equal(value, after["tokenizer"][key]) for key, value in before["tokenizer"].items())
    assert any(
        not torch.equal(value, after["world_model"][key]) for key, value in before["world_model"].items()
    )


def test_the_benchmark_runs():
    options = ["--case", "delta_atari", "--tiny", "--updates", "1", "--device", "cpu"]
    rows = {row["name"]: row["value"] for row in run_benchmark("iris", options)["rows"]}
    for part in ("tokenizer", "world_model", "actor_critic"):
        assert rows[f"iris/delta_atari/{part}_ms"] > 0
        assert rows[f"iris/delta_atari/{part}_parity"] < 1e-5
