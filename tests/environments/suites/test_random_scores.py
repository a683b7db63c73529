"""Scores of a random agent compared with the published ones; benchmarks/random_scores.py has the protocol and its sources.

Two standard errors of our mean of 30 games is the bar. Seeds are fixed, so these are the numbers of
docs/results/random_scores.json again, and change only with the environments.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from rl_lab.tools.bench import load_benchmark

KEPT = Path(__file__).resolve().parents[3] / "docs" / "results" / "random_scores.json"
# Ours is 1.17 ± 0.26. The published mean is one of 30 games too, and its own error, which is not given, would be as large.
BREAKOUT = pytest.mark.xfail(
    strict=True, reason="1.7 is 2.03 standard errors from our mean, and more in more games"
)


@pytest.fixture(scope="module")
def bench():
    return load_benchmark("random_scores")


@pytest.mark.learning
@pytest.mark.parametrize("game", ["pong", pytest.param("breakout", marks=BREAKOUT), "boxing"])
def test_random_agent_matches_published_scores(bench, game):
    pytest.importorskip("ale_py", reason="extra: atari")
    (row,) = bench.measure(game, episodes=30, seed=0)
    print(f"{game}: {row['value']:.2f} ± {row['standard_error']:.2f}, published {row['published']}")
    assert row["within_two"]


@pytest.mark.learning
def test_random_agent_in_crafter(bench):
    """Beside the authors': reward 1.377 with a deviation of 1.22 (their score file), score 1.6 % (paper)."""
    pytest.importorskip("crafter", reason="extra: crafter")
    reward, score = bench.measure("crafter", episodes=30, seed=0)
    print(f"crafter: {reward['value']:.2f} ± {reward['standard_error']:.2f}, score {score['value']:.2f} %")
    assert reward["published"] == 1.377 and reward["within_two"]
    assert 0.8 < score["value"] < 2.6


def test_quick_run_has_every_row(bench, monkeypatch):
    """Returns and logs go through as they are; games of short episodes do not count more often."""
    returns, logs = bench.random_episodes("dummy/count", 9, seed=1, workers=0, length=3)
    assert returns.tolist() == [6.0] * 9 and all(log["log/steps"] == 3.0 for log in logs)
    row = bench.row("x", returns + np.eye(9)[8] * 9, 6.5)
    assert row["value"] == 7.0 and row["standard_error"] == pytest.approx(1.0) and row["within_two"]


def test_stored_result_matches_protocol(bench):
    kept = json.loads(KEPT.read_text())
    rows = {row["name"].removeprefix("random_scores/"): row for row in kept["rows"]}
    assert {game: rows[game]["published"] for game in bench.PUBLISHED} == bench.PUBLISHED
    assert all(rows[game]["episodes"] == 30 for game in bench.PUBLISHED)
    assert kept["command"] == "rl-lab bench random_scores" and kept["commit"]
