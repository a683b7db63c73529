"""Runs of several ranks: alone as without torchrun, exact resume with as many or other ranks, stopping together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import rl_lab
from rl_lab import training
from rl_lab.errors import ConfigError
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.run_folder import RunFolder
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.launch.rank_case import on_ranks
from tests.same_run import assert_same, assert_same_run, metric_lines, replay_rows

QUIET = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false", "experiment.device=cpu"]
WORDS = ["experiment=dreamer_cartpole", "environment.normalize_observations=true", *QUIET]


def train(folder: str, words: list[str]) -> None:
    rl_lab.train(None, [*words, f"run_dir={folder}"])


def train_stopped(folder: str, words: list[str], actions: int, stopping: int) -> None:
    """Rank `stopping` is asked to stop after so many actions."""
    do, done = Orchestrator.run_action, 0

    def do_and_stop(self: Orchestrator, action: str, phase: Any) -> None:
        nonlocal done
        do(self, action, phase)
        done += 1
        if done >= actions and os.environ["RANK"] == str(stopping):
            os.kill(os.getpid(), signal.SIGTERM)

    Orchestrator.run_action = do_and_stop  # type: ignore[method-assign]  # in a process of its own
    train(folder, words)


def resumed(folder: str, *words: str) -> None:
    resume(folder, list(words))


def state_of(run: Path) -> dict[str, Any]:
    return CheckpointManager(run / "checkpoints").load().state


def rows_of(run: Path, name: str) -> torch.Tensor:
    """The vectors that a rank has stored, (environments, steps, 4)."""
    loaded = CheckpointManager(run / "checkpoints").load()
    assert loaded.manifest is not None
    folder = run / "checkpoints" / "replay" / name
    files = [
        torch.load(folder / file, weights_only=True) for file in loaded.manifest["buffers"][name]["files"]
    ]
    parts = sorted(
        (file["start"], file["columns"]["obs/vector"]) for file in files if "obs/vector" in file["columns"]
    )
    return torch.cat([columns for _, columns in parts], 1)


def test_one_rank_under_torchrun_is_the_plain_run(tmp_path: Path):
    rl_lab.train(None, [*WORDS, f"run_dir={tmp_path / 'plain'}"])
    assert on_ranks(1, train, str(tmp_path / "one"), WORDS) == [0]
    assert_same_run(tmp_path / "plain", tmp_path / "one")
    assert metric_lines(tmp_path / "plain") == metric_lines(tmp_path / "one")


def test_two_ranks_stop_together_and_resume_exactly_or_with_one(tmp_path: Path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    assert on_ranks(2, train, str(whole), WORDS) == [0, 0]
    assert on_ranks(2, train_stopped, str(half), WORDS, 16, 1) == [0, 0]
    stopped = state_of(half)
    assert 30 <= stopped["global_step"] < 70 and len(stopped["ranks"]) == 1

    # Counters are of both; a row that begins an episode is no step.
    state = state_of(whole)
    flags = [replay_rows(whole, name)["/columns/is_first"] for name in ("replay", "rank1.replay")]
    assert state["global_step"] == sum(int((flag == 0).sum()) for flag in flags)
    line = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["step"] == state["global_step"]
    normalizers = [each["collector"]["environment"]["normalizer"] for each in (state, *state["ranks"])]
    assert_same(*(each["base"] for each in normalizers))

    # Each rank has environments, replay and generators of its own.
    first, second = replay_rows(half), replay_rows(half, "rank1.replay")
    assert first["/columns/obs/vector"].shape == second["/columns/obs/vector"].shape
    assert not torch.equal(first["/columns/obs/vector"], second["/columns/obs/vector"])
    cpu = stopped["generators"]["cpu"]
    assert all(
        not torch.equal(cpu[name], other) for name, other in stopped["ranks"][0]["generators"]["cpu"].items()
    )

    copies = {name: tmp_path / name for name in ("stopped", "one", "three")}
    for copy in copies.values():
        shutil.copytree(half, copy, symlinks=True)
    assert on_ranks(2, resumed, str(half)) == [0, 0]
    assert_same_run(whole, half, ("replay", "rank1.replay"))
    assert metric_lines(half)[-1] == metric_lines(whole)[-1]

    # With one, the other's replay is left out; what is trained goes on.
    said: list[str] = []
    assert resume(copies["one"], say=said.append).counters["env_steps"] >= 100
    assert "resharded from 2 to 1 ranks: the replay and environments of rank 1 are left out" in said
    assert "ranks" not in state_of(copies["one"])

    # A third begins with a copy of the first one's replay.
    assert on_ranks(3, resumed, str(copies["three"]), "training.global_batch=scaled") == [0, 0, 0]
    state = state_of(copies["three"])
    assert len(state["ranks"]) == 2 and state["global_step"] >= 100
    saved, copied = rows_of(copies["stopped"], "replay"), rows_of(copies["three"], "rank2.replay")
    assert torch.equal(copied[:, : saved.shape[1]], saved) and copied.shape[1] > saved.shape[1]


def test_what_ranks_cannot_share_is_refused(tmp_path: Path):
    assert on_ranks(2, refused, str(tmp_path / "run")) == [0, 0]
    with pytest.raises(ConfigError, match="global_batch is 'sum'"):
        train(str(tmp_path / "run"), [*WORDS, "training.global_batch=sum"])


def refused(folder: str) -> None:
    """Rank 0 deletes the folder when it cannot build the run; rank 1 builds only after that."""
    make_logger = training._make_logger

    def wait(run: RunFolder, *arguments: Any) -> Any:
        end = time.monotonic() + 30
        while os.environ["RANK"] == "1" and run.path.exists():
            assert time.monotonic() < end, f"rank 0 has not deleted {run.path}"
            time.sleep(0.01)
        return make_logger(run, *arguments)

    training._make_logger = wait  # in a process of its own
    words = {
        "experiment.device=cuda:1": "torchrun gives each rank its own GPU: set it to auto",
        "algorithm.batch_size=3": "algorithm.batch_size is 3, which 2 ranks cannot share equally",
    }
    for word, message in words.items():
        with pytest.raises(ConfigError, match=message):
            train(folder, [*WORDS, word])


OTHERS = {  # experiment, actions after which rank 1 is asked to stop, buffer of rows
    "tdmpc2_pendulum": (30, "replay"),
    "delta_iris_catch": (20, ""),
    "og_wm_catch": (14, "replay"),
    "diffusion_policy_lunarlander": (18, "demonstrations"),
    "random_cartpole": (10, "replay"),
}


@pytest.mark.learning
@pytest.mark.parametrize("name", OTHERS)
def test_other_workflows_resume_exactly_on_two_ranks(name: str, tmp_path: Path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    actions, buffer = OTHERS[name]
    words = [f"experiment={name}", *QUIET]
    assert on_ranks(2, train, str(whole), words) == [0, 0]
    assert on_ranks(2, train_stopped, str(half), words, actions, 1) == [0, 0]
    assert state_of(half)["phase_state"]["totals"] != state_of(whole)["phase_state"]["totals"]
    assert on_ranks(2, resumed, str(half)) == [0, 0]
    assert_same_run(whole, half, (buffer, f"rank1.{buffer}") if buffer else ())


def test_a_killed_rank_ends_the_job(tmp_path: Path):
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "rl_lab",
    ]
    words = [*WORDS, "training.total_timesteps=1000000", f"run_dir={run}"]
    process = subprocess.Popen(
        [*command, "train", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while not list(run.glob("checkpoints/step_*.json")) and time.monotonic() < deadline:
            time.sleep(0.1)
        victim = rank_process(process.pid, "1")
        os.kill(victim, signal.SIGKILL)
        begun = time.monotonic()
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - begun < 30.0
    assert process.returncode != 0
    assert f"rank 1 (process {victim} on " in output and "ended: all ranks stop" in output, output
    newest = CheckpointManager(run / "checkpoints").steps()[-1]
    assert f"the last whole checkpoint is that of step {newest}, continue with: torchrun" in output, output
    assert state_of(run)["global_step"] == newest


def rank_process(launcher: int, rank: str) -> int:
    """The process id of a rank, among the children of torchrun."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(parent) == launcher and f"RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no rank {rank} below process {launcher}")
