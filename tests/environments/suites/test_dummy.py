import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from rl_lab.environments import make_env
from rl_lab.environments.make import EnvFactory
from rl_lab.environments.suites.dummy import MISTAKES, TASKS, make, tasks
from rl_lab.errors import ConfigError


@pytest.mark.parametrize("task", tasks())
def test_passes_gymnasium_checker(task):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about infinite bounds and a missing `spec`
        check_env(make(task, render=True), skip_render_check=True)
        check_env(
            EnvFactory(f"dummy/{task}", "rl_lab.environments.suites.dummy", task)(True),
            skip_render_check=True,
        )


def answers(task, obs):
    if task == "discrete":
        return obs["vector"][:, :3].argmax(1)
    if task == "continuous":
        return obs["vector"][:, :2]
    return np.stack([obs["image"][:, 0, 0].argmax(1) // 4, obs["vector"].argmax(1)], axis=1)


@pytest.mark.parametrize("task", ["discrete", "continuous", "dict"])
def test_best_return_is_reached(task):
    env = make_env(f"dummy/{task}", 2, workers=0)
    obs, _ = env.reset()
    total = np.zeros(2)
    for step in range(10):
        obs, reward, terminated, truncated, infos = env.step(answers(task, obs))
        total += reward
        assert not terminated.any() and truncated.all() == (step == 9)
    np.testing.assert_allclose(total, TASKS[task]().best_return, atol=1e-4)
    assert infos["log"] == {0: {"log/hits": 10.0}, 1: {"log/hits": 10.0}}


@pytest.mark.parametrize("task", ["discrete", "continuous", "dict"])
def test_random_actions_terminate_and_truncate(task):
    env = make_env(f"dummy/{task}", 8, workers=0, length=5)
    env.action_space.seed(0)
    env.reset()
    ends = np.zeros(2, int)
    for _ in range(200):
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        assert not (terminated & truncated).any()
        ends += terminated.sum(), truncated.sum()
    assert ends.min() > 10, ends


def test_count_observation_and_reward():
    env = make_env("dummy/count", 1, workers=0, length=3, truncate=True)
    obs, _ = env.reset()
    rows = [(obs["vector"][0, 0], 0.0, False)]
    for _ in range(5):
        obs, reward, _, truncated, _ = env.step(np.zeros(1, np.int64))
        rows.append((obs["vector"][0, 0], reward[0], truncated[0]))
    assert rows == [(0, 0, False), (1, 1, False), (2, 2, False), (3, 3, True), (0, 0, False), (1, 1, False)]


def test_third_mistake_terminates():
    env = make("discrete")
    env.reset(seed=0)
    for mistake in range(1, MISTAKES + 1):
        _, reward, terminated, _, info = env.step((env.cue + 1) % 3)
        assert (reward, terminated, info["log/hits"]) == (0.0, mistake == MISTAKES, 0.0)


def test_unknown_task():
    with pytest.raises(ConfigError, match=r"'dummy/discret'.*'discrete'"):
        make_env("dummy/discret")


def test_catch_by_following_the_ball():
    env = make_env("dummy/catch", 3, workers=0, seed=4, cells=6, side=16)
    obs, _ = env.reset()
    assert obs["image"].shape == (3, 3, 16, 16)
    total, steps = np.zeros(3), 0
    while True:
        # The ball is the reddest cell, the paddle the bluest; both may be in the same cell at the bottom.
        ball = obs["image"][:, 0].max(1).argmax(1)
        paddle = obs["image"][:, 2, -1].argmax(1)
        obs, reward, terminated, truncated, infos = env.step(1 + np.sign(ball.astype(int) - paddle))
        total, steps = total + reward, steps + 1
        if terminated.all():
            break
        assert not truncated.any()
    assert steps == 15 and (total == 3).all() and infos["log"][0] == {"log/hits": 3.0}


def test_lock_opens_with_the_whole_combination():
    env = make("lock", digits=3, length=6)
    obs, _ = env.reset(seed=0)
    np.testing.assert_array_equal(obs, [1, 0, 0, 0])
    right = [int(digit) for digit in env.unwrapped.combination]
    wrong = (right[2] + 1) % 4
    rows = [env.step(action) for action in (*right[:2], wrong, *right)]
    assert [int(row[0].argmax()) for row in rows] == [1, 2, 0, 1, 2, 3]
    assert [row[1:4] for row in rows] == [(0.0, False, False)] * 5 + [(1.0, True, False)]


def test_lock_stays_closed_until_the_time_is_over():
    env = make("lock", digits=3, length=4)
    env.reset(seed=0)
    first = int(env.unwrapped.combination[0])
    rows = [env.step((first + 1) % 4) for _ in range(4)]
    assert [row[3] for row in rows] == [False, False, False, True] and not any(row[1] for row in rows)
