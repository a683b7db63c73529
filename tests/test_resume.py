"""A stopped and resumed run equals an uninterrupted one, bit for bit: after a request, a signal or kill -9."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

import rl_lab
from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import assert_same_run, metric_lines, stopped_at

QUIET = ["logging.progress=off", "logging.tensorboard=false"]
# Every workflow there is, and every kind of environment; two of them with worker processes.
RUNS = {
    "dreamer": ["experiment=dreamer_cartpole", "debug=tiny"],
    "dreamer_workers": ["experiment=dreamer_cartpole", "debug=tiny", "environment.workers=2"],
    "dreamer_dict": [
        "experiment=dreamer_cartpole",
        "debug=tiny",
        "environment=dummy_dict",
        "environment.workers=2",
        "components/encoder@components.encoder=dict",
        "training.total_timesteps=60",
    ],
    "dreamer_continuous": [
        "experiment=dreamer_cartpole",
        "debug=tiny",
        "environment=dummy_continuous",
        "training.total_timesteps=60",
    ],
    "random": ["experiment=random_cartpole", "debug=tiny", "environment.workers=1"],
}


@pytest.mark.parametrize("name", RUNS)
def test_resumed_run_equals_uninterrupted_run(name: str, tmp_path: Path, monkeypatch):
    words = RUNS[name] + QUIET
    rl_lab.train(None, [*words, f"run_dir={tmp_path / 'whole'}"])
    with stopped_at(monkeypatch):
        half = rl_lab.train(None, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    assert_same_run(tmp_path / "whole", tmp_path / "half")


LOGGED = {  # logged at other steps than saved
    "dreamer": ["experiment=dreamer_cartpole"],
    "iris": ["experiment=iris_catch"],
}


@pytest.mark.parametrize("name", LOGGED)
def test_metrics_of_a_killed_run_are_those_of_an_uninterrupted_one(name: str, tmp_path: Path, monkeypatch):
    """Means of an interval that a kill interrupted include what happened before the checkpoint."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    save = CheckpointManager.save

    def save_and_copy(self: CheckpointManager, step: int, *arguments: Any, **options: Any) -> Path:
        path = save(self, step, *arguments, **options)
        if options.get("tag") is None and not killed.exists() and step >= 60:
            shutil.copytree(whole, killed, symlinks=True)  # what kill -9 would leave
        return path

    words = [
        "debug=tiny",
        *QUIET,
        "training.log.every_env_steps=33",
        "training.checkpoint.every_env_steps=20",
    ]
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointManager, "save", save_and_copy)
        rl_lab.train(None, [*words, *LOGGED[name], f"run_dir={whole}"])
    before = len(metric_lines(killed))
    resume(killed)
    lines = metric_lines(whole)
    assert metric_lines(killed) == lines and before < len(lines)
    begun = [line["workflow/phase"] for line in lines if "workflow/phase" in line]
    assert begun == ([1, 2, 3, 4] if name == "iris" else [])
    resume(killed)  # it is finished: nothing is added
    assert metric_lines(killed) == lines


def test_changes_on_resume_are_kept_for_the_next_resume(tmp_path: Path, monkeypatch):
    run = tmp_path / "run"
    words = [*RUNS["dreamer"], *QUIET, "training.total_timesteps=40"]
    rl_lab.train(None, [*words, f"run_dir={run}"])
    with stopped_at(monkeypatch, 60):  # as after a crash: before the new total is reached
        assert resume(run, ["training.total_timesteps=80", "training.log.every_env_steps=20"]).interrupted
    config = RunFolder(run).load_config()
    assert (config.training.total_timesteps, config.training.log.every_env_steps) == (80, 20)
    assert resume(run).counters["env_steps"] == 80
    # The first command again states the old values: they become the run's again.
    said: list[str] = []
    rl_lab.train(None, [*words, f"run_dir={run}"], say=said.append)
    assert "resume: training.total_timesteps: 80 -> 40" in said
    assert RunFolder(run).load_config().training.total_timesteps == 40


def test_refused_changes_on_resume_are_not_kept(tmp_path: Path):
    run = tmp_path / "run"
    rl_lab.train(None, [*RUNS["random"], *QUIET, "training.total_timesteps=20", f"run_dir={run}"])
    before = (run / "config.yaml").read_text()
    refused = {
        "buffers.replay.capacity=3": "cannot become 3",
        "training.total_timesteps=many": "total_timesteps",
        "environment.restarts={limit: -1}": "restarts",  # found only when the run is built
        "experiment.device=cuda:99": "cuda",
    }
    for word, text in refused.items():
        with pytest.raises(LabError, match=text):
            resume(run, ["training.total_timesteps=40", word])
        assert (run / "config.yaml").read_text() == before
    assert sorted(path.name for path in run.glob("config.yaml*")) == ["config.yaml"]


def start(folder: Path, *words: str, **options: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "rl_lab", "train", "+experiment=dreamer_cartpole", "debug=tiny", *QUIET]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen([*command, f"run_dir={folder}", *words], **options)


def test_sigterm_saves_and_prints_resume_command(tmp_path: Path):
    process = start(tmp_path / "run", "training.total_timesteps=100000")
    deadline = time.monotonic() + 60
    while not list((tmp_path / "run").glob("checkpoints/step_*.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert f"resume {tmp_path / 'run'}" in output


def is_saved(run: Path) -> bool:
    """Wait for the first checkpoint."""
    deadline = time.monotonic() + 60
    while last_saved(run) < 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    return last_saved(run) >= 0


def take_terminal() -> None:
    """Start a new session in the child, with stdin as its terminal."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_sighup_and_sigusr1_save_and_resume(tmp_path: Path):
    """SIGHUP as sent by a closed ssh connection, SIGUSR1 as sent by SLURM: to all processes, also environments."""
    hung, warned = tmp_path / "hung", tmp_path / "warned"
    words = (
        "training.total_timesteps=100000",
        "training.checkpoint.every_env_steps=20",
        "environment.workers=1",
    )
    ours, theirs = os.openpty()
    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": take_terminal}
    processes = [start(hung, *words, **terminal), start(warned, *words, start_new_session=True)]
    os.close(theirs)
    assert is_saved(hung)
    os.close(ours)
    assert is_saved(warned)
    os.killpg(processes[1].pid, signal.SIGUSR1)
    output, _ = processes[1].communicate(timeout=60)
    assert processes[1].returncode == 0, output
    assert "SIGUSR1: finishing" in output and f"resume {warned}" in output
    assert processes[0].wait(60) == 0, "what it prints goes nowhere, which must not be an error"

    for run in (hung, warned):
        lines: list[str] = []
        saved = last_saved(run)
        resume(run, [f"training.total_timesteps={saved + 8}", "environment.workers=0"], say=lines.append)
        assert any(f"resumed at step {saved}" in line for line in lines)
        assert last_saved(run) >= saved + 8


KILLS = int(os.environ.get("RL_LAB_KILLS", "3"))


def last_saved(run: Path) -> int:
    return max((int(file.stem[5:]) for file in run.glob("checkpoints/step_*.json")), default=-1)


def test_killed_run_resumes_exactly(tmp_path: Path):
    """kill -9 and the same command again, until it has been killed often enough; then it may finish.

    The first kill comes while the process starts or begins to train, the others at random moments after it has saved anew.
    """
    total = 300 + 30 * KILLS
    words = (f"training.total_timesteps={total}", "training.checkpoint.every_env_steps=20")
    rl_lab.train(
        "dreamer_cartpole",
        ["debug=tiny", *QUIET, *words, f"run_dir={tmp_path / 'whole'}"],
        say=lambda _: None,
    )
    moments = random.Random(KILLS)
    killed = tmp_path / "killed"
    for number in range(KILLS):
        process = start(killed, *words)
        saved, deadline = last_saved(killed), time.monotonic() + 120
        while number and last_saved(killed) == saved and time.monotonic() < deadline:
            time.sleep(0.01)
        # It must not have finished, or the kill proves nothing.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=moments.uniform(0.0, 0.2) if number else moments.uniform(1.0, 6.0))
        process.kill()
        process.communicate()
        assert last_saved(killed) < total
    last = start(killed, *words)
    output, _ = last.communicate(timeout=250)
    assert last.returncode == 0, output
    assert_same_run(tmp_path / "whole", killed)
    assert metric_lines(killed) == metric_lines(tmp_path / "whole")
