"""A resumed run equals an uninterrupted one bit for bit: plans, priorities, slow copies and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.errors import LabError
from rl_lab.training import resume
from rl_lab.utils.files import read_jsonl
from tests.buffers.formats.test_tensordict import save
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


def mt30_episodes(*, tasks: int = 2, episodes: int = 6, rows: int = 21) -> dict[str, torch.Tensor]:
    """Return random episodes of Pendulum-v1 (one action) and dummy/continuous (two) in the layout of mt30.

    Row 0 has the first observation; its action and reward are NaN. Narrower tasks are padded with zeros.
    """
    numbers = torch.arange(episodes)[:, None].expand(episodes, rows) % tasks
    action = torch.rand(episodes, rows, 2) * 2 - 1
    action[..., 1] *= numbers != 0
    reward = torch.randn(episodes, rows)
    action[:, 0] = reward[:, 0] = float("nan")
    obs = torch.randn(episodes, rows, 3)
    return {"obs": obs, "action": action, "reward": reward, "task": numbers.contiguous()}


def test_the_offline_experiment_trains_on_files_of_mt30(tmp_path: Path, monkeypatch):
    """Only stored files: `tdmpc2_multitask_offline` as it is, smaller. NaN in row 0 reaches no loss."""
    torch.manual_seed(0)
    folder = tmp_path / "mt30"
    folder.mkdir()
    for number in range(2):
        save(folder / f"chunk_{number}.pt", mt30_episodes(), monkeypatch)
    words = ["experiment=tdmpc2_multitask_offline", f"buffers.offline.path={folder}", *QUIET]
    words += ["environment.tasks=[Pendulum-v1, dummy/continuous]", "environment.action_repeat=1"]
    words += [
        "algorithm.offline_updates=6",
        "algorithm.evaluate_every=3",
        "training.log.every_env_steps=null",
    ]
    run = rl_lab.train(None, [*words, "training.log.every_updates=1", f"run_dir={tmp_path / 'run'}"])
    assert run.counters["updates"] == 6 and run.counters["env_steps"] == 0
    lines = read_jsonl(run.path / "metrics.jsonl")
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert len(losses) == 6 and torch.tensor(losses).isfinite().all()
    evaluations = [line["eval/return_mean"] for line in lines if "eval/return_mean" in line]
    assert len(evaluations) == 1 and evaluations[0] is not None  # after 3 updates
    # Files of more tasks than the environment has are refused.
    save(folder / "chunk_1.pt", mt30_episodes(tasks=3), monkeypatch)
    with pytest.raises(LabError, match=r"mt30: episode 0: .task. has shape"):
        rl_lab.train(None, [*words, f"run_dir={tmp_path / 'other'}"])
