"""Contract of the vector environment, with and without worker processes."""

import itertools
import types

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from rl_lab.environments import make_env, vector
from rl_lab.environments.vector import default_workers
from rl_lab.errors import ConfigError, LabError
from tests.environments import sample_envs

TASKS = {
    "dummy/discrete": {},
    "dummy/continuous": {},
    "dummy/dict": {},
    "dummy/count": {},
    "CartPole-v1": {},
    "Pendulum-v1": {"time_limit": 7},
}
STEPS = 30


@pytest.fixture(params=TASKS)
def task(request):
    if request.param[0].isupper():
        pytest.importorskip("pygame", reason="Gymnasium's classic control")
    return request.param


@pytest.fixture(params=[0, 2])
def workers(request):
    return request.param


def make(task, num_envs=3, **options):
    return make_env(task, num_envs, **TASKS[task], **options)


def roll(env, steps=STEPS, reset=True, seed=3):
    """All results of some steps with actions that depend on `seed` only, as a list of flat dicts."""
    rng = np.random.default_rng(seed)
    rows = []
    if reset:
        obs, _ = env.reset()
        rows.append({**obs, "is_first": env.is_first})
    for _ in range(steps):
        obs, reward, terminated, truncated, infos = env.step(random_actions(env, rng))
        row = {
            **obs,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "is_first": env.is_first,
        }
        rows.append({**row, "log": infos.get("log", {})})
    return rows


def random_actions(env, rng):
    spec = env.spec.action
    if spec.kind == "continuous":
        return rng.uniform(-1, 1, (env.num_envs, *spec.shape)).astype(np.float32)
    return rng.integers(0, np.array(spec.choices).reshape(spec.shape), (env.num_envs, *spec.shape))


def assert_same(left, right):
    assert len(left) == len(right)
    for one, two in zip(left, right):
        assert one.keys() == two.keys()
        for key in one:
            if key == "log":
                assert one[key] == two[key]
            else:
                np.testing.assert_array_equal(one[key], two[key], err_msg=key)


def test_spaces_shapes_and_dtypes(task, workers):
    with make(task, workers=workers) as env:
        assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP and env.num_workers == workers
        assert env.spec.name == task and set(env.single_observation_space) == set(env.spec.observations)
        obs, infos = env.reset(seed=1)
        assert env.observation_space.contains(obs) and infos == {} and env.is_first.all()
        actions = random_actions(env, np.random.default_rng(0))
        assert env.action_space.contains(actions)
        obs, reward, terminated, truncated, infos = env.step(actions)
        assert env.observation_space.contains(obs) and isinstance(infos, dict)
        for name, spec in env.spec.observations.items():
            assert obs[name].shape == (3, *spec.shape) and obs[name].dtype == spec.dtype
        assert reward.dtype == np.float32 and terminated.dtype == bool and truncated.dtype == bool
        assert reward.shape == terminated.shape == truncated.shape == env.is_first.shape == (3,)
        assert not env.is_first.any()


def test_results_do_not_depend_on_workers(task):
    rows = []
    for workers in (0, 1, 2, 3):
        with make(task, workers=workers, seed=5) as env:
            rows.append(roll(env))
    for other in rows[1:]:
        assert_same(rows[0], other)


def test_seeding(task, workers):
    with make(task, workers=workers, seed=1) as env:
        first = roll(env)
        env.reset(seed=1)
        again = [{**env.last_obs, "is_first": env.is_first}, *roll(env, reset=False)]
        following = roll(env)  # reset() without a seed starts the next episodes
        env.reset(seed=2)
        other = [env.last_obs, *roll(env, reset=False)]
    assert_same(first, again)
    if task == "dummy/count":  # is deterministic
        return

    def seen(rows, env=0):
        return np.concatenate([row[name][env].ravel() for row in rows for name in sorted(other[0])])

    assert not np.array_equal(seen(first), seen(following))
    assert not np.array_equal(seen(first), seen(other))
    assert not np.array_equal(seen(first), seen(first, env=1))


def test_autoreset_on_next_step(task, workers):
    with make(task, workers=workers) as env:
        rows = roll(env, steps=60)
    ends = 0
    for before, after in itertools.pairwise(rows[1:]):
        ended = before["terminated"] | before["truncated"]
        ends += ended.sum()
        np.testing.assert_array_equal(after["is_first"], ended)
        assert not after["reward"][ended].any()
        assert not after["terminated"][ended].any() and not after["truncated"][ended].any()
        assert (set(before["log"]) <= set(np.flatnonzero(ended))) and (
            task[0] != "d" or len(before["log"]) == ended.sum()
        )
    assert ends > 3


def test_terminated_and_truncated_are_separate(workers):
    with make_env("CartPole-v1", 2, workers=workers, time_limit=5) as env:
        rows = roll(env, steps=40)
    assert sum(row["truncated"].sum() for row in rows[1:]) > 5
    assert not any(row["terminated"].any() for row in rows[1:])  # no termination within five steps
    with make_env("CartPole-v1", 2, workers=workers) as env:
        env.reset()
        flags = [env.step(np.ones(2, np.int64))[2:4] for _ in range(30)]
    assert any(terminated.any() for terminated, _ in flags) and not any(
        truncated.any() for _, truncated in flags
    )


def test_copies_and_views(workers):
    for copy in (True, False):
        with make_env("dummy/count", 2, workers=workers, copy=copy) as env:
            obs, _ = env.reset()
            stepped = env.step(np.zeros(2, np.int64))
            assert (
                obs["vector"][0, 0] == 0.0
            )  # double buffering: the last observation is valid for one more step
            assert env.last_obs["vector"] is stepped[0]["vector"] and not env.last_dones.any()
            flags = env.is_first
            env.step(np.zeros(2, np.int64))
            assert stepped[1][0] == (1.0 if copy else 2.0) and not flags.any()
            assert obs["vector"][0, 0] == (0.0 if copy else 2.0)


def test_log_and_all_infos(workers):
    with make_env("dummy/count", 2, workers=workers, length=3, action_repeat=2, infos="all") as env:
        assert env.reset()[1] == {"env": {0: {}, 1: {}}}
        assert env.step(np.zeros(2, np.int64))[4] == {"env": {0: {"log/steps": 2.0}, 1: {"log/steps": 2.0}}}
        obs, reward, terminated, _, infos = env.step(np.zeros(2, np.int64))
        assert terminated.all() and reward.tolist() == [3.0, 3.0] and obs["vector"].tolist() == [[3.0], [3.0]]
        assert infos["log"] == {0: {"log/steps": 3.0}, 1: {"log/steps": 3.0}}
        assert env.spec.action_repeat == 2


def test_render_returns_environment_zero(task, workers):
    with make(task, workers=workers, render=True) as env:
        env.reset()
        frame = env.frame()
        assert frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3
    with make(task, workers=workers) as env, pytest.raises(LabError, match="render=True"):
        env.frame()


def test_render_without_frames_raises():
    env = make_env(sample_envs.Base, 1, render=True)
    env.reset()
    with pytest.raises(LabError, match="Base renders no frames"):
        env.frame()


def test_wrong_call_order_raises(workers):
    env = make_env("dummy/count", 2, workers=workers)
    with pytest.raises(LabError, match="reset"):
        env.step(np.zeros(2, np.int64))
    with pytest.raises(LabError, match="reset"):
        env.get_state()
    env.reset()
    with pytest.raises(LabError, match="no action is in flight"):
        env.step_wait()
    env.step_async(np.zeros(2, np.int64))
    for call in (env.reset, env.get_state, lambda: env.step_async(np.zeros(2, np.int64))):
        with pytest.raises(LabError, match="in flight"):
            call()
    assert env.step_wait()[1].tolist() == [1.0, 1.0]
    env.step_async(np.zeros(2, np.int64))
    env.close()  # with an action in flight
    env.close()
    with pytest.raises(LabError, match="closed"):
        env.reset()


def test_wrong_actions_raise():
    import torch

    env = make_env("dummy/discrete", 2, workers=0)
    env.reset()
    with pytest.raises(ConfigError, match=r"shape \(2,\), not \(3,\)"):
        env.step(np.zeros(3, np.int64))
    with pytest.raises(ConfigError, match="int64 actions, not float32"):
        env.step(np.zeros(2, np.float32))
    env.step(torch.zeros(2, dtype=torch.int64))
    env.step([0, 1])


def test_default_number_of_workers(monkeypatch):
    monkeypatch.setattr(vector, "os", types.SimpleNamespace(sched_getaffinity=lambda _: range(8)))
    assert [default_workers(n) for n in (1, 2, 8, 64)] == [0, 2, 8, 8]
    assert [default_workers(n, 20e-6) for n in (1, 4, 16, 50, 100, 10_000)] == [0, 0, 0, 2, 4, 8]
    assert default_workers(4, 1.0) == 4
    monkeypatch.undo()
    for task, few in (("dummy/count", 0), ("CartPole-v1", 0), (sample_envs.Base, min(2, default_workers(2)))):
        with make_env(task, 2) as env:
            assert env.num_workers == few
    with make_env("dummy/count", 2, workers=9) as env:
        assert env.num_workers == 2


def test_gymnasium_vector_wrappers_work():
    """RecordEpisodeStatistics, NormalizeReward and RecordVideo's render() accept the lab's vector environment."""
    from gymnasium.wrappers import vector as wrappers

    with make_env("dummy/count", 2, workers=0, length=3, render=False) as env:
        assert isinstance(env, gymnasium.vector.VectorEnv) and env.unwrapped is env
        assert "dummy/count" in repr(env) and "num_envs=2" in str(env)
        wrapped = wrappers.NormalizeReward(wrappers.RecordEpisodeStatistics(env))
        assert wrapped.num_envs == 2 and wrapped.action_space == env.action_space
        obs, _ = wrapped.reset(seed=1)
        assert env.observation_space.contains(obs)
        for _ in range(3):
            obs, reward, terminated, _, infos = wrapped.step(wrapped.action_space.sample())
        assert terminated.all() and np.isfinite(reward).all()
        assert infos["episode"]["l"].tolist() == [3, 3]
        assert infos["episode"]["r"].tolist() == [6.0, 6.0]
        wrapped.close()
    assert env.closed


def test_render_is_a_tuple_as_in_gymnasium():
    with make_env("CartPole-v1", 2, workers=0, render=True) as env:
        env.reset()
        frames = env.render()
        assert isinstance(frames, tuple) and np.array_equal(frames[0], env.frame())
