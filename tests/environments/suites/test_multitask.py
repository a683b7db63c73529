"""Several tasks in one environment."""

import numpy as np
import pytest

from rl_lab.environments.make import make_env, probe_spec
from rl_lab.errors import ConfigError

TASKS = {"tasks": ["Pendulum-v1", "dummy/continuous"]}


def rollout(env, steps, action=0.5):
    """Observations of every environment at every step, as a list of dicts."""
    obs, _ = env.reset()
    seen = [obs]
    for _ in range(steps):
        obs, *_ = env.step(np.full(env.action_space.shape, action, np.float32))
        seen.append(obs)
    return seen


def test_common_shapes():
    spec = probe_spec("multitask/several", **TASKS)
    assert {name: item.shape for name, item in spec.observations.items()} == {
        "vector": (3,),
        "task": (2,),
        "action_mask": (2,),
    }
    assert spec.action.kind == "continuous" and spec.action.shape == (2,)


def test_seed_selects_task():
    with make_env("multitask/several", 6, workers=0, seed=1, time_limit=4, **TASKS) as env:
        seen = rollout(env, 20)
    tasks = np.stack([obs["task"].argmax(-1) for obs in seen])  # (21, 6)
    masks = np.stack([obs["action_mask"] for obs in seen])
    assert set(tasks.reshape(-1)) == {0, 1}
    assert (masks[tasks == 0] == [1.0, 0.0]).all() and (masks[tasks == 1] == [1.0, 1.0]).all()
    assert len({tuple(column) for column in tasks.T}) > 1  # environments differ
    with make_env("multitask/several", 6, workers=0, seed=1, time_limit=4, **TASKS) as env:
        again = rollout(env, 20)
    for one, other in zip(seen, again):
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_returns_are_logged_by_task():
    with make_env("multitask/several", 4, workers=0, seed=0, time_limit=3, **TASKS) as env:
        env.reset()
        logs = {}
        for _ in range(12):
            *_, infos = env.step(np.zeros((4, 2), np.float32))
            for log in infos.get("log", {}).values():
                logs |= log
    assert {"log/return_Pendulum-v1", "log/return_dummy_continuous"} <= set(logs)
    assert logs["log/return_Pendulum-v1"] < 0


def test_open_episode_resumes_exactly():
    options = {"workers": 0, "seed": 3, "time_limit": 5, **TASKS}
    with make_env("multitask/several", 3, **options) as env:
        rollout(env, 7)
        state = env.get_state()
        after, *_ = env.step(np.full((3, 2), 0.2, np.float32))
    with make_env("multitask/several", 3, **options) as env:
        assert env.set_state(state) == []
        resumed, *_ = env.step(np.full((3, 2), 0.2, np.float32))
    assert all(np.array_equal(after[key], resumed[key]) for key in after)


def test_messages():
    with pytest.raises(ConfigError, match="tasks is empty"):
        probe_spec("multitask/several")
    with pytest.raises(ConfigError, match="continuous actions"):
        probe_spec("multitask/several", tasks=["CartPole-v1", "Pendulum-v1"])
