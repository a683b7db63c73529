"""Several runs on one GPU: processes in slots, under NVIDIA's Multi-Process Service (MPS) where there is one.

One run of a small model leaves most of a GPU idle. Under MPS kernels of several processes run at the same
time. `Pack` starts commands while a device has room for them, and stops them in an orderly way: a process that
is killed (SIGKILL) can take the other clients of the MPS server down with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from rl_lab.errors import ConfigError

MPS_CONTROL = "nvidia-cuda-mps-control"
DEFAULT_PIPE = Path("/tmp/nvidia-mps")  # where CUDA looks for a daemon if no variable names another place
BETWEEN_SIGNALS = 0.5  # seconds: of two MPS clients that were stopped in the same moment, one was lost
GRACE_SECONDS = 120.0  # a stopped run may be in the middle of an evaluation
ERROR_PREFIX = "error: "
LOG_TAIL = 20_000  # bytes of a log that are searched for the error


# --- Devices ---


@dataclass(frozen=True)
class Gpu:
    """A CUDA device as nvidia-smi describes it."""

    index: str  # for CUDA_VISIBLE_DEVICES
    name: str
    free_gib: float


def find_gpus() -> list[Gpu]:
    """Return the GPUs that this process may use. torch is not imported: the parent of a pack needs no GPU memory."""
    query = "--query-gpu=index,uuid,name,memory.free"
    try:
        result = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if result.returncode != 0:
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in result.stdout.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [item.strip() for item in visible.split(",") if item.strip()]
        rows = [row for item in chosen for row in rows if item == row[0] or row[1].startswith(item)]
    return [Gpu(row[0], row[2], _gib(row[3])) for row in rows]


def _gib(mebibytes: str) -> float:
    try:
        return float(mebibytes) / 1024
    except ValueError:  # "[N/A]" on machines with unified memory
        return float("inf")


# --- MPS ---


class Mps:
    """A running MPS daemon as a context manager; `environment` is for its clients.

    mode: auto (start one if the machine has MPS), on (an error if it cannot be started), off. A daemon that
    already runs is used and left running.
    """

    def __init__(self, mode: str = "auto", say: Callable[[str], None] = print) -> None:
        if mode not in ("auto", "on", "off"):
            raise ConfigError(f"launch.mps must be auto, on or off, not '{mode}'")
        self.mode = mode
        self.say = say
        self.environment: dict[str, str] = {}
        self._started = False

    def __enter__(self) -> Mps:
        if self.mode == "off":
            return self
        problem = self._start()
        if problem and self.mode == "on":
            raise ConfigError(f"launch.mps is on, but {problem}: use launch.mps=auto")
        self.say(f"MPS: not used, {problem}" if problem else "MPS: kernels of all runs share the GPU")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started:
            self._started = False
            self._control("quit")

    def _start(self) -> str:
        """Use a running daemon or start one; return what prevents it, or ""."""
        if shutil.which(MPS_CONTROL) is None:
            return f"{MPS_CONTROL} is not installed"
        own = Path(tempfile.gettempdir()) / f"rl_lab_mps_{os.getuid()}"
        given = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        for folder in [Path(given)] if given else [DEFAULT_PIPE, own]:
            self.environment = _mps_variables(folder)
            if (folder / "control").exists() and self._control("get_server_list"):
                return ""
        for folder in map(Path, self.environment.values()):
            folder.mkdir(parents=True, exist_ok=True)
        # The daemon sees every GPU, so that the clients' CUDA_VISIBLE_DEVICES keep their meaning.
        variables = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        try:
            result = subprocess.run(
                [MPS_CONTROL, "-d"],
                env=variables | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # not a pipe: the daemon would keep it open
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=30,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self.environment = {}
            return f"{MPS_CONTROL} did not start ({error})"
        if result.returncode != 0:
            self.environment = {}
            return f"{MPS_CONTROL} ended with status {result.returncode}"
        self._started = True
        return ""

    def _control(self, command: str) -> bool:
        """Send one command to the daemon; return whether it answered."""
        try:
            result = subprocess.run(
                [MPS_CONTROL],
                input=command + "\n",
                text=True,
                capture_output=True,
                env={**os.environ, **self.environment},
                timeout=20,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return result.returncode == 0


def _mps_variables(folder: Path) -> dict[str, str]:
    log = os.environ.get("CUDA_MPS_LOG_DIRECTORY") or f"{folder}_log"
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": log}


# --- Processes ---


@dataclass(frozen=True)
class Job:
    """One command; its output goes to `log`, which is appended to."""

    name: str
    command: Sequence[str]
    log: Path
    share: float = 1.0  # of a device: 0.25 lets four such jobs run on it at a time


@dataclass(frozen=True)
class Ended:
    """A process that has ended. returncode: negative for a signal."""

    job: Job
    returncode: int
    seconds: float

    def error(self) -> str:
        """Return one sentence about a failure: the last `error:` line of the log, else how the process ended."""
        return last_error(self.job.log) or describe_status(self.returncode)


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    device: int
    begin: float


@dataclass
class Pack:
    """Runs jobs in processes; the shares of the jobs on a device add up to at most 1.

        with Pack(devices=["0"]) as pack:
            if pack.fits(job): pack.start(job)
            for ended in pack.poll(): …

    Leaving the block stops every process that still runs.
    """

    devices: Sequence[str] = ()  # CUDA_VISIBLE_DEVICES of each GPU; none: this machine has no GPU
    threads: int = 1  # OMP_NUM_THREADS of each process
    variables: Mapping[str, str] = field(default_factory=dict)  # further environment variables
    grace: float = GRACE_SECONDS
    say: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._running: list[_Running] = []

    def fits(self, job: Job) -> bool:
        """Return whether a device has room for the job; an empty device has room for any."""
        used = min(self._used())
        return used == 0.0 or used + job.share <= 1.0 + 1e-6

    @property
    def running(self) -> list[str]:
        """Return the names of the running jobs, oldest first."""
        return [item.job.name for item in self._running]

    def start(self, job: Job) -> None:
        """Start a job on the device with the most room."""
        used = self._used()
        device = used.index(min(used))
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                list(job.command),
                env={**os.environ, **self.environment(device)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process only, which stops the runs one by one
            )
        self._running.append(_Running(job, process, device, time.monotonic()))

    def environment(self, device: int) -> dict[str, str]:
        """Return the environment variables of a process on a device."""
        variables = {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            # torch.compile starts one compiler process per core otherwise, in every run.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            **self.variables,
        }
        if len(self.devices) > 1:
            variables["CUDA_VISIBLE_DEVICES"] = self.devices[device]
        return variables

    def poll(self) -> list[Ended]:
        """Return the jobs that have ended since the last call."""
        ended = []
        for item in list(self._running):
            status = item.process.poll()
            if status is not None:
                self._running.remove(item)
                ended.append(Ended(item.job, status, time.monotonic() - item.begin))
        return ended

    def terminate(self, name: str) -> None:
        """Ask one job to save and stop (SIGTERM); `poll` returns it when it has ended."""
        for item in self._running:
            if item.job.name == name and item.process.poll() is None:
                item.process.terminate()

    def stop(self, wait: Callable[[], None] = lambda: time.sleep(0.2)) -> list[Ended]:
        """Ask every process to save and stop (SIGTERM), one after another; return the jobs that have ended.

        wait: called while processes are stopping. One that has not stopped after `grace` seconds is killed.
        """
        for item in self._running:
            if item.process.poll() is None:
                item.process.terminate()
                time.sleep(BETWEEN_SIGNALS if self.devices else 0.0)
        limit = time.monotonic() + self.grace
        ended: list[Ended] = []
        while self._running and time.monotonic() < limit:
            ended += self.poll()
            if self._running:
                wait()
        for item in self._running:
            self.say(f"{item.job.name} did not stop within {self.grace:.0f} s and is killed")
            item.process.kill()
            item.process.wait()
        return ended + self.poll()

    def __enter__(self) -> Pack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self.stop()

    def _used(self) -> list[float]:
        """Return the sum of the shares on each device."""
        return [
            sum(item.job.share for item in self._running if item.device == index)
            for index in range(max(1, len(self.devices)))
        ]


def last_error(log: Path) -> str:
    """Return the last line of a log that starts with `error: `, without that word; "" if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_TAIL))
        lines = file.read().decode("utf-8", "replace").splitlines()
        for line in reversed(lines):
            if line.startswith(ERROR_PREFIX):
                return line.removeprefix(ERROR_PREFIX).strip()
    return ""


def describe_status(returncode: int) -> str:
    """Return how a process ended, for one that printed no error."""
    if returncode >= 0:
        return f"the process ended with status {returncode}"
    with contextlib.suppress(ValueError):
        return f"the process was ended by {signal.Signals(-returncode).name}"
    return f"the process was ended by signal {-returncode}"


# --- In the started process ---


def stop_with_parent(parent: int) -> None:
    """Let Linux send SIGTERM to this process when its parent dies, so that a killed pack leaves no run behind.

    parent: process id that the parent passed on.
    """
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG in linux/prctl.h
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in the returned list instead of ending this process.

    A second SIGINT raises KeyboardInterrupt.
    """
    received: list[int] = []

    def handler(number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in received:
            raise KeyboardInterrupt
        received.append(number)

    signals = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    try:
        before = {number: signal.signal(number, handler) for number in signals}
    except ValueError:  # not the main thread: the calling program handles signals
        yield received
        return
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
