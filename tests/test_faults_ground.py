"""What a run stands on vanishes: folders, locks, shared memory, terminals, the trainer itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import rl_lab
from rl_lab.cli import main
from rl_lab.environments import env_runner
from rl_lab.environments import workers as workers_module
from rl_lab.environments.make import make_env
from rl_lab.errors import EnvironmentFaultError, LabError, RunFolderLostError, RunLockedError
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.run_folder import RunFolder
from rl_lab.utils import files, stopping
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.files import RunLock, make_folder
from rl_lab.utils.stopping import stop_on_signals
from tests.test_faults import WORDS, train

HANGS = "tests.environments.sample_envs:Hangs"
REPOSITORY = Path(rl_lab.__file__).parents[1]


# --- The run folder ---


def test_lock_notices_a_moved_folder(tmp_path: Path):
    with RunLock(tmp_path / "run") as lock:
        lock.check()
        (tmp_path / "run").rename(tmp_path / "moved")
        with pytest.raises(RunFolderLostError, match="was moved to") as lost:
            lock.check()
        assert lost.value.moved_to == tmp_path / "moved"
        with pytest.raises(RunFolderLostError):
            make_folder(tmp_path / "run" / "checkpoints")
        assert not (tmp_path / "run").exists(), "it is not made again"
        (tmp_path / "run").mkdir()  # another run in its place
        shutil.rmtree(tmp_path / "moved")
        with pytest.raises(RunFolderLostError, match="replaced by another folder") as lost:
            lock.check()
        assert lost.value.moved_to is None


def test_deleted_lock_file_lets_no_second_process_in(tmp_path: Path):
    with RunLock(tmp_path / "run") as lock:
        lock.path.unlink()
        with pytest.raises(RunLockedError, match="in use by another process"):
            RunLock(tmp_path / "run").acquire()
        assert not lock.path.exists(), "a refused process writes nothing"
        lock.check()
        assert json.loads(lock.path.read_text())["pid"] == os.getpid(), "it is there again"
    RunLock(tmp_path / "run").acquire().release()


def test_a_process_that_is_being_refused_does_not_end_the_holder(tmp_path: Path, monkeypatch):
    """The holder looks at its lock while another process, slow on a busy machine, is about to be refused."""
    with RunLock(tmp_path / "run") as lock:
        lock.path.unlink()
        lock_folder, looked = files._try_flock_folder, []

        def slowly(handle: int | None) -> bool:
            lock.check()
            looked.append(lock.path.exists())
            return lock_folder(handle)

        monkeypatch.setattr(files, "_try_flock_folder", slowly)
        with pytest.raises(RunLockedError, match=f"in use by process {os.getpid()}"):
            RunLock(tmp_path / "run").acquire()
        assert looked == [True]
        lock.check()


def test_without_a_lock_on_the_folder_the_file_decides(tmp_path: Path, monkeypatch):
    """Some network file systems cannot lock folders."""
    monkeypatch.setattr(files, "_open_folder", lambda folder: None)
    first = RunLock(tmp_path / "run").acquire()
    first.path.unlink()
    first.check()
    assert first.path.exists()
    first.path.unlink()
    second = RunLock(tmp_path / "run").acquire()
    with pytest.raises(RunFolderLostError):
        first.check()
    second.check()
    first.release()
    second.release()


@pytest.mark.parametrize("how", ["moved", "replaced", "lock"])
def test_folder_changes_while_a_run_goes_on(tmp_path: Path, monkeypatch, how: str):
    run, moved = tmp_path / "run", tmp_path / "moved"
    act, calls = Orchestrator.run_action, []

    def act_and_change(self, action, phase):
        act(self, action, phase)
        calls.append(action)
        if len(calls) == 24 and how == "lock":
            (run / ".lock").unlink()
        elif len(calls) == 24:
            run.rename(moved)
            if how == "replaced":
                shutil.copytree(moved, run)

    monkeypatch.setattr(Orchestrator, "run_action", act_and_change)
    if how == "lock":
        assert train(run).counters["env_steps"] >= 48 and (run / ".lock").exists()
        return
    with pytest.raises(LabError, match=r"was moved to .*it was saved there, continue with: rl-lab resume"):
        train(run)
    monkeypatch.undo()
    if how == "replaced":
        assert (
            CheckpointManager(run / "checkpoints").steps()[-1]
            < CheckpointManager(moved / "checkpoints").steps()[-1]
        )
    else:
        assert not run.exists()
    assert rl_lab.training.resume(moved, say=len).counters["env_steps"] >= 48


def test_read_only_run_folder(tmp_path: Path, monkeypatch, capsys):
    run = tmp_path / "run"
    train(run)
    temporary_file = tempfile.TemporaryFile

    def read_only(*args, dir=None, **kwargs):
        if dir is not None and Path(dir).is_relative_to(run):
            raise OSError(30, "Read-only file system")
        return temporary_file(*args, dir=dir, **kwargs)

    before = sorted(path for path in run.rglob("*"))
    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    other = tmp_path / "current" / "run-output"
    assert main(["eval", str(run), "--episodes", "1"]) == 0
    assert f"is read-only: files are written to {other}" in capsys.readouterr().err
    assert (other / "report" / "eval.json").is_file()
    assert main(["report", str(run)]) == 0 and (other / "report" / "index.html").is_file()
    assert main(["report", "--dream", str(run), "--episodes", "1"]) == 0
    assert (other / "report" / "dream" / "index.html").is_file()
    assert sorted(path for path in run.rglob("*")) == before
    said: list[str] = []
    assert RunFolder(run).output(said.append).media == other / "media" and len(said) == 1


@pytest.mark.parametrize("where", ["lock", "spec", "config"])
def test_full_disk_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch, where: str):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    owner, name = {
        "lock": (RunLock, "_write_holder"),
        "spec": (rl_lab.run_folder, "write_json_atomic"),
        "config": (RunFolder, "save_config"),
    }[where]
    monkeypatch.setattr(owner, name, staticmethod(full) if where == "lock" else full)
    with pytest.raises(LabError, match="No space left on device"):
        train(tmp_path / "new" / "run")
    assert list(tmp_path.iterdir()) == []


# --- Processes and memory ---


def test_deleted_current_folder(tmp_path: Path, monkeypatch):
    """Workers still start, and a verb that is started there says what is wrong."""
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    (tmp_path / "current").rmdir()
    assert main(["--help"]) == 0 and main(["list"]) == 1
    with make_env("dummy/count", 2, workers=2) as env:
        env.reset()
        os.kill(env.worker_pids()[0], signal.SIGKILL)
        env.listen(len)
        for _ in range(3):
            env.step(np.zeros(2, np.int64))
        assert env.restarts == 1
    assert Path.cwd()


def test_long_temporary_folder(tmp_path: Path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert workers_module._short_temporary_folder() == "/tmp"
    assert workers_module.start_context().get_start_method() == "forkserver"
    monkeypatch.setattr(workers_module, "LONGEST_TEMPORARY_FOLDER", 2)
    assert workers_module.start_context().get_start_method() == "spawn"
    with make_env("dummy/count", 1, workers=1) as env:
        env.reset()


def test_shared_memory_without_dev_shm(tmp_path: Path, monkeypatch):
    class Full:
        calls = 0

        def RawArray(self, kind, size):
            Full.calls += 1
            if Full.calls < 2:
                raise OSError(30, "Read-only file system: '/dev/shm/pym-1'")
            return bytearray(size)

    monkeypatch.setattr(env_runner.heap.Arena, "_dir_candidates", ["/dev/shm"])
    spec = make_env("dummy/count", 1, workers=0).spec
    assert len(env_runner.shared_memory(Full(), spec, 2)) > 0
    assert env_runner.heap.Arena._dir_candidates == [], "files in the temporary folder"
    Full.calls = -10
    with pytest.raises(
        LabError, match=r"environment.workers: no memory can be shared .* environment.workers=0"
    ):
        env_runner.shared_memory(Full(), spec, 2)
    monkeypatch.setattr(env_runner.heap.Arena, "_dir_candidates", [str(tmp_path / "missing")])
    with make_env("dummy/count", 1, workers=1) as env:
        env.reset()


@pytest.mark.parametrize("workers", [0, 1])
def test_signal_ends_a_call_that_hangs(monkeypatch, workers: int):
    for module in (stopping, workers_module):
        monkeypatch.setattr(module, "GRACE_S", 0.3)
    said: list[str] = []
    with make_env(HANGS, 1, workers=workers, timeout=600) as env:
        env.listen(said.append)
        env.reset()
        began = time.monotonic()
        with stop_on_signals(lambda: None):
            threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
            for _ in range(4):
                _, _, _, truncated, infos = env.step(np.zeros(1, np.int64))
            assert truncated[0] and 0 in infos["closed"] and isinstance(env.failure, EnvironmentFaultError)
            assert env.get_state()["restarts"] and len(said) == 1 and "given up" in said[0]
            with pytest.raises(EnvironmentFaultError):
                env.step(np.zeros(1, np.int64))
        assert time.monotonic() - began < 20
        assert not stopping.STOP.overdue() and not stopping.STOP._in_call


ORPHANS = """
import sys, time
import numpy as np
from rl_lab.environments.make import make_env
env = make_env("tests.environments.sample_envs:Hangs", 1, workers=1, how=sys.argv[1], timeout=600)
env.reset()
print(env.worker_pids()[0], flush=True)
for _ in range(5):
    env.step(np.zeros(1, np.int64))
"""


def test_workers_end_with_a_killed_trainer_although_they_hang():
    """One environment sleeps, the other one holds the interpreter's lock; the second takes 12 s to end."""
    trainers, workers = [], []
    for how in ("sleep", "lock"):
        command = [sys.executable, "-c", ORPHANS, how]
        trainers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY))
    for trainer in trainers:
        assert trainer.stdout is not None
        worker = psutil.Process(int(trainer.stdout.readline()))
        workers += [worker, worker.parent()]
    time.sleep(1.0)  # until they hang
    for trainer in trainers:
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
    gone, left = psutil.wait_procs([process for process in workers if process is not None], timeout=40)
    for process in left:
        process.kill()
    assert not left and len(gone) == 4


# --- Terminals ---


@pytest.mark.parametrize("output", ["ascii and full", "closed"])
def test_output_that_cannot_be_written(tmp_path: Path, output: str):
    """Without UTF-8, on a full disk, or closed: the run trains, saves and ends with status 0."""
    command = [sys.executable, "-m", "rl_lab", "train", *WORDS, f"run_dir={tmp_path / 'run'}"]
    command += ["logging.progress=plain", "training.evaluate.every_env_steps=null"]
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"} if output != "closed" else {}
    closed = ["/bin/sh", "-c", 'exec "$@" >&- 2>&-', "sh"] if output == "closed" else []
    with open("/dev/full", "w") if output != "closed" else contextlib.nullcontext(subprocess.PIPE) as stdout:
        ended = subprocess.run(
            [*closed, *command],
            stdout=stdout,
            stderr=subprocess.PIPE,
            cwd=REPOSITORY,
            env={**os.environ, **locale},
            timeout=300,
        )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert CheckpointManager(tmp_path / "run" / "checkpoints").steps()
