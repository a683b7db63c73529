"""Environments elsewhere, here in this process: the same rows, restarts and errors as with workers of this machine."""

from __future__ import annotations

import pickle
from collections import deque
from importlib import import_module

import gymnasium
import numpy as np
import pytest

from rl_lab.environments.make import make_env
from rl_lab.errors import LabError


class Here:
    """An object in this process; what is sent and returned is pickled, so that no memory is shared."""

    started: list[Here] = []  # noqa: RUF012

    def __init__(self, path: str, options) -> None:
        module, _, name = path.partition(":")
        self.object = getattr(import_module(module), name)(**pickle.loads(pickle.dumps(dict(options))))
        self.results: deque[bytes] = deque()
        self.lost = False
        Here.started.append(self)

    def call(self, method, *args):
        if not self.lost:
            result = getattr(self.object, method)(*pickle.loads(pickle.dumps(args)))
            self.results.append(pickle.dumps(result))

    def ready(self, seconds=0.0):
        return True

    def result(self, seconds=None):
        if self.lost:
            raise ConnectionError("its node was removed")
        return pickle.loads(self.results.popleft())

    def kill(self):
        self.lost = True


@pytest.fixture(autouse=True)
def fresh():
    Here.started.clear()


def rows_of(env, steps: int) -> list:
    obs, _ = env.reset()
    rows = [{k: v.copy() for k, v in obs.items()}]
    rng = np.random.default_rng(3)
    for _ in range(steps):
        actions = rng.integers(0, 2, env.num_envs)
        obs, reward, terminated, truncated, infos = env.step(actions)
        rows.append(
            ({k: v.copy() for k, v in obs.items()}, reward, terminated, truncated, infos, env.is_first)
        )
    return rows


def assert_equal(first, second) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    elif isinstance(first, tuple | list):
        assert len(first) == len(second)
        for a, b in zip(first, second):
            assert_equal(a, b)
    else:
        assert np.array_equal(first, second)


def test_rows_are_those_of_local_environments():
    near = make_env("CartPole-v1", num_envs=4, workers=0, seed=3)
    far = make_env("CartPole-v1", num_envs=4, workers=3, seed=3, remote=Here)
    assert [list(here.object.indices) for here in Here.started] == [[0, 1], [2], [3]]
    assert_equal(rows_of(near, 120), rows_of(far, 120))
    near.close()
    far.close()
    assert all(here.lost for here in Here.started)


def test_scheduled_episodes_and_exact_resume_work_there_too():
    far = make_env("CartPole-v1", num_envs=2, workers=1, seed=3, remote=Here)
    rows_of(far, 15)
    state = far.get_state()
    again = make_env("CartPole-v1", num_envs=2, workers=2, seed=0, remote=Here)
    assert again.set_state(state) == []
    actions = np.ones(2, np.int64)
    assert_equal(far.step(actions), again.step(actions))
    near = make_env("CartPole-v1", num_envs=2, workers=0, seed=3)
    rows_of(near, 16)
    for env in (far, near):
        env.schedule({0: 77, 1: None})
    for _ in range(3):
        assert_equal(far.step(actions)[0]["vector"][0].shape, near.step(actions)[0]["vector"][0].shape)
    assert_equal(far.last_obs["vector"][0], near.last_obs["vector"][0])


def test_a_lost_worker_is_replaced():
    messages: list[str] = []
    env = make_env("CartPole-v1", num_envs=2, workers=2, seed=3, remote=Here)
    env.listen(messages.append)
    env.reset()
    env.step(np.zeros(2, np.int64))
    Here.started[1].lost = True
    _, reward, _terminated, truncated, infos = env.step(np.zeros(2, np.int64))
    assert list(infos["closed"]) == [1] and truncated[1] and reward[1] == 0.0 and env.restarts == 1
    assert "was lost on the cluster: its node was removed" in messages[0]
    env.step(np.zeros(2, np.int64))
    assert env.is_first.tolist() == [False, True] and len(Here.started) == 3


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    made = 0

    def __init__(self):
        Broken.made += 1
        if Broken.made > 1:  # the first one is asked for its spaces
            raise RuntimeError("no licence on this node")


def test_an_environment_that_cannot_be_created_there_is_named():
    Broken.made = 0
    with pytest.raises(LabError, match=r"environment 0 raised: RuntimeError: no licence on this node"):
        make_env(Broken, num_envs=1, workers=1, remote=Here)
