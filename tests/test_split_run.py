"""scripts/split_run.py: a run that travels between machines in small files is the run that stayed."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.config.compose import compose_config, to_plain
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.files import LOCK_NAME, RunLock
from tests.loading import ROOT, load_script
from tests.same_run import assert_same_run, metric_lines
from tests.workflows import test_og_wm_run as og_wm

split_run = load_script("split_run.py")
QUIET = [
    "logging.progress=off",
    "logging.tensorboard=false",
    "environment.workers=0",
    "environment.eval.workers=0",
]
# V and M on rollouts of the toy, then three generations; every stage of the experiment for CarRacing.
TINY = [*og_wm.TINY, "algorithm.sequences=start"]


def train(folder: Path, *words: str) -> rl_lab.training.RunResult:
    return rl_lab.train(None, [*TINY, *QUIET, f"run_dir={folder}", *words], say=lambda line: None)


def stop_after(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    do = Orchestrator.run_action

    def stop(self, name, phase):
        do(self, name, phase)
        self.interrupted = name == action

    monkeypatch.setattr(Orchestrator, "run_action", stop)


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("full") / "run"
    train(folder)
    return folder


def travel(run: Path, parts: Path, target: Path, kib: int = 40) -> list[Path]:
    """Split a run into files of at most `kib` KiB, remove it, and join the files in another folder."""
    files = split_run.split_run(run, parts, limit=kib / 1024)
    run.rename(run.with_name(f"{run.name}_gone"))
    split_run.join(parts, target)
    return files


@pytest.mark.parametrize("action", ["update_mdn", "evolve"])
def test_a_run_that_travelled_is_the_run_that_stayed(action: str, full: Path, tmp_path: Path, monkeypatch):
    """V, M, their optimizers, the replay, CMA-ES and every generator travel; stopped after M's training, or C's."""
    with monkeypatch.context() as patch:
        stop_after(patch, action)
        assert train(tmp_path / "here" / "run").interrupted
    files = travel(tmp_path / "here" / "run", tmp_path / "parts", tmp_path / "there" / "other")
    assert len(files) > 3 and all(file.stat().st_size <= 40 * 1024 for file in files)
    resume(tmp_path / "there" / "other", say=lambda line: None)
    assert_same_run(full, tmp_path / "there" / "other")
    stages = [line for line in metric_lines(tmp_path / "there" / "other") if "controller/generation" in line]
    assert [line["controller/generation"] for line in stages] == [1, 2, 3]  # the curve travels, too


def test_evolution_with_loaded_networks_travels_every_generation(tmp_path: Path, monkeypatch):
    """As scripts/og_wm_carracing.sh does it: V and M as weights, then CMA-ES from machine to machine."""
    networks = train(tmp_path / "networks", "phases=og_wm_networks")
    split_run.split_weights(networks.path, tmp_path / "weights", limit=0.02)
    weights = tmp_path / "weights.pt"
    split_run.join(tmp_path / "weights", weights)
    words = ["phases=og_wm_evolve", "buffers.replay.capacity=200", f"load.path={weights}"]
    train(tmp_path / "stayed", *words)
    with monkeypatch.context() as patch:
        stop_after(patch, "evolve")
        assert train(tmp_path / "a", *words).interrupted
        weights.unlink()  # the next machine has the state only
        travel(tmp_path / "a", tmp_path / "state", tmp_path / "b")
        assert resume(tmp_path / "b", say=lambda line: None).interrupted
        travel(tmp_path / "b", tmp_path / "state", tmp_path / "c")
    resume(tmp_path / "c", say=lambda line: None)
    assert_same_run(tmp_path / "stayed", tmp_path / "c")


def test_weights_are_exact(full: Path, tmp_path: Path):
    files = split_run.split_weights(full, tmp_path / "parts", limit=0.01)
    assert len(files) > 1
    split_run.join(tmp_path / "parts", tmp_path / "weights.pt")
    ours = torch.load(tmp_path / "weights.pt", weights_only=True)
    state = CheckpointManager.load_file(full, weights=True).state
    assert set(ours) == {"version", "global_step", "components", "controllers"}
    for group in ("components", "controllers"):
        assert set(ours[group]) == set(state[group])
        for part, tensors in state[group].items():
            assert all(torch.equal(ours[group][part][key], value) for key, value in tensors.items())


def test_only_a_run_that_is_behind_is_replaced(full: Path, tmp_path: Path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, "evolve")
        train(tmp_path / "behind")
    parts = str(tmp_path / "parts")
    assert split_run.main(["split", str(full), parts]) == 0
    assert split_run.main(["join", parts, str(tmp_path / "behind")]) == 1
    assert "behind exists: choose another name, or pass --newer" in capsys.readouterr().err
    (tmp_path / "behind" / LOCK_NAME).touch()
    lock = RunLock(tmp_path / "behind").acquire()
    assert split_run.main(["join", parts, str(tmp_path / "behind"), "--newer"]) == 1
    assert split_run.main(["split", str(tmp_path / "behind"), str(tmp_path / "other")]) == 1
    assert capsys.readouterr().err.count("is in use by a process") == 2
    lock.release()
    assert split_run.main(["join", parts, str(tmp_path / "behind"), "--newer"]) == 0
    assert_same_run(full, tmp_path / "behind")
    assert split_run.main(["join", parts, str(tmp_path / "behind"), "--newer"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert not list(tmp_path.glob(".joining_*"))


def test_damaged_parts_and_foreign_paths_are_refused(full: Path, tmp_path: Path, capsys):
    folder = tmp_path / "parts"
    files = split_run.split_run(full, folder, limit=0.04)

    def refused(says: str) -> None:
        assert split_run.main(["join", str(folder), str(tmp_path / "new")]) == 1
        assert says in capsys.readouterr().err and not (tmp_path / "new").exists()

    content, listed = files[1].read_bytes(), (folder / "parts.json").read_text()
    files[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(f"{files[1].name} is damaged")
    files[1].unlink()
    refused(f"{files[1].name} is missing: copy all parts")
    files[1].write_bytes(content)
    changed = json.loads(listed)
    changed["files"][0]["path"] = "../outside"
    (folder / "parts.json").write_text(json.dumps(changed))
    refused("leads out of")
    (folder / "parts.json").unlink()
    refused("has no parts.json")
    assert not (tmp_path / "outside").exists()


STAND_IN = r"""#!/usr/bin/env bash
# Notes every command, and makes the files by which scripts/og_wm_carracing.sh sees what is done.
printf '%q ' "$@" >>"$COMMANDS"
echo >>"$COMMANDS"
case "$*" in
-c*) exit 1 ;; # no EnvPool
*phases=og_wm_evolve*) mkdir -p "$RUN/evolve/checkpoints" && touch "$RUN/evolve/checkpoints/step_000000001.json" ;;
*split_run.py\ split*) mkdir -p "$4" && touch "$4/parts.json" ;;
esac
"""


def test_steps_of_the_carracing_script(tmp_path: Path):
    """V and M once, then evolution as often as it is called: begun on the weights, continued from the state."""
    python, commands, run = tmp_path / "python", tmp_path / "commands", tmp_path / "run"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    variables = {**os.environ, "PYTHON": str(python), "COMMANDS": str(commands), "RUN": str(run)}

    def step(name: str) -> list[str]:
        commands.write_text("")
        script = [str(ROOT / "scripts" / "og_wm_carracing.sh"), name, str(run), "workers=3", "tracks=5"]
        subprocess.run(script, env=variables, check=True, capture_output=True)
        return [line.strip() for line in commands.read_text().splitlines() if not line.startswith("-c")]

    collect, cut = step("networks")
    assert cut == f"scripts/split_run.py split {run}/networks {run}/weights --weights"
    assert step("networks") == []
    joined, begun, kept = step("evolve")
    assert joined == f"scripts/split_run.py join {run}/weights {run}/weights.pt"
    assert kept == f"scripts/split_run.py split {run}/evolve {run}/state"
    joined, continued, kept = step("evolve")
    assert joined == f"scripts/split_run.py join {run}/state {run}/evolve --newer"
    assert continued.startswith(f"-m rl_lab resume {run}/evolve environment.workers=3")
    assert kept == f"scripts/split_run.py split {run}/evolve {run}/state"

    configs = [
        compose_config([w.lstrip("+") if "experiment" in w else w for w in shlex.split(line)[3:]])
        for line in (collect, begun)
    ]
    networks, evolve = (to_plain(config) for config in configs)
    assert networks["algorithm"]["batch_length"] == 999 and networks["environment"]["time_limit"] == 1000
    assert networks["algorithm"]["sequences"] == "start"  # of M: whole rollouts
    assert evolve["load"]["path"] == f"{run}/weights.pt" and evolve["algorithm"]["evolution"]["episodes"] == 5
    assert evolve["training"]["checkpoint"]["every_cycles"] == 1  # every generation can be continued
