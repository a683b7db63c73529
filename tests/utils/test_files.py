from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from rl_lab.errors import CheckpointError, ConfigError, RunLockedError
from rl_lab.utils import files
from rl_lab.utils.files import (
    RunLock,
    crc32_of,
    free_bytes,
    inside,
    read_json,
    remove_temporary,
    write_atomic,
    write_json_atomic,
)


def test_write_returns_size_and_checksum(tmp_path):
    path = tmp_path / "new" / "data.bin"
    data = os.urandom(3 * files.BLOCK // 2)
    assert write_atomic(path, lambda file: file.write(data)) == (len(data), zlib.crc32(data))
    assert path.read_bytes() == data and crc32_of(path) == zlib.crc32(data)
    assert os.listdir(path.parent) == ["data.bin"]


@pytest.mark.parametrize("writer", ["seek", "torch", "numpy"])
def test_checksum_with_seeking_writers(tmp_path, writer):
    def seeks(file):
        file.write(b"....tail")
        file.seek(0)
        file.write(b"head")
        file.seek(2)  # and leaves the position in the middle

    write = {
        "seek": seeks,
        "torch": lambda file: torch.save({"x": torch.arange(1000)}, file),
        "numpy": lambda file: np.arange(5000).tofile(file),
    }[writer]
    path = tmp_path / "data"
    size, crc = write_atomic(path, write)
    assert (size, crc) == (path.stat().st_size, zlib.crc32(path.read_bytes()))


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")]
)
def test_failed_write_keeps_old_file(tmp_path, error):
    path = tmp_path / "data"
    path.write_bytes(b"old")

    def fails(file):
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomic(path, fails)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["data"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_system_call_keeps_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "data"
    path.write_bytes(b"old")

    def fails(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="Input/output"):
        write_atomic(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["data"]


def test_temporary_files_are_removed(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in (".a.pt.12.tmp", "deep/.b.13.tmp", "keep.tmp", "keep.pt"):
        (tmp_path / name).touch()
    remove_temporary(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == ["keep.pt", "keep.tmp"]


def test_json_round_trip_and_refusals(tmp_path):
    path = tmp_path / "a.json"
    write_json_atomic(path, {"a": [1, 2.5, None, "é"]})
    assert read_json(path) == {"a": [1, 2.5, None, "é"]}
    with pytest.raises(ValueError):
        write_json_atomic(path, {"a": float("nan")})
    assert read_json(path)["a"][0] == 1
    with pytest.raises(CheckpointError, match="does not exist"):
        read_json(tmp_path / "none.json")
    for damage in (b"", b'{"a": [1, 2', b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(damage)
        with pytest.raises(CheckpointError, match="damaged"):
            read_json(path)


def test_inside_refuses_paths_outside(tmp_path):
    run = tmp_path / "run"
    (run / "media").mkdir(parents=True)
    assert inside(run, "media/a.mp4") == run.resolve() / "media" / "a.mp4"
    assert inside(run, "media/../b") == run.resolve() / "b"
    assert inside(run, run / "c") == run.resolve() / "c"
    (run / "link").symlink_to(tmp_path)
    for path in ("../x", "/etc/passwd", "media/../../x", "link/x", f"../{run.name}-other/x", "a\0b"):
        with pytest.raises(ConfigError):
            inside(run, path)
    alias = tmp_path / "alias"
    alias.symlink_to(run)
    assert inside(alias, "d") == run.resolve() / "d"


def test_free_bytes_of_missing_path(tmp_path):
    assert free_bytes(tmp_path / "a" / "b") > 0


HOLD = """
import sys, time, os
from pathlib import Path
from rl_lab.utils.files import RunLock
lock = RunLock(Path(sys.argv[1])).acquire()
if len(sys.argv) > 2 and os.fork() == 0:
    os.write(1, b"child %d\\n" % os.getpid())  # whole lines: two processes write here
    time.sleep(60)
os.write(1, b"held\\n")
time.sleep(60)
"""


def hold(folder: Path, env: dict[str, str], *extra: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder), *extra]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def test_lock_excludes_second_process(tmp_path, subprocess_env):
    process = hold(tmp_path, subprocess_env)
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(RunLockedError, match=rf"is in use by process {process.pid} on \S+: wait"):
            RunLock(tmp_path).acquire()
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == process.pid
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        with RunLock(tmp_path) as lock:
            assert lock.held
            assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    finally:
        process.kill()
        process.wait()


def test_forked_worker_does_not_hold_lock(tmp_path, subprocess_env):
    process = hold(tmp_path, subprocess_env, "fork")
    child = None
    try:
        lines = [process.stdout.readline() for _ in range(2)]
        child = int(next(line for line in lines if line.startswith("child")).split()[1])
        with pytest.raises(RunLockedError):  # the child's exit from the lock did not open it
            RunLock(tmp_path).acquire()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        os.kill(child, 0)  # still there
        deadline = time.monotonic() + 5
        while True:
            try:
                RunLock(tmp_path).acquire().release()
                break
            except RunLockedError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
        if child is not None:
            os.kill(child, signal.SIGKILL)


def test_lock_within_one_process_and_release(tmp_path):
    with RunLock(tmp_path) as first:
        assert first.acquire() is first
        with pytest.raises(RunLockedError, match=str(os.getpid())):
            RunLock(tmp_path).acquire()
    assert not first.held
    RunLock(tmp_path).acquire().release()
