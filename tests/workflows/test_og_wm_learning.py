"""World Models learns: the small pixel experiment, from its pictures to a controller that balances."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_lab
from rl_lab.tools.evaluate import evaluate_run

QUIET = [
    "logging.progress=off",
    "logging.tensorboard=false",
    "environment.workers=0",
    "environment.eval.workers=0",
]


@pytest.mark.learning
def test_the_small_pixel_experiment_is_clearly_better_than_random(tmp_path: Path):
    """CartPole from pictures, at most 200 steps: random actions last 22 of them on average."""
    run = rl_lab.train("og_wm_cartpole_pixels", [*QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate_run(run.path, episodes=20, seed=1, video=False)
    assert result["return_mean"] >= 44
