"""Runs as SLURM jobs: a preempted run goes on bit for bit, through submitit's local executor; stand-ins for sbatch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rl_lab.cli import main
from rl_lab.config.compose import compose_config
from rl_lab.config.multirun import train_command
from rl_lab.errors import LabError, MissingPackageError
from rl_lab.launch.slurm import RunJob, check_settings, has_ended, parameters, require_submitit
from rl_lab.training import train_config
from rl_lab.utils.files import read_jsonl
from tests.same_run import assert_same_run

# A slow environment, so that every preemption finds the run in the middle.
WORDS = [
    "+experiment=dreamer_cartpole",
    "debug=tiny",
    "experiment.device=cpu",
    "logging.progress=plain",
    "logging.tensorboard=false",
    "training.log.every_env_steps=20",
    "training.evaluate.every_env_steps=null",
    "training.report.every_env_steps=null",
    "training.checkpoint.every_env_steps=1000",
]


def launch(*words: str) -> dict:
    from rl_lab.config.compose import to_plain

    return to_plain(compose_config(["launch=slurm", *words]).launch)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch=slurm", "launch.time=x"], "launch.time must be an integer of at least 1"),
        (["launch=slurm", "launch.time=1"], "launch.grace=120 s must be less than launch.time=1 minutes"),
        (["launch=slurm", "launch.cluster=slrum"], "launch.cluster must be slurm or local, not 'slrum'"),
        (["launch=slurm", "launch.setup=module"], "launch.setup must be a list of strings"),
    ],
)
def test_bad_settings_are_named(words: list[str], says: str, capsys):
    assert main(["train", *WORDS, *words]) == 1
    assert says in capsys.readouterr().err


def test_python_callers_are_told_where_jobs_are_submitted():
    with pytest.raises(LabError, match="launch=slurm submits jobs from the command line"):
        train_config(compose_config([*WORDS, "launch=slurm"]))


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(MissingPackageError, match=r"launch=slurm needs submitit: pip install .*\[slurm\]"):
        require_submitit()


def test_parameters_of_the_executor():
    found = parameters(launch("launch.partition=gpu", "launch.at_once=3", "+launch.extra.mail-type=FAIL"))
    assert found["timeout_min"] == 240 and found["gpus_per_node"] == 1 and found["mem_gb"] == 32.0
    assert found["slurm_partition"] == "gpu" and found["slurm_array_parallelism"] == 3
    assert found["slurm_signal_delay_s"] == 120
    assert found["slurm_additional_parameters"] == {"mail-type": "FAIL"}
    assert "slurm_account" not in found and "slurm_setup" not in found
    local = parameters(launch("launch.cluster=local", "launch.partition=gpu"))
    assert not any(key.startswith("slurm") for key in local)
    with pytest.raises(LabError, match=r"launch\.grace"):
        check_settings(launch("launch.grace=14400"))


def test_the_command_of_a_run_has_no_launcher(tmp_path: Path):
    command = train_command(["experiment=x", "launch=slurm", "launch.time=3", "a=1"], tmp_path / "it's")
    assert command[1:6] == ["-m", "rl_lab", "train", "experiment=x", "a=1"]
    assert command[6:] == [f"run_dir='{tmp_path}/it\\'s'", "logging.progress=plain"]


def test_whether_a_child_has_ended_leaves_its_status(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import sys; sys.stdin.read(); sys.exit(3)"], stdin=subprocess.PIPE
    )
    assert not has_ended(process)
    process.stdin.close()
    limit = time.monotonic() + 20
    while not has_ended(process) and time.monotonic() < limit:
        time.sleep(0.02)
    assert has_ended(process) and process.returncode is None and process.wait() == 3 and has_ended(process)


def test_a_job_reports_a_failed_run():
    with pytest.raises(LabError, match="ended with status 4"):
        RunJob([sys.executable, "-S", "-c", "import sys; sys.exit(4)"])()
    assert RunJob([sys.executable, "-S", "-c", "pass"])() == 0


def test_a_stopped_run_tells_its_job(tmp_path: Path, monkeypatch):
    """Without a job an interrupted `rl-lab train` exits with 0, as before."""
    from rl_lab.utils.stopping import STOPPED, STOPPED_VARIABLE
    from tests.same_run import stopped_at

    for status, number in (("", 0), (str(STOPPED), STOPPED)):
        if status:
            monkeypatch.setenv(STOPPED_VARIABLE, status)
        with stopped_at(monkeypatch, 40):
            assert main(["train", *WORDS, f"run_dir={tmp_path / str(number)}"]) == number
    assert main(["train", *WORDS, f"run_dir={tmp_path / '75'}"]) == 0  # finished


@pytest.mark.extras
def test_what_is_given_to_sbatch(tmp_path: Path, monkeypatch):
    pytest.importorskip("submitit")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("sbatch", f'cp "$1" {tmp_path}/script.sh; echo Submitted batch job 12'),
        ("srun", "exit 0"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    words = ["+experiment=random_cartpole", "debug=tiny", "experiment.seed=0,1,2", "launch=slurm"]
    words += ["launch.partition=gpu", "launch.at_once=2", "launch.time=60", "launch.setup=[module load cuda]"]
    words += ["+launch.extra.mail-type=FAIL", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = in_process("train", "-m", *words)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "script.sh").read_text()
    for line in (
        "partition=gpu",
        "array=0-2%2",
        "signal=USR2@120",
        "time=60",
        "mail-type=FAIL",
        "gpus-per-node=1",
    ):
        assert f"#SBATCH --{line}\n" in script, script
    assert "\nmodule load cuda\n" in script
    assert "2: job 12_2" in done.stdout


@pytest.mark.extras
@pytest.mark.timeout(600)
def test_a_sweep_of_jobs_waits_and_names_the_failed_ones(tmp_path: Path):
    pytest.importorskip("submitit")
    words = ["+experiment=random_cartpole", "debug=tiny", "training.total_timesteps=30"]
    words += ["training.evaluate.every_env_steps=null", f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    words += ["launch=slurm", "launch.cluster=local", "launch.gpus=0", "launch.wait=true"]
    done = in_process("train", "-m", *words, "environment.num_envs=0,2")
    assert done.returncode == 1
    assert "1 of 2 runs failed: run 0: environment.num_envs=0" in done.stderr
    assert "0: job " in done.stdout and "1: finished" in done.stdout
    assert (tmp_path / "sweep" / "1" / "metrics.jsonl").is_file()
    assert list((tmp_path / "sweep" / "slurm").glob("*.out"))


@pytest.mark.extras
@pytest.mark.timeout(1500)
def test_a_run_preempted_ten_times_is_the_uninterrupted_run(tmp_path: Path):
    pytest.importorskip("submitit")
    words = [*WORDS, "training.total_timesteps=1200"]
    assert main(["train", *words, f"run_dir={tmp_path / 'whole'}"]) == 0
    run = tmp_path / "preempted"
    own = [*words, f"output_root={tmp_path}", f"run_dir={run}", "launch=slurm", "launch.cluster=local"]
    own += ["launch.gpus=0", "launch.grace=60", "launch.time=60"]
    steps: list[int] = []
    # submitit's local executor starts a job six times at most; then the same command continues the run.
    while len(steps) < 10:
        submitted = submit(own)
        while len(steps) < 10 and submitted.is_running():
            if wait_for_training(run, submitted, steps):
                steps.append(last_step(run))
                preempt(submitted, announced=len(steps) % 2 == 0)
        assert len(steps) >= 6
    limit = time.monotonic() + 600
    while submitted.is_running() and submitted.status() != psutil.STATUS_ZOMBIE and time.monotonic() < limit:
        time.sleep(0.2)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(steps) == 10 and steps == sorted(steps) and len(set(steps)) == 10 and len(lines) > 10
    assert_same_run(tmp_path / "whole", run)


def in_process(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "rl_lab", *words], capture_output=True, text=True, timeout=500
    )


def submit(words: list[str]) -> psutil.Process:
    """Submit from a process of its own, as a user does; return submitit's controller."""
    before = {process.pid for process in psutil.process_iter()}
    subprocess.run([sys.executable, "-m", "rl_lab", "train", *words], check=True, timeout=300)
    found = {
        process.pid: process
        for process in psutil.process_iter(["cmdline", "ppid"])
        if process.pid not in before and "submitit.local._local" in (process.info["cmdline"] or [])
    }
    # The process that it starts has its command line, too, until that has replaced it.
    (controller,) = (process for process in found.values() if process.info["ppid"] not in found)
    return controller


def run_process(controller: psutil.Process) -> psutil.Process | None:
    """Return the process that trains: the grandchild of the controller."""
    try:
        tasks = controller.children()
        found = [child for task in tasks for child in task.children() if "rl_lab" in child.cmdline()]
    except psutil.Error:
        return None
    return found[0] if found else None


def last_step(run: Path) -> int:
    file = run / "metrics.jsonl"
    rows = read_jsonl(file) if file.is_file() else []
    return int(rows[-1]["step"]) if rows else 0


def wait_for_training(run: Path, controller: psutil.Process, steps: list[int]) -> bool:
    """Wait until the run has logged a new step; return False if the controller has ended."""
    limit = time.monotonic() + 300
    before = steps[-1] if steps else 0
    while time.monotonic() < limit:
        if not controller.is_running() or controller.status() == psutil.STATUS_ZOMBIE:
            return False
        if run_process(controller) is not None and last_step(run) > before + 20:
            return True
        time.sleep(0.02)
    raise AssertionError("the run did not log a new step")


def preempt(controller: psutil.Process, *, announced: bool) -> None:
    """announced: SIGUSR2 to the job, as before the end of its time; else SIGTERM to the run, as SLURM preempts."""
    process = run_process(controller)
    assert process is not None
    if announced:
        os.kill(process.ppid(), signal.SIGUSR2)
    else:
        process.send_signal(signal.SIGTERM)
    process.wait(120)
