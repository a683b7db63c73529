"""`environment.workers` far processes, called from the trainer: no process between, and all of them at the same time."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from rl_lab.environments import make_env
from rl_lab.environments.interpreters import peer, worker
from rl_lab.environments.vector import default_workers
from rl_lab.errors import LabError
from rl_lab.utils import stopping
from rl_lab.utils.stopping import STOP
from tests.environments import sample_envs
from tests.environments.interpreters.test_peers import Listener
from tests.environments.test_restarts import HANG, NOTHING, same
from tests.environments.test_restarts import roll as roll_actions
from tests.environments.test_vector import assert_same, make, roll

HERE = sys.executable


@pytest.fixture(autouse=True)
def _folder(monkeypatch):
    monkeypatch.chdir(Path(sample_envs.__file__).parent)
    monkeypatch.delenv(worker.TOKEN_VARIABLE, raising=False)


def children():
    """Processes of this one, without the fork server and its resource tracker."""
    found = psutil.Process().children(recursive=True)
    return {process.pid for process in found if "multiprocessing" not in " ".join(process.cmdline())}


@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_workers_are_far_processes_and_no_others(workers):
    before = children()
    with (
        make("dummy/dict", workers=0, seed=5) as here,
        make("dummy/dict", workers=workers, seed=5, python=HERE) as env,
    ):
        assert env.num_workers == workers
        started = children() - before
        assert len(started) == max(workers, 1)
        if workers:
            assert set(env.worker_pids()) == started
        assert_same(roll(here), roll(env))
        assert children() - before == started
    assert children() == before


def test_without_a_number_there_are_as_many_as_workers():
    with make("dummy/dict", python=HERE) as env:
        assert env.num_workers == default_workers(3) == len(env.worker_pids())


def test_another_host_has_a_process_for_each_worker():
    with (
        Listener() as listener,
        make("dummy/dict", workers=0) as here,
        make("dummy/dict", workers=2, host=listener.host) as env,
    ):
        assert len(psutil.Process(listener.process.pid).children()) == 2 and env.worker_pids() == []
        assert_same(roll(here), roll(env))


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, {"step"}),
        ({"action_repeat": 2}, {"step"}),
        ({"pixels": True, "size": 8}, {"step", "render"}),
    ],
)
def test_all_far_processes_work_at_the_same_time(options, calls, tmp_path):
    """Creation, reset, step, reset after an episode, replay and close; an environment fails if it is alone there."""
    task = {"task": "sample_envs:Meets", "python": HERE, "folder": str(tmp_path), **options}
    make_env(num_envs=1, workers=0, **task).close()  # its spec is known from now on
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "together").touch()
    with make_env(num_envs=2, workers=2, **task) as env:
        env.listen(pytest.fail)
        env.reset()
        for _ in range(5):
            env.step(np.zeros(2, np.int64))
        assert env.set_state(env.get_state()) == []
        assert env.restarts == 0
    met = {file.name.partition("-")[0] for file in tmp_path.iterdir()} - {"together"}
    assert met == {"open", "reset", "close", *calls}
    for call in met:
        pairs = [file.name.rpartition("-")[0] for file in tmp_path.glob(f"{call}-*")]
        assert all(pairs.count(name) == 2 for name in pairs)


def test_failed_construction_leaves_no_process(tmp_path):
    before = children()
    task = {"task": "sample_envs:Meets", "python": HERE, "folder": str(tmp_path), "count": 1}
    make_env(num_envs=1, workers=0, **task).close()
    (tmp_path / "broken").touch()
    with pytest.raises(LabError, match=r"environment 0 raised: .*it is broken"):
        make_env(num_envs=4, workers=2, **task)
    assert children() == before and not peer._peers


def test_kill_restarts_the_environments_of_its_process_only():
    with (
        make_env(sample_envs.Fails, 4, workers=0, seed=4) as whole,
        make_env("sample_envs:Fails", 4, workers=2, seed=4, python=HERE) as env,
    ):
        said = []
        env.listen(said.append)
        whole.reset(), env.reset()
        pids = env.worker_pids()
        rows = []
        for step in range(12):
            if step == 4:
                os.kill(pids[0], signal.SIGKILL)
                end = time.monotonic() + 20
                while psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
                    time.sleep(0.01)
            rows += roll_actions(env, {}, steps=1)
        for one, two in zip(roll_actions(whole, {}, steps=12), rows, strict=True):
            same(one, two, [2, 3])
        assert rows[4]["closed"] == {0, 1} and rows[4]["truncated"].tolist() == [True, True, False, False]
        assert rows[5]["is_first"].tolist() == [True, True, False, False]
        assert [row["closed"] for row in rows[5:]] == [set()] * 7
        assert env.get_state()["restarts"] == {"raised": 0, "died": 1, "hung": 0}
        assert len(said) == 1
        assert said[0].startswith("the worker of environments 0 to 1 was killed by SIGKILL: restarted")
        assert env.worker_pids()[1] == pids[1] and env.worker_pids()[0] != pids[0]


@pytest.mark.parametrize("workers", [0, 2])
def test_request_to_stop_ends_a_process_that_hangs(workers, monkeypatch):
    monkeypatch.setattr(stopping, "GRACE_S", 0.3)
    with make_env("sample_envs:Fails", 2, workers=workers, python=HERE, timeout=60.0) as env:
        said = []
        env.listen(said.append)
        env.reset()
        try:
            STOP.make()
            began = time.monotonic()
            *_, infos = env.step(np.array([NOTHING, HANG]))
        finally:
            STOP.clear()
        assert time.monotonic() - began < 20
        assert 1 in infos["closed"] and env.last_dones[1]
        assert "of the request to stop: given up" in said[0]
        assert "of the request to stop" in str(env.failure)


def test_videos_and_frames(tmp_path):
    options = {"num_envs": 2, "workers": 2, "seed": 1, "video_every": 2}
    with (
        make_env("sample_envs:Meets", video_folder=tmp_path / "here", **options) as here,
        make_env("sample_envs:Meets", video_folder=tmp_path / "there", python=HERE, **options) as there,
    ):
        for env in (here, there):
            env.reset()
            for _ in range(12):
                env.step(np.zeros(2, np.int64))
            assert env.take_side_failures() == []
        np.testing.assert_array_equal(here.frame(), there.frame())
    files = {file.name for file in (tmp_path / "there").iterdir()}
    assert len(files) == 2 and files == {file.name for file in (tmp_path / "here").iterdir()}
