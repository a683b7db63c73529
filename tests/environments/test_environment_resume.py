"""Stop and go on: the environments replay their open episodes and give what an unbroken run gives."""

import io

import numpy as np
import pytest
import sample_envs
from test_vector import TASKS, assert_same, make, roll

from rl_lab.environments import make_env
from rl_lab.errors import CheckpointError


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("workers", "new_workers"), [(0, 0), (2, 2), (0, 2)])
def test_going_on_equals_not_having_stopped(task, workers, new_workers):
    import torch

    if task[0].isupper():
        pytest.importorskip("pygame", reason="Gymnasium's classic control")
    with make(task, workers=workers, seed=7) as env, make(task, workers=new_workers, seed=0) as other:
        other.reset()
        other.step(env.action_space.sample() * 0)
        roll(env, steps=0)
        for _ in range(10):  # at each step somebody is in the middle, at an end, or just reset
            roll(env, steps=1, reset=False, seed=1)
            file = io.BytesIO()
            torch.save(env.get_state(), file)
            file.seek(0)
            assert other.set_state(torch.load(file, weights_only=True)) == []
            np.testing.assert_array_equal(other.is_first, env.is_first)
            np.testing.assert_array_equal(other.last_dones, env.last_dones)
            for name, value in env.last_obs.items():
                np.testing.assert_array_equal(other.last_obs[name], value)
        assert_same(roll(env, reset=False), roll(other, reset=False))


def test_state_with_numpy_arrays_is_taken_too():
    env, other = make_env("dummy/discrete", 2, workers=0), make_env("dummy/discrete", 2, workers=0)
    roll(env, steps=4)
    state = env.get_state()
    state["actions"] = [np.asarray(actions) for actions in state["actions"]]
    state["episode"] = state["episode"].tolist()
    assert other.set_state(state) == []
    assert_same(roll(env, reset=False), roll(other, reset=False))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factory", [sample_envs.Unseeded, sample_envs.EndsByChance])
def test_environment_without_determinism_is_found_and_begins_anew(factory, workers):
    with make_env(factory, 3, workers=workers) as env:
        env.reset()
        for _ in range(6):
            env.step(np.zeros(3, np.int64))
        state = env.get_state()
        assert env.set_state(state) == [0, 1, 2]
        assert env.is_first.all() and not env.last_dones.any()
        assert env.get_state()["episode"].tolist() == (state["episode"] + 1).tolist()
        env.step(np.zeros(3, np.int64))
        assert not env.is_first.any()


def test_only_what_differs_begins_anew():
    env = make_env("dummy/discrete", 3, workers=0)
    roll(env, steps=2)
    state = env.get_state()
    state["last"]["obs/vector"][1, 0] += 1
    other = make_env("dummy/discrete", 3, workers=0)
    assert other.set_state(state) == [1]
    assert other.is_first.tolist() == [False, True, False]
    actions = np.zeros(3, np.int64)
    left, right = env.step(actions), other.step(actions)
    np.testing.assert_array_equal(left[0]["vector"][[0, 2]], right[0]["vector"][[0, 2]])


def test_log_sums_go_on_after_a_resume():
    env, other = (make_env("dummy/count", 1, workers=0, length=4) for _ in range(2))
    roll(env, steps=2)
    other.set_state(env.get_state())
    rows = roll(other, steps=2, reset=False)
    assert [row["log"] for row in rows] == [{}, {0: {"log/steps": 4.0}}]


def test_another_number_of_environments_is_refused():
    env = make_env("dummy/count", 2, workers=0)
    env.reset()
    with pytest.raises(CheckpointError, match=r"has 2 environments and this run has 3.*num_envs=2"):
        make_env("dummy/count", 3, workers=0).set_state(env.get_state())
