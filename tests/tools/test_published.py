from __future__ import annotations

import numpy as np
import pytest

from rl_lab.environments.suites.atari import GAMES as ATARI_57
from rl_lab.environments.suites.atari100k import GAMES as ATARI_100K
from rl_lab.environments.suites.dmc import TASKS as DMC_TASKS
from rl_lab.environments.suites.pusht import TASKS as PUSHT_TASKS
from rl_lab.tools import statistics
from rl_lab.tools.published import Task, benchmarks, normalisation, published


def task(**config: str) -> Task:
    return Task.from_config({f"environment.{key}": value for key, value in config.items()})


def test_task_names():
    assert task(suite="atari100k", task="Ms-Pacman") == Task("atari100k", "ms_pacman")
    assert task(task="atari100k_up_n_down").full_name == "atari100k/up_n_down"
    assert task(task="KungFuMasterNoFrameskip-v4") == Task("atari100k", "kung_fu_master")
    assert task(suite="dmc", task="cup_catch", observe="vision") == Task("dmc", "ball_in_cup_catch", "vision")
    assert task(task="CartPole-v1") == Task("", "CartPole-v1")
    assert task(task="gym:my_env:MyEnv").full_name == "gym:my_env:MyEnv"
    assert Task.from_config({}).name == "unknown"


def test_normalisation():
    pong = normalisation(task(suite="atari", task="pong"))
    assert pong is not None and pong(-20.7) == 0.0 and pong(14.6) == 1.0 and pong.name == "human-normalised"
    assert "baselines.yaml" in pong.source
    walker = normalisation(task(suite="dmc", task="walker_walk"))
    assert walker is not None and walker(500.0) == 0.5
    assert normalisation(task(task="CartPole-v1")) is None
    assert normalisation(task(suite="atari", task="adventure")) is None
    for game in ATARI_57:
        assert normalisation(Task("atari", game)) is not None, game


def test_published_tasks_exist():
    known = {"atari100k": ATARI_100K, "carracing": ["continuous"], "crafter": ["reward"], "dmc": DMC_TASKS}
    known["pusht"] = PUSHT_TASKS
    for block in benchmarks():
        assert set(block.scores) <= set(known[block.suite]), block.agent
        least = {"pusht": 0, "crafter": 40_000}.get(block.suite, 100_000)  # Push-T: demonstrations alone
        assert block.source and block.frames >= least
        if block.suite == "atari100k":
            assert set(block.scores) == set(ATARI_100K)


@pytest.mark.parametrize(
    "block",
    [block for block in benchmarks() if "mean" in block.aggregates],
    ids=lambda b: f"{b.suite} {b.agent}",
)
def test_published_aggregates_match_scores(block):
    """Mean and median are of task means, so the table of means gives them.

    Rounding of the scores moves them.
    """
    scores = [
        np.array([normalisation(Task(block.suite, name))(score)])  # type: ignore[misc]
        for name, score in block.scores.items()
    ]
    assert float(statistics.mean(scores)) == pytest.approx(block.aggregates["mean"], abs=0.015)
    assert float(statistics.median(scores)) == pytest.approx(block.aggregates["median"], abs=0.015)


def test_published_scores_match_observations():
    proprio = published(task(suite="dmc", task="walker_walk", observe="proprio"))
    vision = published(task(suite="dmc", task="walker_walk", observe="vision"))
    assert {(row.agent, row.frames) for row in vision} == {("DreamerV3", 1_000_000), ("TD-MPC2", 1_000_000)}
    assert ("TD-MPC2", 100_000) in {(row.agent, row.frames) for row in proprio}
    assert [row.frames for row in proprio] == sorted(row.frames for row in proprio)
    assert published(task(task="CartPole-v1")) == []


def test_statistics_other_than_returns_are_asked_for_by_name():
    crafter = task(suite="crafter", task="reward")
    scores = {(row.agent, row.frames): row.score for row in published(crafter, "crafter_score")}
    assert scores["DreamerV3 XL", 100_000] == 3.2 and scores["DreamerV2", 1_000_000] == 10.0
    assert ("DreamerV2", 200_000, 5.3) in {(row.agent, row.frames, row.score) for row in published(crafter)}
    assert not {row.score for row in published(crafter)} & set(scores.values())
