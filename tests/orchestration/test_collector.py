"""Rows of the Collector: received together, then the action; resets are not steps; state is exact."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from rl_lab.environments.make import make_env
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.evaluator import Evaluator
from rl_lab.records import ActMode


class Counting:
    """A policy with state: acts by its step count, which `is_first` resets."""

    def __init__(self, num_actions: int = 2) -> None:
        self.num_actions = num_actions

    def initial_policy_state(self, num_envs):
        return {"count": torch.zeros(num_envs, dtype=torch.int64)}

    def act(self, obs, policy_state, is_first, mode):
        count = torch.where(is_first, 0, policy_state["count"] + 1)
        noise = torch.randint(self.num_actions, count.shape, generator=mode.generator)
        return (count + noise) % self.num_actions, {"count": count}, {"memory": count}


def collector_of(workers: int = 0) -> Collector:
    env = make_env("dummy/count", num_envs=3, workers=workers, seed=5, copy=False)
    collector = Collector(env, device="cpu", generator=torch.Generator().manual_seed(1))
    collector.reset()
    return collector


def rows_of(collector: Collector, steps: int) -> list[dict]:
    policy = Counting(collector.environment.spec.num_actions)
    rows = []
    for _ in range(steps):
        result = collector.step(policy, ActMode())
        rows.append(
            {key: np.array(value) for key, value in result.trajectory.items()} | {"steps": result.steps}
        )
    return rows


def test_rows_are_aligned_without_counting_resets():
    collector = collector_of()
    rows = rows_of(collector, 40)
    collector.environment.close()
    assert rows[0]["is_first"].all() and rows[0]["steps"] == 0
    ended_before = np.zeros(3, dtype=bool)
    for row in rows:
        # The counter environment's reward is its step number, and so is its observation.
        counter = row["obs/vector"].reshape(3, -1)[:, 0]
        assert np.array_equal(row["is_first"], (counter == 0))
        assert np.array_equal(row["reward"], counter)
        assert np.array_equal(row["memory"], counter)  # the policy's memory begins with the episode
        assert row["steps"] == int((~row["is_first"]).sum())
        if row is not rows[0]:
            assert np.array_equal(row["is_first"], ended_before)
        ended_before = row["terminated"] | row["truncated"]
        assert (row["action"][ended_before] == 0).all()
    assert any((row["terminated"] | row["truncated"]).any() for row in rows)
    assert collector.tracker.total_episodes == sum(
        int((row["terminated"] | row["truncated"]).sum()) for row in rows
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_state_restores_exactly(workers: int):
    whole = collector_of(workers)
    rows = rows_of(whole, 23)
    whole.environment.close()
    first = collector_of(workers)
    rows_of(first, 11)
    state, noise = first.get_state(), first.generator.get_state()
    first.environment.close()
    second = collector_of(workers)
    assert second.set_state(state) == []
    second.generator.set_state(noise)
    for row, again in zip(rows[11:], rows_of(second, 12)):
        for key in row:
            assert np.array_equal(row[key], again[key]), key
    second.environment.close()


def test_failed_episode_is_counted_without_return():
    collector = collector_of(workers=1)
    said: list[str] = []
    collector.environment.listen(said.append)
    rows_of(collector, 2)
    collector.receive()  # nothing is in flight: the next action is sent to a dead worker, whatever the timing
    os.kill(collector.environment.worker_pids()[0], signal.SIGKILL)
    rows = rows_of(collector, 1)
    assert collector.tracker.lengths.tolist() == [2, 2, 2]
    state = collector.get_state()  # what is in flight is received: the failure is in the checkpoint
    other = collector_of(workers=0)
    assert other.set_state(state) == []
    other.generator.set_state(collector.generator.get_state())
    for each in (collector, other):
        closed, first = rows_of(each, 2)
        assert closed["truncated"].all() and not closed["terminated"].any() and closed["steps"] == 3
        assert not closed["reward"].any() and not closed["is_first"].any() and not closed["action"].any()
        np.testing.assert_array_equal(closed["obs/vector"], rows[-1]["obs/vector"])
        assert first["is_first"].all() and first["steps"] == 0 and not first["memory"].any()
        assert each.tracker.total_episodes == 3 and not each.tracker.history and not each.tracker.drain()
        assert each.environment.restarts == 1
        each.environment.close()
    assert len(said) == 1


def test_rows_are_copies():
    collector = collector_of(workers=2)
    policy = Counting(collector.environment.spec.num_actions)
    result = collector.step(policy, ActMode())
    before = result.trajectory["obs/vector"].clone()
    for _ in range(3):
        collector.step(policy, ActMode())
    assert torch.equal(before, result.trajectory["obs/vector"])
    collector.environment.close()


def test_evaluation_is_deterministic():
    def make(seed, render):
        return make_env("dummy/discrete", num_envs=3, workers=0, seed=seed, render=render, copy=False)

    evaluator = Evaluator(make, device="cpu", seed=7)
    rows = []
    first = evaluator.run(Counting(), episodes=8, label=3, sample=True, video=True, on_rows=rows.append)
    again = evaluator.run(Counting(), episodes=8, label=3, sample=True)
    other = evaluator.run(Counting(), episodes=8, label=4, sample=True)
    assert len(first.episodes) == 8 and rows
    assert first.returns == again.returns
    assert first.seed != other.seed
    assert first.frames and first.frames[0].shape[-1] == 3
    assert first.metrics()["eval/return_mean"] == pytest.approx(np.mean(first.returns))
