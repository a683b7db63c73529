"""Environments in another interpreter equal those here: rows, faults, restarts, resume."""

import dataclasses
import io
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.environments.make import probe
from rl_lab.errors import ConfigError
from tests.environments import sample_envs
from tests.environments.test_restarts import DIE, HALF, HANG, NOTHING, RAISE, TOO_SHORT, same
from tests.environments.test_restarts import roll as roll_actions
from tests.environments.test_vector import assert_same, make, roll

HERE = sys.executable
SAMPLES, FOREIGN = "sample_envs", "foreign_envs"  # in the current folder


@pytest.fixture(autouse=True)
def _folder(monkeypatch):
    monkeypatch.chdir(Path(sample_envs.__file__).parent)


def same_spec(one, two):
    assert dataclasses.replace(one, name="") == dataclasses.replace(two, name="")


def far_peers(env):
    """The peers of the environments in this process (workers=0)."""
    return list({id(peer): peer for peer in (slot.env.unwrapped.peer for slot in slots(env))}.values())


def slots(env):
    return env.pool.workers[0]._runner.slots


@pytest.mark.parametrize(
    ("task", "workers"), [("dummy/discrete", 2), ("dummy/dict", 0), ("dummy/count", 0), ("Pendulum-v1", 2)]
)
def test_rows_equal_those_of_this_interpreter(task, workers):
    if task[0].isupper():
        pytest.importorskip("pygame", reason="Gymnasium's classic control")
    with make(task, workers=0, seed=5) as here, make(task, workers=workers, seed=5, python=HERE) as there:
        assert here.spec == there.spec
        assert_same(roll(here), roll(there))


@pytest.mark.parametrize("kind", sorted(sample_envs.OBSERVATIONS))
def test_every_kind_of_observation(kind):
    task = f"{SAMPLES}:Sampled"
    with (
        make_env(sample_envs.Sampled, 2, workers=0, kind=kind) as here,
        make_env(task, 2, workers=0, kind=kind, python=HERE) as there,
    ):
        same_spec(here.spec, there.spec)
        assert_same(roll(here, steps=4), roll(there, steps=4))
    assert probe(sample_envs.Sampled, kind=kind)[1] == probe(task, kind=kind, python=HERE)[1]


def test_wrappers_limits_and_rendering_are_the_same():
    pytest.importorskip("pygame", reason="Gymnasium's classic control")
    options = {
        "time_limit": 6,
        "action_repeat": 2,
        "pixels": "both",
        "size": 32,
        "wrappers": {"frame_stack": 2},
    }
    with (
        make_env("CartPole-v1", 2, workers=0, render=True, **options) as here,
        make_env("CartPole-v1", 2, workers=0, render=True, python=HERE, **options) as there,
    ):
        assert here.spec == there.spec
        assert_same(roll(here, steps=15), roll(there, steps=15))
        np.testing.assert_array_equal(here.frame(), there.frame())


@pytest.mark.parametrize(
    ("workers", "action", "lost", "why"),
    [
        (0, RAISE, [1], "environment 1 raised ValueError: the wheel came off"),
        (2, RAISE, [1], "environment 1 raised ValueError: the wheel came off"),
        (0, HALF, [1], f"environment 1 returned an unusable row: {TOO_SHORT}"),
        (0, DIE, [0, 1, 2], "the worker of environments 0 to 2 was killed by SIGKILL"),
        (2, DIE, [0, 1], "the worker of environments 0 to 1 was killed by SIGKILL"),
        (0, HANG, [0, 1, 2], "the worker of environments 0 to 2 did not answer for 1 s"),
    ],
)
def test_failures_are_those_of_workers(workers, action, lost, why):
    """Also: a simulator that hangs in the trainer's stead is restarted even with workers=0."""
    task = f"{SAMPLES}:Fails"
    with (
        make_env(sample_envs.Fails, 3, workers=0, seed=4) as whole,
        make_env(
            task, 3, workers=workers, seed=4, python=HERE, timeout=1.0 if action == HANG else 30.0
        ) as env,
    ):
        said = []
        env.listen(said.append)
        whole.reset(), env.reset()
        unbroken = roll_actions(whole, {})
        rows = roll_actions(env, {3: [NOTHING, action, NOTHING]})
        for one, two in zip(unbroken, rows):
            same(one, two, [index for index in range(3) if index not in lost])
        closed, first, after = rows[3:6]
        answered = [index for index in lost if not (action in (DIE, HANG) and index == 0)]
        assert closed["closed"] in (set(lost), set(answered))  # environment 0 may have answered before
        for index in closed["closed"]:
            assert closed["truncated"][index] and closed["reward"][index] == 0
            assert first["is_first"][index] and after["count"][index] == 1
        kind = {DIE: "died", HANG: "hung"}.get(action, "raised")
        assert env.get_state()["restarts"][kind] == 1 and sum(env.get_state()["restarts"].values()) == 1
        assert (
            len(said) == 1 and said[0].startswith(why.split(" ")[0]) and why.split(" ", 2)[2][-20:] in said[0]
        )


def test_killed_process_is_one_failure_and_the_run_goes_on():
    with make_env("dummy/discrete", 4, workers=0, python=HERE, seed=1) as env:
        said = []
        env.listen(said.append)
        env.reset()
        for _ in range(3):
            (peer,) = far_peers(env)
            os.kill(peer.pid, signal.SIGKILL)
            peer.process.wait()
            *_, infos = env.step(np.zeros(4, np.int64))
            assert sorted(infos["closed"]) == [0, 1, 2, 3] and env.last_dones.all()
            env.step(np.zeros(4, np.int64))
            assert env.is_first.all()
            assert far_peers(env)[0].pid != peer.pid
        assert env.restarts == 3 and "was killed by SIGKILL" in said[0]
        env.step(np.zeros(4, np.int64))


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_is_exact(workers):
    import torch

    with (
        make_env("dummy/dict", 3, workers=workers, seed=7, python=HERE) as env,
        make_env("dummy/dict", 3, workers=0, seed=0) as here,
        make_env("dummy/dict", 3, workers=workers, seed=0, python=HERE) as there,
    ):
        roll(env, steps=13)
        file = io.BytesIO()
        torch.save(env.get_state(), file)
        for other in (here, there):
            file.seek(0)
            assert other.set_state(torch.load(file, weights_only=True)) == []
        rest = roll(env, reset=False)
        assert_same(rest, roll(here, reset=False))
        assert_same(rest, roll(there, reset=False))


def test_lost_lives_continue_a_game_there_too():
    pytest.importorskip("ale_py")
    options = {"life_loss": "end", "size": 64, "seed": 3, "workers": 0}
    with (
        make_env("atari100k/Breakout", 1, **options) as here,
        make_env("atari100k/Breakout", 1, python=HERE, **options) as there,
    ):
        assert_same(roll(here, steps=120), roll(there, steps=120))
        state = there.get_state()
        assert here.set_state(state) == [] and there.set_state(state) == []


@pytest.mark.parametrize("early", [False, True])
def test_old_gym_interface(early):
    with make_env(f"{FOREIGN}:OldGym", 2, workers=0, python=HERE, early=early, render=True) as env:
        obs, _ = env.reset(seed=3)
        again, _ = env.reset(seed=3)
        np.testing.assert_array_equal(obs["vector"], again["vector"])
        seed = int(env.pool.arrays.seed[0])
        random = np.random.default_rng(seed)
        np.testing.assert_array_equal(obs["vector"][0], random.standard_normal(3).astype(np.float32))
        for step in range(5):
            obs, reward, terminated, truncated, infos = env.step(np.array([1, 0]))
            expected = (random.standard_normal(3) + 1).astype(np.float32)
            np.testing.assert_array_equal(obs["vector"][0], expected)
            assert reward.tolist() == [1.0, 0.0]
            assert terminated.all() == (step == 4 and early) and truncated.all() == (step == 4 and not early)
        assert infos["log"][0] == {"log/ones": 5.0}
        np.testing.assert_array_equal(env.frame(), np.full((4, 4, 3), 5, np.uint8))


@pytest.mark.parametrize("dies", [False, True])
def test_dm_env_interface(dies):
    with make_env(f"{FOREIGN}:DmEnv", 1, workers=0, python=HERE, dies=dies) as env:
        obs, _ = env.reset(seed=2)
        random = np.random.RandomState(int(env.pool.arrays.seed[0]))
        camera = random.randint(0, 255, (6, 6, 3)).astype(np.uint8)
        np.testing.assert_array_equal(obs["camera"][0], camera.transpose(2, 0, 1))
        assert obs["speed"][0, 0] == np.float32(random.standard_normal())
        for step in range(4):
            obs, reward, terminated, truncated, _ = env.step(np.array([[0.5, -1.0]], np.float32))
            random.randint(0, 255, (6, 6, 3))
            assert obs["speed"][0, 0] == np.float32(random.standard_normal() + 1.0)  # scaled to ±2
            assert reward[0] == -2.0
            assert (terminated[0], truncated[0]) == (step == 3 and dies, step == 3 and not dies)


def test_seed_of_the_constructor():
    task = f"{FOREIGN}:SeededAtBirth"
    with pytest.warns(UserWarning, match="cannot be seeded"):
        make_env(task, 1, workers=0, python=HERE).close()
    with make_env(task, 1, workers=0, python=HERE, seed_argument="seed") as env:
        first = roll(env, steps=5)
        state = env.get_state()
        assert env.set_state(state) == []
        env.reset(seed=0)
        np.testing.assert_array_equal(env.last_obs["vector"], first[0]["vector"])


def test_two_interpreters_in_one_run(tmp_path):
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {HERE} "$@"\n')
    other.chmod(0o755)
    tasks = [
        {"task": "dummy/continuous", "python": HERE},
        {"task": f"{FOREIGN}:DmEnv", "python": str(other), "observations": ["speed"]},
        "dummy/continuous",
    ]
    with make_env("multitask/several", 4, workers=0, tasks=tasks, seed=1) as env:
        rows = roll(env, steps=60)
        seen = {int(index) for row in rows for index in row["task"].argmax(axis=1)}
        assert seen == {0, 1, 2}
        assert env.set_state(env.get_state()) == []
    with pytest.raises(ConfigError, match=r"environment\.tasks has .*: a task is a name"):
        make_env("multitask/several", 1, tasks=[{"python": HERE}])


def test_configs_reach_the_environment():
    from rl_lab.config.compose import compose_config
    from rl_lab.environments.make import make_configured_env

    config = compose_config(
        ["environment=gym", "environment.task=dummy/discrete", f"environment.python={HERE}"]
    )
    with make_configured_env(config.environment, num_envs=1) as env:
        env.reset()
        assert far_peers(env)[0].place.python == HERE


def test_objects_and_many_tasks_are_refused():
    with pytest.raises(ConfigError, match=r"environment\.python=.* needs an environment by its name"):
        make_env(sample_envs.Fails, python=HERE)
    with pytest.raises(ConfigError, match=r"environment\.python=.*give each of environment\.tasks its own"):
        make_env("multitask/several", python=HERE, tasks=["dummy/continuous"])
    with pytest.raises(ConfigError, match="set one of them to null"):
        make_env("dummy/discrete", python=HERE, host="tcp://127.0.0.1:7000")
    with pytest.raises(ConfigError, match=r"environment\.python=.*must be numbers, words and lists"):
        make_env("dummy/discrete", python=HERE, thing=object())
