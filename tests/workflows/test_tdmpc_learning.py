"""TD-MPC learns: a toy in seconds here, and (marked `learning`) a pendulum and a pole."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_lab
from rl_lab.tools.evaluate import evaluate

QUIET = ["logging.progress=off", "logging.tensorboard=false", "environment.workers=0"]
SMALL = ["algorithm.batch_size=32", "algorithm.learning_rate=3e-3", "algorithm.discount=0.5"]
SMALL += ["algorithm.plan.samples=48", "algorithm.plan.iterations=3", "algorithm.horizon=2"]
SMALL += ["algorithm.seed_steps=200", "algorithm.pretrain_updates=150", "algorithm.updates_per_env_step=0.5"]


def test_learns_continuous_cue(tmp_path: Path):
    """dummy/continuous: random actions get 1.4, the best 10."""
    words = ["environment=dummy_continuous", *SMALL, *QUIET, "training.total_timesteps=500"]
    words += ["training.evaluate.every_env_steps=500", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("tdmpc2_pendulum", words)
    assert run.eval_return_mean is not None and run.eval_return_mean > 6


@pytest.mark.learning
def test_learns_discrete_cue(tmp_path: Path):
    """dummy/discrete, by planning over categoricals: random actions get 1.3, the best 10."""
    words = ["environment=dummy_discrete", *SMALL, *QUIET, "training.total_timesteps=500"]
    words += ["phases=seeded", "environment.action_repeat=1"]
    words += ["training.evaluate.every_env_steps=500", f"run_dir={tmp_path / 'run'}"]
    run = rl_lab.train("tdmpc2_cartpole", words)
    assert run.eval_return_mean is not None and run.eval_return_mean > 6


@pytest.mark.learning
@pytest.mark.parametrize("name", ["tdmpc2_pendulum", "tdmpc2_pendulum_identity"])
def test_swings_up_pendulum(name: str, tmp_path: Path):
    """Random actions get about -1,200, a good controller -150."""
    run = rl_lab.train(name, [*QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate(run.path, checkpoint="best", episodes=20, seed=1)
    assert result["return_mean"] > -250


@pytest.mark.learning
def test_balances_pole_with_discrete_planner(tmp_path: Path):
    """Random actions get about 20, the best 500; three seeds had 498 and more over their last five evaluations."""
    run = rl_lab.train("tdmpc2_cartpole", [*QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate(run.path, checkpoint="last", episodes=20, seed=1)
    assert result["return_mean"] > 450
