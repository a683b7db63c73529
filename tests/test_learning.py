"""Workflows learn: a toy in seconds here, and (marked `learning`) the default experiment to its published bar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.cli import main
from rl_lab.tools.evaluate import evaluate
from rl_lab.tools.report.curves import Metrics

QUIET = ["logging.progress=off", "logging.tensorboard=false"]


def test_dreamer_learns_cue(tmp_path: Path):
    """dummy/discrete: a random policy gets 1.3, the best 10. Six seeds of six got more than 8.5."""
    words = [
        "environment=dummy_discrete",
        "environment.workers=0",
        "algorithm.batch_size=8",
        "algorithm.batch_length=8",
    ]
    words += ["algorithm.imagination_last=4", "algorithm.imagination_horizon=5", "algorithm.train_ratio=16"]
    words += ["training.total_timesteps=4000", "training.evaluate.every_env_steps=2000"]
    run = rl_lab.train("dreamer_cartpole", [*words, *QUIET, f"run_dir={tmp_path / 'run'}"])
    assert run.eval_return_mean is not None and run.eval_return_mean > 7


@pytest.mark.learning
def test_dreamer_value_of_constant_reward(tmp_path: Path):
    """Reward 1 for ever and a discount of 1 - 1/20: 20. Episodes are cut off, which must not look like an end."""
    words = [
        "environment.task=tests.constant_env:Constant",
        "environment.workers=0",
        "algorithm.discount_horizon=20",
    ]
    words += ["algorithm.batch_size=8", "algorithm.batch_length=8", "algorithm.imagination_horizon=8"]
    words += ["algorithm.imagination_last=4", "algorithm.train_ratio=16", "training.total_timesteps=3600"]
    words += ["training.evaluate.every_env_steps=null"]
    run = rl_lab.train("dreamer_cartpole", [*words, *QUIET, f"run_dir={tmp_path / 'run'}"])
    values = Metrics.read(run.path / "metrics.jsonl").curve("controller/value_mean", over="updates").finite()
    assert 18.0 < values.y[-1] < 21.0


def test_random_policy_does_not_learn_cue(tmp_path: Path):
    words = ["environment=dummy_discrete", "environment.workers=0", "training.total_timesteps=500"]
    run = rl_lab.train("random_cartpole", [*words, *QUIET, f"run_dir={tmp_path / 'run'}"])
    assert run.return_mean is not None and run.return_mean < 3


@pytest.mark.learning
def test_dreamer_learns_with_dynamics_gradient(tmp_path: Path):
    """dummy/continuous: a random policy gets about 1, the best 10."""
    words = ["environment=dummy_continuous", "environment.workers=0", "controllers.actor.gradient=dynamics"]
    words += ["training.total_timesteps=6000", "training.evaluate.every_env_steps=2000"]
    run = rl_lab.train("dreamer_cartpole", [*words, *QUIET, f"run_dir={tmp_path / 'run'}"])
    assert run.eval_return_mean is not None and run.eval_return_mean > 3


@pytest.mark.learning
def test_dreamer_learns_catch_from_pixels(tmp_path: Path):
    """dummy/catch at 16×16: a random policy gets about -1.5, the best 3."""
    run = rl_lab.train("dreamer_catch", [*QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate(run.path, checkpoint="best", episodes=40, seed=1)
    assert result["return_mean"] >= 1.5


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_default_experiment_learns_cartpole(seed: int, tmp_path: Path):
    """At least 400 over 20 fresh episodes, with the checkpoint that did best on others during training."""
    run = rl_lab.train(None, [f"experiment.seed={seed}", *QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate(run.path, checkpoint="best", episodes=20, seed=1)
    assert result["return_mean"] >= 400


def returns_by_step(run: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {int(row["step"]): row["eval/return_mean"] for row in rows if "eval/return_mean" in row}


CATCH = ["--env", "cells=4", "--env", "side=16", "--workers", "0"]


@pytest.mark.learning
def test_cartpole_stays_up(tmp_path: Path):
    """Not one good evaluation: the mean of the last ten. docs/results/dreamer_cartpole_steady.json has ten seeds."""
    words = ["environment.workers=0", "experiment.seed=0", *QUIET, f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("dreamer_cartpole_steady", words)
    returns = Metrics.read(run.path / "metrics.jsonl").curve("eval/return_mean").finite()
    assert len(returns.y) >= 20 and sum(returns.y[-10:]) / 10 >= 475.0


# Presets for any environment, on tasks that they were not tuned on: decisions, and the return that is reached by then.
# docs/results/gym_presets.json has the curves of seed 0.
PRESETS = {
    ("dreamer_gym", "Acrobot-v1"): (20_000, -120.0),  # random -500; solved by -100
    ("dreamer_gym", "Pendulum-v1"): (12_500, -300.0),  # random -1,200
    ("tdmpc2_gym", "InvertedPendulum-v5"): (6_000, 900.0),  # random 6; at most 1,000
    ("tdmpc2_gym", "InvertedDoublePendulum-v5"): (6_000, 5_000.0),  # random 60; at most 9,360
}


@pytest.mark.learning
@pytest.mark.parametrize(("preset", "task"), PRESETS)
def test_presets_learn_tasks_they_were_not_tuned_on(preset: str, task: str, tmp_path: Path):
    """The better of the last two evaluations of 5 (TD-MPC2) or 8 episodes."""
    steps, least = PRESETS[preset, task]
    words = [
        f"training.total_timesteps={steps}",
        "environment.workers=0",
        "training.evaluate.every_env_steps=1000",
    ]
    run = rl_lab.train(preset, [*words, *QUIET, f"run_dir={tmp_path / 'run'}"], env=task)
    returns = list(returns_by_step(run.path).values())
    assert max(returns[-2:]) >= least, returns


@pytest.mark.learning
def test_pretrained_world_model_starts_ahead(tmp_path: Path):
    """After 1,000 steps on Catch: trained first on a random policy's episodes above 1.5, without below 0."""
    data, ends = tmp_path / "data", dict[str, float]()
    words = ["collect", "random", "--task", "dummy/catch", *CATCH, "--episodes", "400", "--out", str(data)]
    assert main(words) == 0
    runs: dict[str, Any] = {"dreamer_catch": [], "dreamer_catch_pretrained": [f"buffers.offline.path={data}"]}
    for name, more in runs.items():
        short = ["training.total_timesteps=1000", "training.evaluate.every_env_steps=500"]
        run = rl_lab.train(name, [*QUIET, *short, *more, f"run_dir={tmp_path / name}"])
        ends[name] = returns_by_step(run.path)[1000]
    assert ends["dreamer_catch_pretrained"] >= 1.5 and ends["dreamer_catch"] <= 0.0, ends


@pytest.mark.learning
@pytest.mark.parametrize("seed", [0, 1])
def test_demonstrations_in_replay_open_the_lock(seed: int, tmp_path: Path):
    """dummy/lock after 1,600 steps: 1 with an expert's episodes in replay, 0 without. 50 s of CPU time for a seed."""
    data = tmp_path / "data"
    words = ["collect", "lock", "--epsilon", "0.1", "--episodes", "50", "--workers", "0", "--out", str(data)]
    assert main(words) == 0
    short = [
        "training.total_timesteps=1600",
        "training.evaluate.every_env_steps=800",
        "environment.workers=0",
    ]
    runs = {"dreamer_lock": [], "dreamer_lock_demonstrations": [f"buffers.offline.path={data}"]}
    ends = {}
    for name, more in runs.items():
        out = [f"experiment.seed={seed}", f"run_dir={tmp_path / name}"]
        ends[name] = rl_lab.train(name, [*QUIET, *short, *more, *out]).eval_return_mean
    assert ends["dreamer_lock_demonstrations"] >= 0.8 and ends["dreamer_lock"] <= 0.2, ends
