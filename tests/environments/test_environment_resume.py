"""Exact resume: environments replay their open episodes and continue like an uninterrupted run."""

import io

import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.errors import CheckpointError
from tests.environments import sample_envs
from tests.environments.test_vector import TASKS, assert_same, make, roll


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(("workers", "new_workers"), [(0, 0), (2, 2), (0, 2)])
def test_resume_is_exact(task, workers, new_workers):
    import torch

    if task[0].isupper():
        pytest.importorskip("pygame", reason="Gymnasium's classic control")
    with make(task, workers=workers, seed=7) as env, make(task, workers=new_workers, seed=0) as other:
        other.reset()
        other.step(env.action_space.sample() * 0)
        roll(env, steps=0)
        for _ in range(10):  # covers environments inside an episode, at its end, and after a reset
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


def test_state_may_contain_numpy_arrays():
    env, other = make_env("dummy/discrete", 2, workers=0), make_env("dummy/discrete", 2, workers=0)
    roll(env, steps=4)
    state = env.get_state()
    state["actions"] = [np.asarray(actions) for actions in state["actions"]]
    state["episode"] = state["episode"].tolist()
    assert other.set_state(state) == []
    assert_same(roll(env, reset=False), roll(other, reset=False))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("factory", [sample_envs.Unseeded, sample_envs.EndsByChance])
def test_nondeterministic_environment_restarts(factory, workers):
    with make_env(factory, 3, workers=workers) as env:
        env.reset()
        for _ in range(6):
            env.step(np.zeros(3, np.int64))
        state, ended = env.get_state(), env.last_dones
        assert env.set_state(state) == np.flatnonzero(~ended).tolist()  # ended episodes are not replayed
        np.testing.assert_array_equal(env.is_first, ~ended)
        np.testing.assert_array_equal(env.last_dones, ended)
        assert env.get_state()["episode"].tolist() == (state["episode"] + ~ended).tolist()
        env.step(np.zeros(3, np.int64))
        np.testing.assert_array_equal(env.is_first, ended)


def test_only_diverged_environments_restart():
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


def test_log_sums_continue_after_resume():
    env, other = (make_env("dummy/count", 1, workers=0, length=4) for _ in range(2))
    roll(env, steps=2)
    other.set_state(env.get_state())
    rows = roll(other, steps=2, reset=False)
    assert [row["log"] for row in rows] == [{}, {0: {"log/steps": 4.0}}]


def test_other_num_envs_raises():
    env = make_env("dummy/count", 2, workers=0)
    env.reset()
    with pytest.raises(
        CheckpointError, match=r"num_envs=3: the checkpoint has 2 environments; set environment.num_envs=2"
    ):
        make_env("dummy/count", 3, workers=0).set_state(env.get_state())


@pytest.mark.parametrize(("workers", "sticky"), [(0, 0.0), (1, 0.25)])
def test_continued_game_resumes_from_its_start(workers, sticky):
    pytest.importorskip("ale_py", reason="extra: atari")
    options = {"life_loss": "end", "sticky": sticky, "size": 24, "full_actions": False, "copy": True}
    actions = np.random.default_rng(3).integers(0, 4, (200, 1))
    with (
        make_env("atari/breakout", 1, workers=workers, seed=5, **options) as env,
        make_env("atari/breakout", 1, workers=0, seed=1, **options) as other,
    ):
        env.reset()
        rows, states = [], []
        for action in actions:
            rows.append((*env.step(action), env.is_first))
            states.append(env.get_state())
        resets = [step for step, row in enumerate(rows) if row[5][0]]
        lives = [step for step in resets if states[step]["cuts"][0]]  # resets that continue a game
        assert len(lives) > 1 and len(states[lives[1]]["cuts"][0]) == 2
        other.reset()
        for stop in (
            lives[1] - 1,
            lives[1],
            lives[1] + 9,
        ):  # at the loss, at the reset, in the middle of a life
            assert other.set_state(states[stop]) == []
            for step in range(stop + 1, min(stop + 30, len(actions))):
                result = (*other.step(actions[step]), other.is_first)
                np.testing.assert_array_equal(result[0]["image"], rows[step][0]["image"])
                for place in (1, 2, 3, 5):
                    np.testing.assert_array_equal(result[place], rows[step][place])


def test_episode_beyond_history_limit_restarts():
    said = []
    with make_env(sample_envs.Base, 3, workers=0, history_limit=5) as env:
        env.listen(said.append)
        env.reset()
        for _ in range(5):
            env.step(np.zeros(3, np.int64))
        with make_env(sample_envs.Base, 3, workers=0, history_limit=5) as other:
            assert other.set_state(env.get_state()) == [] and said == []
        for _ in range(3):
            env.step(np.zeros(3, np.int64))
        assert len(said) == 1 and "environment.history_limit=5" in said[0]
        state = env.get_state()
        assert state["forgotten"] == [0, 1, 2] and all(len(actions) == 0 for actions in state["actions"])
        with make_env(sample_envs.Base, 3, workers=2, history_limit=5) as other:
            assert other.set_state(state) == [0, 1, 2] and other.is_first.all()
            assert other.last_obs["vector"].tolist() == [[0.0]] * 3
            assert other.get_state()["episode"].tolist() == [1, 1, 1]


def test_ended_episode_needs_no_history():
    with make_env("dummy/count", 2, workers=0, length=9, history_limit=4) as env:
        env.listen([].append)
        roll(env, steps=9)
        assert env.last_dones.all() and env.get_state()["forgotten"] == []
        with make_env("dummy/count", 2, workers=2, length=9, history_limit=4) as other:
            assert (
                other.set_state(env.get_state()) == [] and other.last_dones.all() and not other.is_first.any()
            )
            assert_same(roll(env, steps=3, reset=False), roll(other, steps=3, reset=False))
