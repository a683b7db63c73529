"""Complete runs of World Models: all stages, exact resume, evolution in the dream, and rounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.errors import ConfigError
from rl_lab.orchestration import evolution
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.tools.evaluate import evaluate
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.stopping import STOPPED, STOPPED_VARIABLE
from tests.same_run import assert_same_run

ROOT = Path(__file__).resolve().parents[2]
QUIET = ["logging.progress=off", "logging.tensorboard=false"]
# Cheap images, a controller with h and c as memory, three short generations.
TINY = [
    "experiment=og_wm_cartpole_pixels",
    "debug=tiny",
    "environment.task=dummy/dict",
    "environment.observations=[image]",
    "environment.pixels=false",
    "environment.wrappers={}",
    "environment.time_limit=null",
    "algorithm.stages.collect_steps=60",
    "algorithm.stages.generations=3",
    "training.total_timesteps=null",
    "training.evaluate={every_env_steps: null, episodes: 2}",
    "training.report.every_env_steps=null",
    "training.checkpoint={every_env_steps: null, every_cycles: 1}",
    "training.log={every_env_steps: null, every_cycles: 1, every_updates: null}",
]


def train(folder: Path, *words: str) -> rl_lab.training.RunResult:
    return rl_lab.train(None, [*TINY, *QUIET, f"run_dir={folder}", *words], say=lambda line: None)


def state(folder: Path) -> dict:
    return CheckpointManager(folder / "checkpoints").load().state


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "run"
    train(folder)
    return folder


def test_all_stages_run(full: Path):
    calls = state(full)["phase_state"]["hook_calls"]
    assert (calls["update_vae"], calls["update_mdn"], calls["evolve"]) == (3, 3, 3) and calls["encode"] >= 1
    logged = {key for line in metrics(full) for key in line}
    names = "generation best mean spread evaluations_per_second steps_per_second seconds_left step_size"
    assert {f"controller/{name}" for name in names.split()} <= logged
    assert {"train/vae/loss/reconstruction", "train/mdn/loss/latent"} <= logged
    assert max(line.get("controller/generation", 0) for line in metrics(full)) == 3
    strategy = state(full)["workflow_custom"]["evolution"]["strategy"]
    assert strategy["fitness"].shape == (3, 4)  # CMA-ES is restored from its start and the fitness values


def test_agent_loads_and_evaluates(full: Path):
    result = evaluate(full, episodes=2, video=False)
    assert result["episodes"] == 2 and 0 <= result["return_mean"] <= 10


@pytest.mark.parametrize("stop_after", ["collect", "update_vae", "encode", "update_mdn", "evolve"])
def test_resume_is_exact_at_any_stage(stop_after: str, full: Path, tmp_path: Path, monkeypatch):
    with monkeypatch.context() as patch:
        do = Orchestrator.run_action

        def stop(self, action, phase):
            do(self, action, phase)
            self.interrupted = action == stop_after

        patch.setattr(Orchestrator, "run_action", stop)
        assert train(tmp_path / "half").interrupted
    resume(tmp_path / "half", say=lambda line: None)
    assert_same_run(full, tmp_path / "half")


class Killed(BaseException):
    """The package does not catch it, so nothing is saved."""


@pytest.mark.parametrize("how", ["killed", "signalled"])
def test_interrupted_generation_is_repeated(how: str, full: Path, tmp_path: Path, monkeypatch):
    played = []
    with monkeypatch.context() as patch:
        evaluate = evolution.evaluate_population

        def end_in_the_second(*args, on_rollout, **options):
            def count(item):
                played.append(item)
                on_rollout(item)
                if len(played) == 6:  # each generation has 4
                    if how == "killed":
                        raise Killed
                    os.kill(os.getpid(), signal.SIGTERM)

            return evaluate(*args, on_rollout=count, **options)

        patch.setattr(evolution, "evaluate_population", end_in_the_second)
        if how == "killed":
            with pytest.raises(Killed):
                train(tmp_path / "half")
        else:
            assert train(tmp_path / "half").interrupted
    assert len(played) < 8
    assert state(tmp_path / "half")["phase_state"]["hook_calls"]["evolve"] == 1
    resume(tmp_path / "half", say=lambda line: None)
    assert_same_run(full, tmp_path / "half")


FOUNDING_PHASES = [
    {"name": "data_collection", "duration_steps": 60, "workflow_hooks": [{"collect": {"env_steps": 60}}]},
    {
        "name": "converge_vae",
        "type": "offline",
        "duration_updates": 2,
        "workflow_hooks": ["update_world_model"],
    },
    {
        "name": "converge_mdn",
        "type": "offline",
        "duration_updates": 2,
        "workflow_hooks": ["update_world_model"],
    },
    {"name": "controller", "duration_updates": 1, "workflow_hooks": ["update_controller"]},
    {"name": "in_the_dream", "duration_updates": 1, "workflow_hooks": ["update_controller"]},
]


def test_names_of_the_architecture_document_in_phases(tmp_path: Path):
    """update_world_model trains V or M and update_controller evolves, by the name of the phase."""
    phases = json.dumps(FOUNDING_PHASES).replace('"', "")
    run = train(tmp_path / "run", f"training.phases={phases}")
    calls = state(run.path)["phase_state"]["hook_calls"]
    assert calls["update_vae"] == calls["update_mdn_on_images"] == 2
    assert calls["evolve"] == calls["evolve_in_dream"] == 1
    with pytest.raises(
        ConfigError, match=r"phase 'joint': update_world_model trains V in a phase with vae in"
    ):
        train(tmp_path / "other", f"training.phases={phases.replace('converge_vae', 'joint')}")


def test_dream_evolution_then_score(tmp_path: Path):
    run = train(tmp_path / "run", "phases=og_wm_dream", "algorithm.stages.score_steps=30")
    calls = state(run.path)["phase_state"]["hook_calls"]
    assert calls["evolve_in_dream"] == 3 and "evolve" not in calls
    assert run.counters["env_steps"] >= 90 and run.return_mean is not None
    told = state(run.path)["workflow_custom"]["evolution"]
    assert told["stage"] == "evolve_in_dream/0" and told["strategy"]["fitness"].shape == (3, 4)


def test_rounds_as_phase_group(tmp_path: Path):
    run = train(tmp_path / "run", "phases=og_wm_iterative", "algorithm.stages.generations=1")
    calls = state(run.path)["phase_state"]["hook_calls"]
    assert (calls["update_vae"], calls["evolve"]) == (9, 3)
    assert state(run.path)["workflow_custom"]["evolution"]["stage"] == "evolve/2"


def test_evolve_with_loaded_networks(tmp_path: Path):
    networks = train(tmp_path / "networks", "phases=og_wm_networks")
    weights = networks.path / "checkpoints" / "last.pt"
    run = train(
        tmp_path / "run", "phases=og_wm_evolve", f"load.path={weights}", "buffers.replay.capacity=200"
    )
    ours, theirs = state(run.path)["components"]["vae"], state(networks.path)["components"]["vae"]
    assert all((ours[key] == theirs[key]).all() for key in ours)
    assert state(run.path)["controllers"]["controller"]["weight"].abs().sum() > 0


def test_dream_at_a_temperature_by_script(tmp_path: Path):
    """With V and M of a run of their own; given again, nothing is trained."""
    words = [str(tmp_path), "temperatures=0.5", "episodes=2", *TINY, *QUIET]
    command = ["bash", str(ROOT / "scripts" / "og_wm_dream.sh"), *words]
    options: dict[str, Any] = {
        "capture_output": True,
        "text": True,
        "env": {**os.environ, "PYTHON": sys.executable},
    }
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "scores.json").read_text())
    assert [row["temperature"] for row in result["temperatures"]] == ["0.5"]
    assert all(len(row["dream"]) == 3 and len(row["returns"]) == 2 for row in result["temperatures"])
    networks, dream = (
        state(tmp_path / name)["components"]["vae"] for name in ("networks", "temperature_0.5")
    )
    assert all(torch.equal(networks[key], dream[key]) for key in networks)
    again = subprocess.run(command, **options)
    assert again.returncode == 0 and "| 0.5 |" in again.stdout and "run folder" not in again.stdout
    assert (tmp_path / "scores.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "script", ["og_wm_dream.sh {run}", "og_wm_carracing.sh networks {run}", "clone_dmc.sh {run}"]
)
def test_script_ends_when_its_training_was_stopped(tmp_path: Path, script: str):
    """A run that was stopped and saved is not taken for a finished one: nothing goes on with its weights."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit\necho "$*"\nexit ${STOPPED_VARIABLE}\n')
    python.chmod(0o755)
    name, *words = script.format(run=tmp_path / "runs").split()
    command = ["bash", str(ROOT / "scripts" / name), *words]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHON": str(python)})
    assert done.returncode == STOPPED, done.stdout + done.stderr
    assert done.stdout.count("rl_lab ") == done.stdout.count("rl_lab train") == 1
    assert not [*(tmp_path / "runs").rglob("finished")] and not (tmp_path / "runs" / "weights").exists()
