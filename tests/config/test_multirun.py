"""Sweeps: folders, summary and failures of several runs from one command."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from rl_lab.cli import main
from rl_lab.config.multirun import Plan, multirun, read_sweep
from rl_lab.errors import LabError
from rl_lab.tools.report.runs import find_runs, load_runs

WORDS = ["+experiment=random_cartpole", "debug=tiny", "training.total_timesteps=30", "logging.progress=off"]
WORDS += ["logging.tensorboard=false", "training.evaluate.every_env_steps=null"]


def test_seeds_share_a_folder_and_one_report(tmp_path: Path, capsys):
    closed, handler = [], logging.NullHandler()
    handler.close = lambda: closed.append(True)  # absl's would close the stream that it was made with
    sweep = multirun([*WORDS, "experiment.seed=0,1", f"output_root={tmp_path / 'here'}"])
    assert not closed and not (sweep.path / "0" / "_job.log").exists()
    assert [run.name for run in sweep.runs] == ["0", "1"] and not sweep.failures
    assert sweep.path.parents[1] == tmp_path / "here" / "multirun"
    printed = capsys.readouterr().out
    assert "0  experiment.seed=0" in printed and f"rl-lab report {sweep.path}" in printed
    runs = load_runs(find_runs([sweep.path]))
    assert {run.group for run in runs} == {"random_cartpole"} and [run.seed for run in runs] == [0, 1]
    assert find_runs([], root=str(tmp_path / "here"))[0].path.parent == sweep.path


def test_failed_run_does_not_stop_the_others(tmp_path: Path, capsys):
    folder = tmp_path / "sweep"
    words = [*WORDS, f"hydra.sweep.dir={folder}"]
    with pytest.raises(LabError, match=r"1 of 2 runs failed: run 0: environment.num_envs=0"):
        multirun([*words, "environment.num_envs=0,2"])
    assert [run.name for run in read_sweep(folder).runs] == ["1"] and list(read_sweep(folder).failures) == [
        "0"
    ]
    before = (folder / "1" / "metrics.jsonl").read_text()
    sweep = multirun([*words, "environment.num_envs=1,2"])  # what is done is not done again
    assert [run.name for run in sweep.runs] == ["0", "1"] and not sweep.failures
    assert (folder / "1" / "metrics.jsonl").read_text().startswith(before)


def test_shared_error_is_reported_once(tmp_path: Path, capsys):
    words = ["train", "-m", *WORDS, "experiment.sed=0,1", f"output_root={tmp_path / 'here'}"]
    assert main(words) == 1
    assert capsys.readouterr().err.count("Did you mean 'experiment.seed'") == 1
    assert not (tmp_path / "here").exists()


def test_packed_runs_are_processes_of_their_own(tmp_path: Path, capfd, monkeypatch):
    """launch=pack: as the sweep without it, with one log file per run; a run that fails does not stop the others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "two words"
    words = [*WORDS, "launch=pack", "launch.per_gpu=2", f"hydra.sweep.dir='{folder}'"]
    with pytest.raises(LabError, match=r"1 of 2 runs failed: run 0: environment.num_envs=0"):
        multirun([*words, "environment.num_envs=0,2"])
    shown = capfd.readouterr()
    assert (
        "2 runs, 2 at a time on no GPU" in shown.out and "error: run 0: environment.num_envs=0" in shown.err
    )
    assert "run 1: finished after" in shown.out and (folder / "1.log").read_text().startswith("run folder")
    assert [run.name for run in read_sweep(folder).runs] == ["1"]
    config = yaml.safe_load((folder / "1" / "config.yaml").read_text())
    assert config["launch"] == {"name": "single"} and config["environment"]["num_envs"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch=pack"], "launch=pack is for several runs: add --multirun"),
        (
            ["launch=pack", "hydra/sweeper=basic", "-m"],
            "hydra/sweeper=basic cannot be combined with launch=pack",
        ),
        (["launch.per_gpu=0", "launch=pack", "-m"], "launch.per_gpu must be an integer of at least 1"),
        (["launch=packed"], "launch=packed does not exist. Did you mean 'pack'"),
    ],
)
def test_wrong_launches_are_refused(words: list[str], says: str, capsys, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *WORDS, *words]) == 1
    assert says in capsys.readouterr().err


@pytest.mark.learning  # processes that each load torch
def test_parallel_launcher(tmp_path: Path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    command = [sys.executable, "-m", "rl_lab", "train", "-m", *WORDS, "experiment.seed=0,1"]
    command += ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "#0 run folder:" in result.stdout and "#1 run folder:" in result.stdout
    configs = [yaml.safe_load((tmp_path / "sweep" / name / "config.yaml").read_text()) for name in "01"]
    assert [config["experiment"]["seed"] for config in configs] == [0, 1]


@pytest.mark.learning  # processes that each load torch
def test_ctrl_c_saves_and_stops_the_sweep(tmp_path: Path):
    words = [word for word in WORDS if "total_timesteps" not in word] + ["training.total_timesteps=10000000"]
    command = [
        sys.executable,
        "-m",
        "rl_lab",
        "train",
        "-m",
        *words,
        "experiment.seed=0,1",
        "hydra.sweep.dir=sweep",
    ]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    log = tmp_path / "sweep" / "0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "hydra.sweep.dir=sweep continues" in errors
    assert list((tmp_path / "sweep" / "0" / "checkpoints").glob("step_*.json"))
    assert not (tmp_path / "sweep" / "1").exists()


def test_headlines_number_the_runs_and_name_what_differs(monkeypatch):
    words = [["a=1", "experiment.seed=0"], ["a=1", "experiment.seed=1"], ["a=1", "experiment.seed=2"]]
    plan = Plan(words)
    assert plan.headline(0, words[0]) == "run 0, 1 of 3: experiment.seed=0"
    plan.begun = 0.0  # not a time of this machine, to which 125 cannot always be added exactly
    monkeypatch.setattr("time.monotonic", lambda: 125.0)
    assert plan.headline(1, words[1]) == "run 1, 2 of 3: experiment.seed=1 · about 4:10 left"
    assert plan.left(3) == "" and Plan().headline(4, ["b=2"]) == "run 4: b=2"
