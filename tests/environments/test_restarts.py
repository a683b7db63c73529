"""Restarts of environments that raise, die or hang: stored rows, messages, and the limit."""

import os
import signal
import time
import warnings

import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.environments.faults import FaultLog, RestartLimit
from rl_lab.errors import ConfigError, EnvironmentFaultError, LabError
from tests.environments import sample_envs

NOTHING, RAISE, DIE, HANG, HALF = range(5)
TOO_SHORT = "observation 'draw' has shape (2,), not (3,) at step 4 of the episode"


def fails(workers, num_envs=3, **options):
    env = make_env(sample_envs.Fails, num_envs, workers=workers, seed=4, **options)
    env.said = []
    env.listen(env.said.append)
    return env


def roll(env, plan, steps=14):
    """Return the rows of some steps; `plan` is {step: actions}, other steps use no-op actions."""
    rows = []
    for step in range(steps):
        actions = np.array(plan.get(step, [NOTHING] * env.num_envs))
        obs, reward, terminated, truncated, infos = env.step(actions)
        row = {**obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        rows.append({**row, "is_first": env.is_first, "closed": set(infos.get("closed", ()))})
    return rows


def same(one, two, envs=slice(None)):
    for key in one.keys() - {"closed"}:
        np.testing.assert_array_equal(one[key][envs], two[key][envs], err_msg=key)


@pytest.mark.parametrize(
    ("workers", "action", "lost", "why"),
    [
        (0, RAISE, [1], "environment 1 raised ValueError: the wheel came off"),
        (2, RAISE, [1], "environment 1 raised ValueError: the wheel came off"),
        (0, HALF, [1], f"environment 1 returned an unusable row: {TOO_SHORT}"),
        (2, HALF, [1], f"environment 1 returned an unusable row: {TOO_SHORT}"),
        (2, DIE, [0, 1], "the worker of environments 0 to 1 was killed by SIGKILL"),
        (3, DIE, [1], "environment 1 was killed by SIGKILL"),
        (2, HANG, [0, 1], "the worker of environments 0 to 1 did not answer for 0.3 s"),
    ],
)
def test_failure_truncates_open_episode(workers, action, lost, why):
    with fails(0) as whole, fails(workers, timeout=0.3 if action == HANG else 30.0) as env:
        whole.reset(), env.reset()
        unbroken, rows = roll(whole, {}), roll(env, {3: [NOTHING, action, NOTHING]})
        others = [index for index in range(3) if index not in lost]
        for one, two in zip(unbroken, rows):
            same(one, two, others)  # other environments are not affected
        before, closed, first, after = rows[2:6]
        assert closed["closed"] == set(lost) and not before["closed"] | first["closed"]
        for index in lost:
            for name in ("count", "draw"):
                np.testing.assert_array_equal(closed[name][index], before[name][index])
            assert closed["truncated"][index] and not closed["terminated"][index]
            assert closed["reward"][index] == 0 and not closed["is_first"][index]
            assert first["is_first"][index] and first["count"][index] == 0 and not first["truncated"][index]
            assert after["count"][index] == 1 and after["reward"][index] == 1
            # The seed is that of the next episode, as after a regular end.
            np.testing.assert_array_equal(first["draw"][index], unbroken[9]["draw"][index])
        assert env.restarts == 1 and len(env.said) == 1 and env.said[0].startswith(why)
        assert "restart 1; 1 of 10 in the last 10 min" in env.said[0]
        kind = {DIE: "died", HANG: "hung"}.get(action, "raised")
        assert env.get_state()["restarts"] == {"raised": 0, "died": 0, "hung": 0} | {kind: 1}


def test_failures_do_not_depend_on_workers():
    plan = {2: [RAISE, 0, 0], 3: [0, 0, HALF], 7: [RAISE, RAISE, 0]}
    rolls = []
    for workers in (0, 1, 3):
        with fails(workers) as env:
            env.reset()
            rolls.append(roll(env, plan))
            assert env.restarts == 4
    for other in rolls[1:]:
        for one, two in zip(rolls[0], other):
            same(one, two)


def test_killed_and_stopped_workers_are_replaced():
    with fails(3, timeout=0.5) as env:
        env.reset()
        roll(env, {}, 2)
        os.kill(env.worker_pids()[0], signal.SIGKILL)
        os.kill(env.worker_pids()[2], signal.SIGSTOP)
        before = env.worker_pids()
        rows = roll(env, {}, 3)
        assert rows[0]["closed"] == {0, 2} and rows[1]["is_first"].tolist() == [True, False, True]
        assert rows[2]["count"].ravel().tolist() == [1.0, 5.0, 1.0]
        now = env.worker_pids()
        assert now[1] == before[1] and now[0] != before[0] and now[2] != before[2]
        assert [line.split(":")[0] for line in env.said] == [
            "environment 0 was killed by SIGKILL",
            "environment 2 did not answer for 0.5 s",
        ]


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_reset_tries_next_seed(workers):
    with fails(workers, bad_seeds=3, restarts={"limit": 100}) as env:
        env.reset()
        rows = roll(env, {}, 40)
        firsts = [row["is_first"] for row in rows]
        assert sum(flags.sum() for flags in firsts) == 12  # every tenth step, independent of failed attempts
        assert env.restarts > 3 and not any(row["closed"] for row in rows)
        assert env.get_state()["episode"].sum() == 12 + env.restarts
        assert all(
            "raised RuntimeError: no level for seed" in line and "tries a new seed" in line
            for line in env.said
        )


@pytest.mark.parametrize("workers", [0, 2])
def test_failed_resets_stop_run_and_allow_resume(workers, tmp_path):
    mark = tmp_path / "mark"
    options = {"workers": workers, "seed": 4, "mark": str(mark), "restarts": {"limit": 3}}
    with (
        make_env(sample_envs.NeverAgain, 3, **options) as env,
        make_env(sample_envs.NeverAgain, 3, **options) as other,
    ):
        env.listen([].append)
        env.reset()
        roll(env, {}, 4)
        mark.touch()
        rows = roll(env, {0: [NOTHING, RAISE, NOTHING]}, 2)
        assert rows[1]["is_first"].tolist() == [False, True, False] and not rows[1]["truncated"].any()
        with pytest.raises(
            EnvironmentFaultError, match=r"environment 1 raised RuntimeError: the levels(.|\n)*Traceback"
        ):
            env.step(np.zeros(3, np.int64))
        assert env.restarts == 3
        state = env.get_state()
        assert state["unbegun"] == [1] and env.failure is not None
        mark.unlink()
        assert other.set_state(state) == [] and other.is_first.tolist() == [False, True, False]
        assert other.last_obs["count"].ravel().tolist() == [6.0, 0.0, 6.0]
        assert other.get_state()["episode"].tolist() == [0, 4, 0] and other.restarts == 3


def test_too_many_failures_stop_run():
    with fails(2, restarts={"limit": 2, "minutes": 5}) as env:
        env.reset()
        rows = roll(env, {0: [RAISE, 0, 0], 2: [0, 0, DIE], 4: [0, 0, RAISE]}, 5)
        assert rows[4]["closed"] == {2}  # the step is completed, for the checkpoint
        with pytest.raises(
            EnvironmentFaultError, match=r"environment 2 raised ValueError.* after 2 restarts in 5 min"
        ) as caught:
            env.step(np.zeros(3, np.int64))
        assert "raise ValueError" in str(caught.value) and env.restarts == 2
        assert env.get_state()["last"]["truncated"].tolist() == [False, False, True]


def test_limit_counts_only_recent_failures():
    now = [0.0]
    log = FaultLog(RestartLimit(limit=3, minutes=1.0), clock=lambda: now[0])
    log.report = lambda message: None
    for _ in range(20):
        now[0] += 20.1
        log.record("raised", "environment 0", "raised")
    assert log.failure is None and log.total == 20
    now[0] += 20.1
    log.record("died", "environment 0", "died")
    assert log.failure is None
    log.record("hung", "environment 0", "hung")
    assert log.failure is not None and log.counts == {"raised": 20, "died": 1, "hung": 0}
    copy = FaultLog(RestartLimit())
    copy.set_state(log.get_state())
    assert copy.total == 21 and copy.failure is None
    endless = FaultLog(RestartLimit(limit=None))
    endless.report = log.report
    for attempt in range(1, 101):
        endless.record("raised", "environment 0", "raised", consecutive=attempt)
    assert endless.failure is None
    endless.record("raised", "environment 0", "raised", consecutive=101)
    assert "could not start an episode in 101 attempts" in str(endless.failure)


@pytest.mark.parametrize("workers", [0, 2])
def test_first_reset_raises_unless_trusted(workers, tmp_path):
    mark = tmp_path / "mark"
    mark.touch()
    options = {"workers": workers, "mark": str(mark), "restarts": {"limit": 2}}
    with pytest.raises(LabError, match="environment 0 raised RuntimeError: the levels are used up"):
        make_env(sample_envs.NeverAgain, 2, **options).reset()
    with make_env(sample_envs.NeverAgain, 2, **options) as env:
        said = []
        env.listen(said.append, trusted=True)
        env.reset()
        assert len(said) == 2
        with pytest.raises(EnvironmentFaultError, match="the levels are used up"):
            env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize(("workers", "new_workers"), [(0, 0), (2, 2), (0, 3)])
def test_resume_after_failures_is_exact(workers, new_workers):
    plan = {1: [RAISE, 0, 0], 4: [0, HALF, RAISE], 5: [0, 0, RAISE]}
    with fails(workers) as env, fails(new_workers) as other:
        env.reset()
        other.reset()
        for stop in range(8):  # before, at and after every failure
            roll(env, {0: plan.get(stop, [NOTHING] * 3)}, 1)
            assert other.set_state(env.get_state()) == []
            np.testing.assert_array_equal(other.is_first, env.is_first)
            np.testing.assert_array_equal(other.last_dones, env.last_dones)
            for name, value in env.last_obs.items():
                np.testing.assert_array_equal(other.last_obs[name], value)
            assert other.restarts == env.restarts
        for one, two in zip(roll(env, {2: [RAISE, 0, 0]}), roll(other, {2: [RAISE, 0, 0]})):
            same(one, two)
            assert one["closed"] == two["closed"]


def test_death_during_retry_keeps_received_rows(monkeypatch):
    with fails(1) as env:
        env.reset()
        roll(env, {2: [NOTHING, RAISE, NOTHING]}, 3)
        pool = env.pool
        send_reset, receive = pool._send_reset, pool.workers[0].receive

        def kill_and_send(envs, options):
            monkeypatch.undo()
            os.kill(env.worker_pids()[0], signal.SIGKILL)
            return send_reset(envs, options)

        # The reset of environment 1 fails; during its retry the process of all three dies.
        faults = {"faults": {1: "RuntimeError: no"}}
        monkeypatch.setattr(pool.workers[0], "receive", lambda timeout=None: receive(timeout) | faults)
        monkeypatch.setattr(pool, "_send_reset", kill_and_send)
        rows = roll(env, {}, 3)
        assert rows[0]["count"].ravel().tolist() == [4, 0, 4] and rows[0]["reward"].tolist() == [1, 0, 1]
        assert rows[0]["truncated"].tolist() == [True, False, True] and rows[0]["closed"] == {0, 2}
        assert rows[1]["is_first"].tolist() == [True, False, True]
        assert rows[2]["count"].ravel().tolist() == [1, 2, 1] and env.restarts == 3


def test_run_can_be_saved_if_no_process_starts(monkeypatch):
    with fails(2) as env:
        env.reset()

        def no_process(*args, **kwargs):
            raise BlockingIOError("Resource temporarily unavailable")

        monkeypatch.setattr(env.pool, "_make_worker", no_process)
        rows = roll(env, {0: [0, DIE, 0]}, 1)
        assert rows[0]["closed"] == {0, 1} and env.get_state()["last"]["truncated"].tolist() == [
            True,
            True,
            False,
        ]
        with pytest.raises(
            EnvironmentFaultError, match="cannot be started: Resource temporarily unavailable"
        ):
            env.step(np.zeros(3, np.int64))


def test_failures_are_warnings_by_default():
    env = make_env(sample_envs.Fails, 1, workers=0)
    env.reset()
    with pytest.warns(RuntimeWarning, match="environment 0 raised ValueError: the wheel came off"):
        env.step(np.array([RAISE]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.step(np.array([NOTHING]))


def test_render_after_failure_returns_last_frame():
    with make_env("dummy/discrete", 1, workers=1, render=True) as env:
        env.listen([].append)
        env.reset()
        frame = env.frame()
        os.kill(env.worker_pids()[0], signal.SIGKILL)
        env.step(np.zeros(1, np.int64))
        np.testing.assert_array_equal(env.frame(), frame)
        env.step(np.zeros(1, np.int64))
        assert env.frame().shape == frame.shape


def test_settings_are_checked():
    for restarts in ({"limit": -1}, {"limit": True}, {"minutes": 0}, {"number": 3}, {"limit": "3"}):
        with pytest.raises(ConfigError, match=r"environment\.restarts"):
            make_env("dummy/count", restarts=restarts)
    with pytest.raises(ConfigError, match=r"environment\.timeout"):
        make_env("dummy/count", timeout=0)
    with pytest.raises(ConfigError, match=r"environment\.history_limit"):
        make_env("dummy/count", history_limit=-1)
    assert RestartLimit.from_config({"limit": None}).limit is None


def test_restart_is_fast():
    with fails(2) as env:
        env.reset()
        begin = time.monotonic()
        roll(env, {0: [0, 0, DIE]}, 3)
        assert (
            time.monotonic() - begin < 20.0
        )  # a process starts in a fraction of a second when the machine is free
