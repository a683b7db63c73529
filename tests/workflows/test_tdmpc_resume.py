"""A resumed run equals an uninterrupted one bit for bit: plans, priorities, slow copies and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_lab
from rl_lab.training import resume
from tests.same_run import assert_same_run, stopped_at

QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny", "training.total_timesteps=40"]
QUIET += ["training.evaluate.every_env_steps=null"]
RUNS = {
    "second_version": ["experiment=tdmpc2_cartpole"],
    "first_version": [
        "experiment=tdmpc_dmc",
        "environment=dummy_continuous",
        "algorithm.plan_schedule.steps=50",
    ],
    "several_tasks": [
        "experiment=tdmpc2_multitask",
        "environment.tasks=[Pendulum-v1, dummy/continuous]",
        "environment.action_repeat=1",
    ],
    "over_the_rssm": ["experiment=dreamer_mpc_cartpole"],
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_is_exact(name: str, tmp_path: Path, monkeypatch):
    words = RUNS[name] + QUIET
    rl_lab.train(None, [*words, f"run_dir={tmp_path / 'full'}"])
    with stopped_at(monkeypatch):
        half = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    assert_same_run(tmp_path / "full", tmp_path / "half")


def test_multitask_offline_training(tmp_path: Path):
    """A multi-task run trains offline on the stored data of another."""
    words = [*RUNS["several_tasks"], *QUIET]
    stored = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'stored'}"])
    phases = "training.phases=[{name: learn, type: offline, duration_updates: 4, workflow_hooks: [update]}]"
    offline = ["~buffers.replay", "+buffer@buffers.offline=offline", f"buffers.offline.path={stored.path}"]
    run = rl_lab.train(None, [*words, *offline, phases, f"run_dir={tmp_path / 'offline'}"])
    assert run.counters["updates"] == 4
