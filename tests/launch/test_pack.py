"""Several processes on one device: shares, environment variables, stopping, MPS and GPUs through stand-in programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rl_lab.errors import ConfigError
from rl_lab.launch import pack as packing
from rl_lab.launch.pack import Ended, Job, Mps, Pack, find_gpus, interruptible


def job(folder: Path, name: str, code: str, share: float = 1.0) -> Job:
    return Job(name, [sys.executable, "-S", "-c", code], folder / f"{name}.txt", share)


def wait_for(pack: Pack, seconds: float = 20.0) -> list[Ended]:
    ended: list[Ended] = []
    limit = time.monotonic() + seconds
    while pack.running and time.monotonic() < limit:
        ended += pack.poll()
        time.sleep(0.02)
    return ended


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}")
    file.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(packing, "DEFAULT_PIPE", tmp_path / "no_daemon")
    monkeypatch.setattr(packing.tempfile, "gettempdir", lambda: str(tmp_path))
    return folder


def test_shares_limit_the_runs_on_each_device(tmp_path: Path):
    code = "import os, time; print(os.environ.get('CUDA_VISIBLE_DEVICES')); time.sleep(0.3)"
    with Pack(["3", "5"]) as pack:
        for number in range(4):
            assert pack.fits(job(tmp_path, str(number), code, 0.5))
            pack.start(job(tmp_path, str(number), code, 0.5))
        assert not pack.fits(job(tmp_path, "4", code, 0.5))
        assert pack.running == ["0", "1", "2", "3"]
        ended = wait_for(pack)
    assert [item.returncode for item in ended] == [0] * 4
    assert [(tmp_path / f"{n}.txt").read_text().strip() for n in range(4)] == ["3", "5", "3", "5"]


def test_job_larger_than_a_device_runs_alone(tmp_path: Path):
    with Pack() as pack:
        large = job(tmp_path, "large", "pass", share=3.0)
        assert pack.fits(large)
        pack.start(large)
        assert not pack.fits(job(tmp_path, "small", "pass", share=0.1))
        wait_for(pack)


def test_processes_get_one_thread_and_the_variables_of_mps(tmp_path: Path):
    code = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['CUDA_MPS_PIPE_DIRECTORY'])"
    with Pack(["0"], variables={"CUDA_MPS_PIPE_DIRECTORY": "/pipe"}) as pack:
        pack.start(job(tmp_path, "a", code))
        wait_for(pack)
        assert "CUDA_VISIBLE_DEVICES" not in pack.environment(0)  # the only GPU: as in this process
    assert (tmp_path / "a.txt").read_text() == "1 /pipe\n"


def test_failed_process_is_described(tmp_path: Path):
    with Pack() as pack:
        pack.start(job(tmp_path, "says", "import sys; sys.exit('error: algorithm.x is wrong')"))
        (says,) = wait_for(pack)
        pack.start(job(tmp_path, "silent", "import os; os.kill(os.getpid(), 9)"))
        (silent,) = wait_for(pack)
    assert says.returncode == 1 and says.error() == "algorithm.x is wrong"
    assert silent.error() == "the process was ended by SIGKILL"
    assert packing.describe_status(3) == "the process ended with status 3"


STOPS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(30)
"""


def wait_for_text(file: Path, text: str) -> None:
    limit = time.monotonic() + 20
    while time.monotonic() < limit and (not file.exists() or text not in file.read_text()):
        time.sleep(0.02)
    assert text in file.read_text()


def test_stop_asks_first_and_kills_after_the_grace_period(tmp_path: Path):
    messages: list[str] = []
    deaf = STOPS.replace("lambda *_: sys.exit(7)", "signal.SIG_IGN")
    with Pack(grace=0.5, say=messages.append) as pack:
        pack.start(job(tmp_path, "good", STOPS, 0.5))
        pack.start(job(tmp_path, "deaf", deaf, 0.5))
        for name in ("good", "deaf"):
            wait_for_text(tmp_path / f"{name}.txt", "ready")
        ended = {item.job.name: item.returncode for item in pack.stop()}
    assert ended == {"good": 7, "deaf": -signal.SIGKILL}
    assert messages == ["deaf did not stop within 0 s and is killed"] and pack.running == []


def test_process_stops_when_its_parent_is_killed(tmp_path: Path):
    """A suite that is killed with SIGKILL leaves no run behind."""
    child = tmp_path / "child.py"
    child.write_text(
        "import os, signal, sys, time\n"
        "from rl_lab.launch.pack import stop_with_parent\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('stopped', flush=True), os._exit(0)))\n"
        "stop_with_parent(int(sys.argv[1])); print('ready', flush=True); time.sleep(30)\n"
    )
    log = tmp_path / "child.txt"
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time\n"
            f"subprocess.Popen([sys.executable, {str(child)!r}, str(os.getpid())], stdout=open({str(log)!r}, 'w'))\n"
            "time.sleep(30)",
        ]
    )
    wait_for_text(log, "ready")
    parent.kill()
    parent.wait()
    wait_for_text(log, "stopped")


def test_signals_are_collected():
    with interruptible() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


# --- GPUs ---


def test_gpus_come_from_nvidia_smi(programs: Path, monkeypatch):
    program(
        programs,
        "nvidia-smi",
        "echo '0, GPU-aa, NVIDIA H200, 143000'\necho '1, GPU-bb, NVIDIA H200, [N/A]'\n",
    )
    first, second = find_gpus()
    assert (
        first.index == "0" and first.name == "NVIDIA H200" and first.free_gib == pytest.approx(139.6, abs=0.1)
    )
    assert second.free_gib == float("inf")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bb")
    assert [gpu.index for gpu in find_gpus()] == ["1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert find_gpus() == []


def test_machine_without_nvidia_smi_has_no_gpu(programs: Path):
    program(programs, "nvidia-smi", "exit 9\n")
    assert find_gpus() == []


# --- MPS ---


def test_mps_is_started_and_stopped(programs: Path, tmp_path: Path):
    program(
        programs,
        "nvidia-cuda-mps-control",
        f'if [ "$1" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> {tmp_path}/calls;\n'
        f"else read word; echo $word >> {tmp_path}/calls; fi\n",
    )
    messages: list[str] = []
    with Mps("auto", messages.append) as mps:
        pipe = mps.environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipe).is_dir()
    assert (tmp_path / "calls").read_text() == f"start {pipe} \nquit\n"
    assert messages == ["MPS: kernels of all runs share the GPU"]


def test_running_daemon_is_used_and_left_running(programs: Path, tmp_path: Path, monkeypatch):
    program(programs, "nvidia-cuda-mps-control", f"read word; echo $1 $word >> {tmp_path}/calls\n")
    (tmp_path / "pipe").mkdir()
    (tmp_path / "pipe" / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipe"))
    with Mps("auto", lambda text: None) as mps:
        assert mps.environment["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "pipe")
    assert (tmp_path / "calls").read_text() == "get_server_list\n"


def test_mps_that_cannot_start(programs: Path):
    program(programs, "nvidia-cuda-mps-control", "exit 1\n")
    messages: list[str] = []
    with Mps("auto", messages.append) as mps:
        assert mps.environment == {}
    assert messages == ["MPS: not used, nvidia-cuda-mps-control ended with status 1"]
    with pytest.raises(ConfigError, match=r"^launch.mps is on, but"), Mps("on", messages.append):
        pass
    with pytest.raises(ConfigError, match=r"^launch.mps must be auto, on or off"):
        Mps("yes")


def test_machine_without_mps(monkeypatch):
    monkeypatch.setenv("PATH", "")
    messages: list[str] = []
    with Mps("auto", messages.append):
        assert messages == ["MPS: not used, nvidia-cuda-mps-control is not installed"]
