"""`rl-lab suite` with real runs: killed with SIGKILL, continued, a failing run, weights, --list."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rl_lab.cli import main
from rl_lab.errors import LabError
from rl_lab.tools.suite.results import SuiteFolder
from rl_lab.tools.suite.weights import export_weights, join_weights
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.files import read_jsonl

SUITE = """
text: two tasks
methods:
  small:
    title: Dreamer (tiny)
    experiment: dreamer_cartpole
    overrides: [debug=tiny, logging.tensorboard=false, environment.action_repeat=2]
    tasks: [CartPole-v1, NoSuchEnv-v9]
    seeds: [1]
    frames: 12000
    evaluate: {every_frames: 6000, episodes: 2}
    checkpoint: {every_frames: 200}
    final: {episodes: 3}
    score: {from: final}
"""
NAME = "small.CartPole-v1.seed1"


def test_killed_suite_continues_to_the_end(tmp_path: Path, capsys):
    """One real run is killed together with its suite, goes on from its checkpoint, and leaves result and weights."""
    file, folder = tmp_path / "two.yaml", tmp_path / "out"
    file.write_text(SUITE)
    command = [
        sys.executable,
        "-m",
        "rl_lab",
        "suite",
        str(file),
        "--folder",
        str(folder),
        "--tasks",
        "CartPole-v1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    checkpoints = folder / "runs" / NAME / "checkpoints"
    limit = time.monotonic() + 120
    while time.monotonic() < limit and len(list(checkpoints.glob("step_*.json"))) < 1:
        time.sleep(0.05)
    run = next(pid for pid in children(process.pid))
    os.kill(process.pid, signal.SIGKILL)
    os.kill(run, signal.SIGKILL)
    process.wait()
    file.write_text(SUITE.replace("frames: 12000", "frames: 600").replace("6000", "300"))
    assert main(["suite", str(file), "--folder", str(folder), "--weights", "--every", "1"]) == 1  # one failed
    shown = capsys.readouterr().out
    assert f"continued {NAME}" in shown and f"finished {NAME}: score" in shown
    assert "failed: small.NoSuchEnv-v9.seed1: " in shown and "NoSuchEnv" in shown
    log = (folder / "logs" / f"{NAME}.txt").read_text()
    assert "resumed at step" in log
    result = SuiteFolder(folder).read(NAME)
    assert result is not None and result["status"] == "done" and len(result["segments"]) == 2
    # 600 frames are 300 decisions at an action repeat of 2.
    assert (
        result["frames"] == result["score_frames"] >= 600
        and "training.total_timesteps=300" in result["command"]
    )
    assert len(result["final_evaluation"]["returns"]) == 3
    assert result["score"] == pytest.approx(sum(result["final_evaluation"]["returns"]) / 3)
    rows = read_jsonl(folder / "runs" / NAME / "metrics.jsonl")
    assert [row["step"] for row in rows] == sorted(row["step"] for row in rows)  # nothing is logged twice
    check_weights(folder, tmp_path)
    assert main(["suite", str(file), "--folder", str(folder), "--list"]) == 0
    listed = capsys.readouterr().out
    assert "1 done, 1 failed of 2" in listed


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def check_weights(folder: Path, tmp_path: Path) -> None:
    """The exported weights are those of the last checkpoint in bfloat16, and can be loaded."""
    state = CheckpointManager.load_file(folder / "runs" / NAME, weights=True).state
    joined = join_weights(folder / "weights" / NAME, tmp_path / "joined.pt")
    loaded = CheckpointManager.load_file(joined, weights=True).state
    for group in ("components", "controllers"):
        for part, tensors in state[group].items():
            for key, value in tensors.items():
                expected = value.to(torch.bfloat16).float() if value.is_floating_point() else value
                assert torch.equal(loaded[group][part][key], expected), f"{part}.{key}"
    # Small parts: a tensor larger than the limit is cut into pieces.
    big = {"version": state["version"], "global_step": 7, "components": {"a": {"w": torch.randn(700, 900)}}}
    torch.save({**big, "controllers": {"b": {"n": torch.arange(5)}}}, tmp_path / "big.pt")
    files = export_weights(tmp_path / "big.pt", tmp_path / "parts", limit=0.3)
    assert len(files) > 3 and max(file.stat().st_size for file in files) <= 0.3 * 2**20
    again = torch.load(join_weights(tmp_path / "parts", tmp_path / "again.pt"), weights_only=True)
    assert torch.equal(again["components"]["a"]["w"], big["components"]["a"]["w"].to(torch.bfloat16).float())
    assert torch.equal(again["controllers"]["b"]["n"], torch.arange(5))
    files[1].unlink()
    with pytest.raises(LabError, match="all parts of one export are required"):
        join_weights(tmp_path / "parts", tmp_path / "none.pt")


def test_suites_are_listed_by_name(capsys):
    assert main(["suite"]) == 0
    shown = capsys.readouterr().out
    assert "31 runs" in shown.partition("dmc_proprio")[2].partition("\n")[0] and "atari100k" in shown
