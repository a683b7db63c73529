"""Runs of IRIS: exact resume, weights of epochs, training on stored episodes, benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab.errors import CheckpointError, LabError
from rl_lab.tools.bench import run_benchmark
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import assert_same, stopped_at

QUIET = ["logging.progress=off", "logging.tensorboard=false", "debug=tiny", "environment.workers=0"]
SILENT = ["training.evaluate.every_env_steps=null", "training.report.every_env_steps=null"]


def newest(folder: Path) -> dict[str, Any]:
    return CheckpointManager(folder / "checkpoints").load().state


@pytest.mark.parametrize("name", ["iris_catch", "delta_iris_catch"])
def test_resumed_run_is_exact(name: str, tmp_path: Path, monkeypatch):
    """Includes codebooks, slow copies and sampling counts of episodes."""
    words = [*QUIET, *SILENT, "training.total_timesteps=120"]
    rl_lab.train(name, [*words, f"run_dir={tmp_path / 'full'}"])
    with stopped_at(monkeypatch, 90):  # in the middle of an epoch
        half = rl_lab.train(name, [*words, f"run_dir={tmp_path / 'half'}"])
    assert half.interrupted
    resume(tmp_path / "half")
    states = [newest(tmp_path / run) for run in ("full", "half")]
    assert_same(*states)
    assert "episodes:world_model" in str(states[0]["storage"])  # sampling counts of the episodes


def test_update_controller_trains_the_actor_critic(tmp_path: Path):
    """It is the hook update_actor_critic, so a run with either name has the same weights."""
    phases = "[{name: joint, workflow_hooks: [{collect: {env_steps: 20}}, update_world_model, HOOK]}]"
    states = []
    for hook in ("update_controller", "update_actor_critic"):
        words = [
            *QUIET,
            *SILENT,
            f"run_dir={tmp_path / hook}",
            f"training.phases={phases.replace('HOOK', hook)}",
        ]
        rl_lab.train("iris_catch", [*words, "training.total_timesteps=40"], say=lambda line: None)
        states.append(newest(tmp_path / hook))
    assert states[0]["phase_state"]["hook_calls"]["update_actor_critic"] > 0
    assert_same(*states)


# ---------------------------------------------------------------- results of a run


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six epochs with a report; the weights of every second epoch are kept."""
    path = tmp_path_factory.mktemp("stored") / "run"
    words = ["training.evaluate.every_env_steps=null", "training.checkpoint.epoch_weights=2"]
    rl_lab.train("iris_catch", [*QUIET, *words, "training.total_timesteps=120", f"run_dir={path}"])
    return path


def test_epoch_weights_are_kept(stored: Path):
    files = sorted(path.name for path in (stored / "checkpoints").glob("epoch_?.pt"))
    assert files == ["epoch_2.pt", "epoch_4.pt", "epoch_6.pt"]
    kept = [torch.load(stored / "checkpoints" / name, weights_only=True) for name in files]
    assert [state["global_step"] for state in kept] == [40, 80, 120]
    assert all("optimizers" not in state and set(state["components"]) for state in kept)
    last = newest(stored)
    assert_same(kept[-1]["components"], last["components"])  # the last epoch is included
    tokenizers = [state["components"]["tokenizer"] for state in kept]
    assert any(not torch.equal(tokenizers[0][key], tokenizers[-1][key]) for key in tokenizers[0])
    assert rl_lab.load_agent(stored, checkpoint="epoch_4", device="cpu").step == 80


def test_agent_loads_selected_parts(stored: Path, monkeypatch):
    agent = rl_lab.load_agent(stored, checkpoint="epoch_2", device="cpu")
    parts = {name: getattr(agent.workflow, name) for name in ("tokenizer", "world_model", "actor_critic")}
    before = {name: {k: v.clone() for k, v in part.state_dict().items()} for name, part in parts.items()}
    last = newest(stored)
    saved = {**last["components"], **last["controllers"]}
    path = stored / "checkpoints" / "last.pt"
    taken = agent.load(path, "cpu", load_tokenizer=False, load_world_model=True, load_actor_critic=True)
    assert taken == ["components.world_model", "controllers.actor_critic"]
    assert_same(dict(parts["tokenizer"].state_dict()), before["tokenizer"])
    for name in ("world_model", "actor_critic"):
        assert_same(dict(parts[name].state_dict()), dict(saved[name]))
    assert agent.step == 120
    assert agent.load(path) == ["components.tokenizer", *taken]
    assert_same(dict(parts["tokenizer"].state_dict()), dict(saved["tokenizer"]))
    with pytest.raises(LabError, match="load_tokenizer"):
        agent.load(path, load_tokeniser=False)
    monkeypatch.setattr(
        "rl_lab.agent.resolve_device", torch.device
    )  # a device that this machine need not have
    with pytest.raises(LabError, match=r"use load_agent\(run, device="):
        agent.load(path, "cuda:1")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        agent.load(stored / "checkpoints" / "epoch_9.pt")


def test_reports_are_in_media(stored: Path):
    assert list((stored / "media" / "reconstructions").glob("*reconstruction*.png"))
    videos = list((stored / "media" / "episodes" / "imagination").iterdir())
    assert videos and all(video.stat().st_size > 100 for video in videos)


def test_training_with_stored_episodes_and_frozen_tokenizer(stored: Path, tmp_path: Path):
    """Without environment steps: the loaded tokenizer stays fixed, the other parts train on stored data."""
    words = ["+buffer@buffers.offline=offline_episodes", f"buffers.offline.path={stored}"]
    words += [f"load.path={stored}", "load.components=[tokenizer]"]
    phase = "name: learn, type: offline, buffer: offline, freeze: [tokenizer], duration_cycles: 2"
    words += [f"training.phases=[{{{phase}, workflow_hooks: [update_world_model, update_actor_critic]}}]"]
    run = rl_lab.train("iris_catch", [*QUIET, *SILENT, *words, f"run_dir={tmp_path / 'learned'}"])
    assert run.counters["updates"] == 4 and run.counters["env_steps"] == 0
    before, after = newest(stored)["components"], newest(tmp_path / "learned")["components"]
    assert_same(before["tokenizer"], after["tokenizer"])
    assert any(
        not torch.equal(value, after["world_model"][key]) for key, value in before["world_model"].items()
    )


@pytest.mark.parametrize("name", [pytest.param("iris_catch", marks=pytest.mark.learning), "delta_iris_catch"])
def test_all_parts_train_on_stored_episodes(name: str, stored: Path, tmp_path: Path):
    words = [
        "phases=iris_stored",
        "+buffer@buffers.offline=offline_episodes",
        f"buffers.offline.path={stored}",
    ]
    words += ["algorithm.epochs.actor_critic=2", "training.checkpoint.epoch_weights=1"]
    run = rl_lab.train(name, [*QUIET, *SILENT, *words, f"run_dir={tmp_path / 'run'}"])
    assert run.counters["env_steps"] == 0 and run.counters["updates"] == 1 + 2 + 2 * 3
    first = torch.load(tmp_path / "run" / "checkpoints" / "epoch_1.pt", weights_only=True)
    last = newest(tmp_path / "run")
    for room, part in (
        ("components", "tokenizer"),
        ("components", "world_model"),
        ("controllers", "actor_critic"),
    ):
        assert any(not torch.equal(value, last[room][part][key]) for key, value in first[room][part].items())


@pytest.mark.learning
def test_benchmark_runs():
    options = ["--case", "delta_atari", "--tiny", "--updates", "1", "--device", "cpu"]
    rows = {row["name"]: row["value"] for row in run_benchmark("iris", options)["rows"]}
    for part in ("tokenizer", "world_model", "actor_critic"):
        assert rows[f"iris/delta_atari/{part}_ms"] > 0
        assert rows[f"iris/delta_atari/{part}_parity"] < 1e-5
