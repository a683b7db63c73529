"""World Models learns from pixels to balance a pole and to catch balls."""

from __future__ import annotations

from pathlib import Path

import pytest

import rl_lab
from rl_lab.tools.evaluate import evaluate

QUIET = [
    "logging.progress=off",
    "logging.tensorboard=false",
    "environment.workers=0",
    "environment.eval.workers=0",
]


@pytest.mark.learning
@pytest.mark.timeout(1200)
def test_cartpole_pixels_beats_random(tmp_path: Path):
    """CartPole from pixels with action repeat 2: random actions last 18 steps on average."""
    run = rl_lab.train("og_wm_cartpole_pixels", [*QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate(run.path, episodes=20, seed=1, video=False)
    assert result["return_mean"] >= 27


@pytest.mark.learning
@pytest.mark.timeout(900)
def test_catches_balls(tmp_path: Path):
    """Three balls: random actions get -1.8, the best 3."""
    run = rl_lab.train("og_wm_catch", [*QUIET, f"run_dir={tmp_path / 'run'}"])
    result = evaluate(run.path, episodes=40, seed=1, video=False)
    assert result["return_mean"] >= 1.5
