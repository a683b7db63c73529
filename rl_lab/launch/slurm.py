"""Runs as jobs of SLURM, through submitit: signal → checkpoint → requeue → exact resume.

A job starts the run as a process of its own. When SLURM announces the end of the job's time (SIGUSR2), the job sends
SIGTERM to that process, which finishes its action, saves and ends; then the job is put back into the queue and starts
the same command, which continues from the checkpoint. A preempted job gets SIGTERM from SLURM and does the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError, LabError, MissingPackageError, install_line, one_line
from rl_lab.utils.stopping import STOPPED, STOPPED_VARIABLE

POLL_SECONDS = 0.2
KEEP_SECONDS = 10.0  # of the grace time, for putting the job back into the queue


def require_submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise MissingPackageError(f"launch=slurm needs submitit: {install_line('slurm')}") from error
    return submitit


@dataclass
class RunJob:
    """What a job executes: one run, from its beginning or from its checkpoint.

    command: starts or continues the run; grace: seconds that it has to save
    """

    command: Sequence[str]
    grace: float = 120.0

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"command": list(self.command), "grace": self.grace, "_process": None}

    def __call__(self) -> int:
        """Run the command; return 0 when the run is finished. The signal handler of submitit may end this call."""
        process = subprocess.Popen(
            list(self.command),
            env={**os.environ, STOPPED_VARIABLE: str(STOPPED), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            # SLURM sends it to every process of the job; the run is to get SIGTERM, and once only.
            preexec_fn=_ignore_announcement,
        )
        self._process = process
        try:
            while not has_ended(process):
                time.sleep(POLL_SECONDS)
            if process.wait() == STOPPED:
                self._requeue()
            if process.returncode:
                raise LabError(f"the run ended with status {process.returncode}: its last lines are above")
            return 0
        finally:
            if process.poll() is None:
                process.terminate()

    def _requeue(self) -> None:
        """The run was asked to stop by someone else: take the way of the announcement, which requeues the job."""
        if callable(signal.getsignal(signal.SIGUSR2)):
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(POLL_SECONDS)  # the handler runs here and ends this process

    def checkpoint(self) -> Any:
        """Called by submitit in its signal handler: let the run save; return what to put into the queue."""
        submitit = require_submitit()
        process = self._process
        if process is not None and not has_ended(process):
            os.kill(process.pid, signal.SIGTERM)
            limit = time.monotonic() + max(1.0, self.grace - KEEP_SECONDS)
            while not has_ended(process) and time.monotonic() < limit:
                time.sleep(POLL_SECONDS / 4)
            if not has_ended(process):  # the job continues from its last checkpoint
                os.kill(process.pid, signal.SIGKILL)
        return submitit.helpers.DelayedSubmission(RunJob(self.command, self.grace))


def _ignore_announcement() -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a child has ended, without collecting its status.

    `Popen.poll` holds a lock: a signal handler that interrupts it could never get an answer.
    """
    if process.returncode is not None:
        return True
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    return True


# --- Submitting ---


def submit(
    runs: Mapping[str, Sequence[str]],  # name -> command
    settings: Mapping[str, Any],  # the group `launch`
    folder: Path,  # submitit's files and the output of the jobs
    say: Callable[[str], None] = print,
) -> list[Any]:
    """Submit one job for each run, as one array if there are several; return submitit's jobs."""
    submitit = require_submitit()
    cluster = str(settings["cluster"])
    try:
        executor = submitit.AutoExecutor(
            folder=folder, cluster=cluster, **{f"{cluster}_max_num_timeout": int(settings["requeues"])}
        )
        executor.update_parameters(**parameters(settings))
        works = [RunJob(list(command), float(settings["grace"])) for command in runs.values()]
        if len(works) == 1:
            jobs = [executor.submit(works[0])]
        else:
            with executor.batch():
                jobs = [executor.submit(work) for work in works]
    except Exception as error:
        hint = "" if cluster == "local" else "; launch.cluster=local runs on this machine"
        raise LabError(f"launch=slurm: the jobs cannot be submitted: {one_line(error)}{hint}") from error
    for name, job in zip(runs, jobs):
        say(f"{name}: job {job.job_id}, output in {job.paths.stdout}")
    return jobs


def parameters(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of submitit's executor for the group `launch`."""
    found: dict[str, Any] = {
        "name": "rl-lab",
        "timeout_min": int(settings["time"]),
        "gpus_per_node": int(settings["gpus"]),
        "cpus_per_task": int(settings["cpus"]),
        "mem_gb": float(settings["memory_gb"]),
        "stderr_to_stdout": True,
    }
    if settings["cluster"] == "local":
        return {**found, "local_setup": list(settings["setup"])}
    options = {
        "partition": settings["partition"],
        "account": settings["account"],
        "qos": settings["qos"],
        "constraint": settings["constraint"],
        "array_parallelism": settings["at_once"],
        "signal_delay_s": int(settings["grace"]),
        "setup": list(settings["setup"]) or None,
        "additional_parameters": dict(settings["extra"]) or None,
    }
    return found | {f"slurm_{key}": value for key, value in options.items() if value is not None}


def wait(jobs: Sequence[Any], names: Sequence[str], say: Callable[[str], None] = print) -> dict[str, str]:
    """Wait until all jobs have ended; return the failures, name -> error."""
    failures = {}
    for name, job in zip(names, jobs):
        job.wait()
        error = job.exception() if job.paths.result_pickle.exists() else None
        if job.paths.result_pickle.exists() and error is None:
            say(f"{name}: finished")
            continue
        reason = last_error_of(job) or f"the job ended in state {job.state}"
        failures[name] = reason
        say(f"{name}: {reason} (output: {job.paths.stdout})")
    return failures


def last_error_of(job: Any) -> str:
    from rl_lab.launch.pack import last_error

    return last_error(Path(job.paths.stdout))


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a grace time that leaves the run no time to train."""
    if float(settings["grace"]) >= 60 * float(settings["time"]):
        raise ConfigError(
            f"launch.grace={settings['grace']} s must be less than launch.time={settings['time']} minutes"
        )
