import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.errors import EnvironmentFaultError, LabError
from tests.environments import sample_envs

ZEROS, ONES = np.zeros(3, np.int64), np.ones(3, np.int64)
ROOT = Path(__file__).parents[2]


def gone(pid, seconds=5.0):
    """Return whether the process ends within that time (a zombie has ended)."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):  # before it was opened, or between that and reading
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("workers", [0, 2])
def test_exception_is_reported_with_traceback(workers):
    env = make_env(sample_envs.Raises, 3, workers=workers, restarts={"limit": 0})
    env.reset()
    for _ in range(2):
        env.step(ZEROS)
    env.step(np.array([0, 0, 1]))
    for call in (lambda: env.step(ZEROS), env.reset, env.render):
        with pytest.raises(
            EnvironmentFaultError, match="environment 2 raised ValueError: the wheel came off"
        ) as caught:
            call()
        assert "sample_envs.py" in str(caught.value) and "raise ValueError" in str(caught.value)
    env.close()


def test_constructor_exception_is_reported():
    make = sample_envs.RaisesWhenMade
    make.made = 0
    with pytest.raises(RuntimeError, match="no licence"):  # found here, before any worker starts
        make_env(make, 2, workers=2)
    make.made = 0
    with pytest.raises(LabError, match="environment 1 raised: RuntimeError: no licence found"):
        make_env(make, 2, workers=1, only_once=True)  # once in the probe, once for environment 0


def test_dead_worker_is_detected():
    env = make_env(sample_envs.Dies, 3, workers=2, restarts={"limit": 0})
    env.reset()
    env.step(np.array([0, 1, 0]))
    with pytest.raises(EnvironmentFaultError, match=r"environments 0 to 1 was killed by SIGKILL.*num_envs"):
        env.step(ZEROS)
    env.close()


def test_worker_death_between_steps_is_detected():
    env = make_env("dummy/count", 3, workers=3, restarts={"limit": 0})
    env.reset()
    os.kill(env.worker_pids()[1], signal.SIGKILL)
    assert gone(env.worker_pids()[1])
    env.step(ZEROS)
    with pytest.raises(EnvironmentFaultError, match="environment 1 was killed by SIGKILL"):
        env.step(ZEROS)


def test_timeout_applies_per_call():
    # Each call takes 0.2 s: three in a row exceed the timeout, which applies to each call.
    env = make_env(sample_envs.Slow, 3, workers=1, timeout=0.4, restarts={"limit": 0}, seconds=0.2)
    env.reset()
    assert env.step(ONES)[1].tolist() == [1.0, 1.0, 1.0]
    env.close()
    env = make_env(sample_envs.Slow, 1, workers=1, timeout=0.1, restarts={"limit": 0})
    env.reset()
    env.step(ONES[:1])
    with pytest.raises(EnvironmentFaultError, match=r"environment 0 did not answer for 0\.1 s"):
        env.step(ONES[:1])


def test_worker_processes_are_small_and_get_variables(monkeypatch):
    monkeypatch.setenv("TOLD", "42")
    with make_env("tests.environments.sample_envs:make_process", 3, workers=2) as env:
        obs = env.reset()[0]["vector"]
        pids, torch, threads, told = env.step(ZEROS)[0]["vector"].T
    assert pids[0] == pids[1] != pids[2] and os.getpid() not in pids
    assert not torch.any() and (threads == 1).all() and (told == 42).all()
    np.testing.assert_array_equal(obs[:, 0], pids)


def test_close_stops_processes_and_frees_memory():
    files = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    env = make_env("dummy/dict", 4, workers=2)
    env.reset()
    pids = env.worker_pids()
    processes = [worker.process for worker in env.pool.workers]
    env.close()
    assert all(gone(pid) for pid in pids) and not any(process.is_alive() for process in processes)
    assert (
        not os.path.isdir("/dev/shm")
        or not {name for name in os.listdir("/dev/shm") if "pym" in name} - files
    )


def test_unreferenced_environment_is_closed():
    env = make_env("dummy/count", 2, workers=2)
    pids = env.worker_pids()
    del env
    assert all(gone(pid) for pid in pids)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_fork_does_not_stop_workers():
    with make_env("dummy/count", 3, workers=2) as env:
        env.reset()
        child = os.fork()
        if child == 0:
            env.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert env.step(ZEROS)[1].tolist() == [1.0, 1.0, 1.0]


SCRIPT = """
import os, sys
print("imported", flush=True)
import numpy as np, gymnasium
import rl_lab.environments as environments

class Mine(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}
    def step(self, action):
        return np.ones(1, np.float32), 1.0, False, False, {}

env = environments.make_env(Mine, 2, workers=2)
env.reset()
print(env.step([0, 0])[1].tolist(), *env.worker_pids(), flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def start(script, mode):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, str(script), mode], env=environ, text=True, **pipes)


def test_script_without_main_guard_runs_once(script):
    process = start(script, "exit")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    imported, line = out.strip().splitlines()
    assert imported == "imported" and line.startswith("[1.0, 1.0]")
    assert all(gone(int(pid)) for pid in line.split()[2:])


def test_workers_exit_when_trainer_is_killed(script):
    process = start(script, "wait")
    assert process.stdout.readline() == "imported\n"
    pids = [int(pid) for pid in process.stdout.readline().split()[2:]]
    assert len(pids) == 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert all(gone(pid) for pid in pids)
    process.stdin.close(), process.stdout.close(), process.stderr.close()


def test_unpicklable_factory_raises():
    import threading

    lock = threading.Lock()

    def factory():
        with lock:
            return sample_envs.Base()

    with pytest.raises(LabError, match=r"cannot be sent to worker processes.*workers=0"):
        make_env(factory, 2, workers=2)
    assert make_env(factory, 2, workers=0).num_workers == 0
