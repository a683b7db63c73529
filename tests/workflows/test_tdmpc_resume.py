"""A resumed run equals an uninterrupted one bit for bit: plans, priorities, slow copies and schedules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.tools.export.card import write_card
from rl_lab.tools.play.library import entries_of
from rl_lab.tools.report import sections
from rl_lab.tools.report.runs import load_runs
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


def _assert_updates_are_named(run: rl_lab.RunResult, evaluations: list[float], capsys) -> None:
    """What names the weights of a run without environment steps names updates: the best were at step 0 otherwise."""
    best = 6 if evaluations[1] >= evaluations[0] else 3
    assert (run.best_step, run.best_updates) == (0, best)
    assert f"best evaluation {max(evaluations):,.1f} at update {best}" in run.summary()[0]
    assert f"finished at update 6, best evaluation {max(evaluations):,.1f}" in repr(run)
    capsys.readouterr()
    words = ["--episodes", "1", "--no-video"]
    for checkpoint, updates in (("last", 6), ("best", best)):
        assert main(["eval", str(run.path), *words, "--checkpoint", checkpoint]) == 0
        printed = capsys.readouterr().out
        assert f"tdmpc2_multitask_offline at update {updates}: " in printed
        known = (
            f"weights of update {updates}, which had" if updates == best else "weights of update 6; best.pt"
        )
        assert known in printed and "step 0" not in printed
    agent = rl_lab.load_agent(run.path)
    assert agent.updates == 6
    card = write_card(run.path, agent, scores=None, dtype="float32", parameters=1)
    assert "weights after 6 updates on stored data." in card.read_text()
    data = load_runs([RunFolder(run.path)])
    facts = {name: more for name, _, more in sections.facts(data[0].summary)}
    assert facts["best evaluation"] == f"at update {best}"
    assert [line.split(", ")[0] for line in data[0].summary.checkpoints][-1].endswith(": update 6")
    rows = sections.evaluation_section(data)[0].tables[0].rows
    assert {row[1] for row in rows} == {"update 6", f"update {best}"}  # each has a file of its own
    texts = [entry.label for entry in entries_of(run.path)]
    assert texts[0] == "last, update 6" and texts[1].startswith(f"best, update {best} (")


def test_the_offline_experiment_trains_on_files_of_mt30(tmp_path: Path, monkeypatch, capsys):
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
    assert len(evaluations) == 2 and None not in evaluations  # after 3 and after 6 updates
    _assert_updates_are_named(run, evaluations, capsys)
    # Files of more tasks than the environment has are refused.
    save(folder / "chunk_1.pt", mt30_episodes(tasks=3), monkeypatch)
    with pytest.raises(LabError, match=r"mt30: episode 0: .task. has shape"):
        rl_lab.train(None, [*words, f"run_dir={tmp_path / 'other'}"])
