"""Collectors elsewhere, here in this process: the rows of a Collector, staleness, lost collectors, resume."""

from __future__ import annotations

from collections import deque
from itertools import pairwise

import numpy as np
import pytest
import torch

from rl_lab.environments.make import make_env
from rl_lab.errors import CheckpointError, EnvironmentFaultError
from rl_lab.orchestration.collector import Collector
from rl_lab.orchestration.remote_collector import (
    Chunk,
    Order,
    RemoteCollector,
    RemoteEnvironments,
    stacked,
)
from rl_lab.records import ActMode
from tests.orchestration.test_collector import Counting


class Here:
    """A collector in this process with the interface of one elsewhere; `lose()` is the death of its process."""

    def __init__(self, seed: int, num_envs: int, noise: int) -> None:
        env = make_env("dummy/count", num_envs=num_envs, workers=0, seed=seed, copy=False)
        self.collector = Collector(env, device="cpu", generator=torch.Generator().manual_seed(noise))
        self.policy = Counting(env.spec.num_actions)
        self.collector.reset()
        self.orders: list[Order] = []
        self.weights: list[object] = []
        self.waiting: deque[Order] = deque()
        self.lost = ""
        self.killed = False

    def lose(self, why: str = "the process ended") -> None:
        self.lost = why

    def call(self, method: str, weights: object, order: Order) -> None:
        assert method == "collect"
        self.orders.append(order)
        self.weights.append(weights)
        self.waiting.append(order)

    def ready(self, seconds: float = 0.0) -> bool:
        return True

    def result(self, seconds: float | None = None) -> Chunk:
        if self.lost:
            raise ConnectionError(self.lost)
        order = self.waiting.popleft()
        if order.restart:
            self.collector.receive()
            self.collector.reset()
        columns: dict[str, list] = {}
        logs, closed = [], []
        for _ in range(order.steps):
            self.collector.receive()
            assert self.collector.received is not None
            logs.append(dict(self.collector.received.logs))
            closed.append(list(self.collector.received.closed))
            for key, value in self.collector.step(self.policy, order.mode).trajectory.items():
                columns.setdefault(key, []).append(np.array(value))
        return Chunk({k: stacked(v) for k, v in columns.items()}, logs, closed, order.version)

    def kill(self) -> None:
        self.killed = True


class Learner:
    """Updates are counted here; every version of the weights is its number of updates."""

    def __init__(self, num_envs: int = 4, collectors: int = 2, **options) -> None:
        self.updates = 0
        self.published: list[int] = []
        self.said: list[str] = []
        self.started: list[tuple[int, list[int], int]] = []
        self.handles: dict[int, Here] = {}
        self.spec = make_env("dummy/count", num_envs=1, workers=0).spec
        self.collector = RemoteCollector(
            RemoteEnvironments(num_envs, self.spec),
            collectors,
            start=self.start,
            publish=self.publish,
            updates=lambda: self.updates,
            device="cpu",
            say=self.said.append,
            **options,
        )
        self.collector.reset()

    def start(self, number: int, envs: np.ndarray, incarnation: int) -> Here:
        self.started.append((number, envs.tolist(), incarnation))
        self.handles[number] = Here(100 * number + incarnation, len(envs), 1000 + 10 * number + incarnation)
        return self.handles[number]

    def publish(self) -> int:
        self.published.append(self.updates)
        return self.updates

    def step(self, updates: int = 0) -> dict:
        result = self.collector.step(Counting(), ActMode())
        self.updates += updates
        rows = {key: np.array(value) for key, value in result.trajectory.items()}
        return {**rows, "steps": result.steps, "metrics": result.metrics}


def test_rows_are_those_of_a_collector_here():
    learner = Learner(num_envs=3, collectors=1, chunk=7)
    env = make_env("dummy/count", num_envs=3, workers=0, seed=0, copy=False)
    here = Collector(env, device="cpu", generator=torch.Generator().manual_seed(1000))
    here.reset()
    policy = Counting(env.spec.num_actions)
    for _ in range(40):
        far, near = learner.step(), here.step(policy, ActMode())
        assert far["steps"] == near.steps
        for name, values in near.trajectory.items():
            assert np.array_equal(far[name], np.array(values)), name
        assert learner.collector.tracker.drain() == here.tracker.drain()


def test_environments_are_shared_in_order():
    learner = Learner(num_envs=5, collectors=2, chunk=3)
    assert learner.started == [(0, [0, 1, 2], 0), (1, [3, 4], 0)]
    rows = [learner.step() for _ in range(30)]
    assert all(row["reward"].shape == (5,) for row in rows)
    assert rows[0]["is_first"].all() and rows[0]["steps"] == 0 and rows[1]["steps"] == 5
    for before, row in pairwise(rows):
        assert np.array_equal(row["is_first"], before["terminated"] | before["truncated"])


def test_weights_are_published_once_for_all_and_only_if_they_changed():
    learner = Learner(chunk=4)
    for _ in range(12):
        learner.step()
    assert learner.published == [0]
    for _ in range(8):
        learner.step(updates=2)
    assert learner.published == [0, *sorted(set(learner.published[1:]))]
    orders = [[order.version for order in here.orders] for here in learner.handles.values()]
    assert orders[0] == orders[1] and orders[0] == sorted(orders[0])
    assert all(
        weights == order.version
        for h in learner.handles.values()
        for weights, order in zip(h.weights, h.orders)
    )
    assert all(order.mode.generator is None for order in learner.handles[0].orders)


def test_a_row_is_at_most_two_chunks_of_updates_old():
    learner = Learner(chunk=8)
    seen = [learner.step(updates=3)["metrics"]["collect/staleness_max"] for _ in range(60)]
    assert 0 < max(seen) <= 2 * 8 * 3
    assert seen[20:28] != [seen[20]] * 8  # it grows while a chunk is used


def test_chunks_shrink_to_the_limit_of_staleness():
    learner = Learner(chunk=32, max_staleness=12)
    rows = [learner.step(updates=3) for _ in range(120)]
    assert rows[-1]["metrics"]["collect/chunk"] == 12 // (2 * 3)
    assert max(row["metrics"]["collect/staleness_max"] for row in rows) <= 12
    first = rows[-1]["metrics"]["collect/dropped_rows"]
    assert [row["metrics"]["collect/dropped_rows"] for row in rows[60:]] == [
        first
    ] * 60  # none once it is known


def test_a_burst_of_updates_drops_what_waits_and_starts_new_episodes():
    learner = Learner(num_envs=4, collectors=2, chunk=10, max_staleness=50)
    for _ in range(3):
        learner.step()
    learner.updates += 1000  # a long training phase
    row = learner.step()
    assert row["is_first"].all() and row["steps"] == 0
    assert row["metrics"]["collect/staleness_max"] == 0
    # 7 of 10 rows were left of the chunk in use, and the next chunk had arrived.
    assert row["metrics"]["collect/dropped_rows"] == 4 * (7 + 10)
    assert learner.handles[0].orders[-2].restart and not learner.handles[0].orders[-1].restart
    after = learner.step()
    assert after["steps"] == 4 and not after["is_first"].any()


def test_a_lost_collector_is_replaced_and_the_others_go_on():
    learner = Learner(num_envs=4, collectors=2, chunk=5)
    rows = [learner.step() for _ in range(7)]
    learner.handles[0].lose()
    rows += [learner.step() for _ in range(13)]
    # What it had sent is used: rows 5 to 9. Then the replacement begins with first rows.
    assert learner.started[2:] == [(0, [0, 1], 1)]
    assert rows[10]["is_first"][:2].all() and np.array_equal(
        rows[9]["is_first"][:2], rows[8]["terminated"][:2] | rows[8]["truncated"][:2]
    )
    alone = Learner(num_envs=4, collectors=2, chunk=5)
    same = [alone.step() for _ in range(20)]
    assert all(np.array_equal(a["obs/vector"][2:], b["obs/vector"][2:]) for a, b in zip(rows, same))
    assert (
        "collector 0 was lost and is replaced" in learner.said[0] and "the process ended" in learner.said[0]
    )
    assert rows[-1]["metrics"]["collect/collectors_lost"] == 1
    # The return of an episode that the loss ended is not added to the next one.
    lengths = [episode.length for episode in learner.collector.tracker.history if episode.env < 2]
    assert lengths and len(set(lengths)) == 1


def test_a_collector_that_never_answers_ends_the_run():
    learner = Learner(num_envs=2, collectors=1, restarts=2)
    start = learner.start

    def broken(number: int, envs: np.ndarray, incarnation: int) -> Here:
        here = start(number, envs, incarnation)
        here.lose("out of memory")
        return here

    learner.collector.start = broken
    learner.handles[0].lose("out of memory")
    with pytest.raises(
        EnvironmentFaultError, match=r"launch.restarts: collector 0 was lost 3 times.*out of memory"
    ):
        learner.step()
    state = learner.collector.get_state()  # the run can still be saved
    assert state["lost"] == 3


def test_a_collector_that_is_silent_counts_as_lost(monkeypatch):
    from rl_lab.orchestration import remote_collector

    monkeypatch.setattr(remote_collector, "POLL_S", 0.01)
    learner = Learner(num_envs=2, collectors=1, timeout=0.02)
    monkeypatch.setattr(learner.handles[0], "ready", lambda seconds=0.0: False)
    learner.step()
    assert "did not answer for 0.02 s" in learner.said[0] and learner.started[-1][2] == 1


def test_resume_needs_the_learners_checkpoint_alone():
    learner = Learner(num_envs=4, collectors=2, chunk=5)
    for _ in range(17):
        learner.step()
    state = learner.collector.get_state()
    following = [learner.step() for _ in range(5)]
    undisturbed = Learner(num_envs=4, collectors=2, chunk=5)
    same = [undisturbed.step() for _ in range(22)][17:]
    assert all(np.array_equal(a["obs/vector"], b["obs/vector"]) for a, b in zip(following, same))

    resumed = Learner(num_envs=4, collectors=4, chunk=5)  # also with more collectors
    assert resumed.collector.set_state(state) == []
    assert [item[2] for item in resumed.started[4:]] == [1] * 4  # seeds that the stopped run did not use
    row = resumed.step()
    assert row["is_first"].all()
    assert resumed.collector.tracker.total_episodes >= learner.collector.tracker.total_episodes - 20
    with pytest.raises(CheckpointError, match=r"environment\.num_envs=3: the checkpoint has 4 environments"):
        Learner(num_envs=3, collectors=1).collector.set_state(state)


def test_a_local_run_continues_a_remote_one():
    learner = Learner(num_envs=3, collectors=1)
    learner.step()
    env = make_env("dummy/count", num_envs=3, workers=0, seed=0, copy=False)
    here = Collector(env, device="cpu")
    here.reset()
    assert here.set_state(learner.collector.get_state()) == [0, 1, 2]
    assert here.step(Counting(env.spec.num_actions), ActMode()).trajectory["is_first"].all()


def test_closing_ends_the_collectors():
    learner = Learner()
    learner.step()
    handles = list(learner.handles.values())
    learner.collector.environment.close()
    learner.collector.environment.close()
    assert all(here.killed for here in handles)


def test_types_without_an_array_stay_tensors():
    rows = stacked([torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)])
    assert rows.dtype is torch.bfloat16 and rows.shape == (2, 2)
    assert isinstance(stacked([torch.ones(2), torch.zeros(2)]), np.ndarray)
