"""Faults that a run must handle: a full disk, damaged files, a second process, out of memory."""

from __future__ import annotations

import gc
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import rl_lab
from rl_lab.cli import main
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.orchestration.updates import HookRunner
from rl_lab.training import resume
from rl_lab.utils import files
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.same_run import assert_same, assert_same_run

QUIET = ["logging.progress=off", "logging.tensorboard=false"]
WORDS = [
    *(
        "experiment=dreamer_cartpole",
        "debug=tiny",
        "environment=dummy_discrete",
        "environment.workers=0",
        *QUIET,
    ),
    *(
        "training.checkpoint.every_env_steps=12",
        "training.evaluate.every_env_steps=24",
        "training.total_timesteps=48",
    ),
    *("training.report.every_env_steps=null", "+buffers.replay.chunk_rows=4", "algorithm.train_ratio=2"),
]


def train(folder: Path, *words: str, said: list[str] | None = None):
    return rl_lab.train(
        None,
        [*WORDS, f"run_dir={folder}", *words],
        say=said.append if said is not None else lambda text: None,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An undisturbed run of 48 steps with its last two checkpoints."""
    folder = tmp_path_factory.mktemp("faults") / "whole"
    train(folder)
    return folder


def steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, oldest first. Resets are not counted, so they are not multiples."""
    return CheckpointManager(run / "checkpoints").steps()


def manifest(run: Path, which: int) -> dict:
    return json.loads((run / "checkpoints" / f"step_{steps(run)[which]:09d}.json").read_text())


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy", symlinks=True))


def flip(file: Path, at: float = 0.6) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 0x55
    file.write_bytes(content)


# ---------------------------------------------------------------- a full disk


@pytest.fixture
def full_disk(monkeypatch):
    """Make all saves after the first fail while `full_disk.full` is True."""

    class Disk:
        full = True
        saves = 0

    disk, replace = Disk(), os.replace

    def fails(source, target):
        if str(target).endswith(".json") and "step_" in str(target):
            disk.saves += 1
            if disk.full and disk.saves > 1:
                raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", fails)
    return disk


def test_full_disk_is_reported_and_training_continues(
    tmp_path: Path, full_disk, whole: Path, monkeypatch, capsys
):
    save = Orchestrator.save

    def room_for_the_last(self, tag=None, *, last=False):
        full_disk.full = not last
        save(self, tag, last=last)

    monkeypatch.setattr(Orchestrator, "save", room_for_the_last)
    run = train(tmp_path / "run")
    missed = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "checkpoint not saved, training continues" in line
    ]
    assert len(missed) >= 2
    assert all("No space left" in text and "earlier checkpoints are intact" in text for text in missed)
    assert run.counters["env_steps"] == steps(whole)[-1]
    assert_same_run(tmp_path / "run", whole)  # a save that failed changed nothing


def test_full_disk_stops_run_if_configured(tmp_path: Path, full_disk, whole: Path):
    with pytest.raises(CheckpointError, match=r"step 2\d was not saved.*No space left"):
        train(tmp_path / "run", "training.on_save_failure=stop")
    assert 12 <= CheckpointManager(tmp_path / "run" / "checkpoints").load().step < 24
    full_disk.full = False
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", whole)


def test_failed_last_checkpoint_is_an_error(tmp_path: Path, full_disk):
    with pytest.raises(CheckpointError, match=r"step 4\d was not saved|step 5\d was not saved"):
        train(tmp_path / "run")
    assert 12 <= CheckpointManager(tmp_path / "run" / "checkpoints").load().step < 24


# ---------------------------------------------------------------- damaged checkpoints


def test_damaged_last_checkpoint_falls_back(copy: Path, whole: Path):
    flip(copy / "checkpoints" / manifest(copy, -1)["state"]["file"])
    said: list[str] = []
    resume(copy, say=said.append)
    assert any("CHECKPOINT DAMAGED" in text and "trying the one before" in text for text in said)
    assert_same_run(copy, whole)


def chunk_of_all(run: Path) -> Path:
    """Return a replay file that all manifests refer to."""
    assert len(steps(run)) == 2
    shared = set.intersection(*(set(manifest(run, which)["buffers"]["replay"]["files"]) for which in (0, 1)))
    return run / "checkpoints" / "replay" / "replay" / min(shared)


def test_damaged_shared_chunk_loses_only_its_rows(copy: Path, whole: Path):
    flip(chunk_of_all(copy))
    said: list[str] = []
    result = resume(copy, ["training.total_timesteps=60"], say=said.append)
    text = next(text for text in said if "REPLAY DAMAGED" in text)
    assert "(8 rows)" in text and f"exactly those of step {steps(whole)[-1]}" in text
    assert result.counters["env_steps"] >= 60
    after = CheckpointManager(copy / "checkpoints", on_warning=pytest.fail).load()
    assert (
        after.step == result.counters["env_steps"] and not after.damaged
    )  # what is lost is in no new manifest


def test_state_is_exact_after_lost_rows(copy: Path, whole: Path, monkeypatch):
    flip(chunk_of_all(copy))
    seen: dict = {}
    restore = Orchestrator.restore

    def stops(self, state, *, empty_buffers=()):
        restore(self, state, empty_buffers=empty_buffers)
        seen.update(self.run_state.gather(), empty=empty_buffers, size=self.storage.buffers["replay"].size)
        raise LabError("seen enough")

    monkeypatch.setattr(Orchestrator, "restore", stops)
    with pytest.raises(LabError, match="seen enough"):
        resume(copy, say=lambda text: None)
    saved = CheckpointManager(whole / "checkpoints").load()
    for part in ("components", "controllers", "optimizers", "phase_state", "workflow_custom", "collector"):
        assert_same(_plain(seen[part]), _plain(saved.state[part]), part)
    meta = saved.manifest["buffers"]["replay"]["meta"]
    assert seen["empty"] == ["replay"]
    assert 0 < seen["size"] == (meta["cursor"] - 4) * 2  # one chunk of four rows in each of two environments


def _plain(value):
    from rl_lab.utils.checkpoint.saveable import to_saveable

    return to_saveable(value)


@pytest.mark.parametrize(("choice", "which"), [("skip", -1), ("older", 0)])
def test_on_damaged_replay_older_or_skip(copy: Path, choice: str, which: int):
    older, newest = (set(manifest(copy, number)["buffers"]["replay"]["files"]) for number in (0, 1))
    for name in newest - older:
        flip(copy / "checkpoints" / "replay" / "replay" / name)
    manager = CheckpointManager(copy / "checkpoints", on_damaged_replay=choice, on_warning=lambda text: None)
    loaded = manager.load()
    assert loaded.step == steps(copy)[which] and bool(loaded.damaged) == (choice == "skip")


def test_on_damaged_replay_stop(copy: Path):
    flip(chunk_of_all(copy))
    with pytest.raises(CheckpointError, match=r"tried:[\s\S]*on_damaged_replay=skip to resume"):
        resume(copy, ["training.on_damaged_replay=stop"], say=lambda text: None)


def test_chunk_damaged_during_training_is_rewritten(tmp_path: Path, whole: Path, monkeypatch):
    said: list[str] = []
    save = Orchestrator.save

    def damages(self, tag=None, *, last=False):
        save(self, tag, last=last)
        chunks = sorted((tmp_path / "run" / "checkpoints" / "replay" / "replay").glob("chunk-*"))
        if chunks and not damages.done:
            flip(chunks[0])
            damages.done = True

    damages.done = False
    monkeypatch.setattr(Orchestrator, "save", damages)
    train(tmp_path / "run", said=said)
    assert damages.done and any("changed after writing: written again" in text for text in said)
    assert_same_run(tmp_path / "run", whole)


def test_changed_config_is_refused(copy: Path):
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text.replace("seed: 0", "seed: 1", 1))
    with pytest.raises(ConfigError, match=r"experiment.seed is 1, but the checkpoint was trained with 0"):
        resume(copy, ["training.total_timesteps=60"], say=lambda text: None)


def test_second_process_is_refused(copy: Path, capsys):
    with files.RunLock(copy):
        assert main(["resume", str(copy), "training.total_timesteps=60"]) == 1
    assert "is in use by process" in capsys.readouterr().err


def test_older_checkpoints_are_migrated_or_refused(copy: Path, monkeypatch):
    """Load a checkpoint of version 1 with code of version 2."""
    from rl_lab.utils.checkpoint import manager as checkpoint
    from rl_lab.utils.checkpoint import manifest

    monkeypatch.setattr(manifest, "CHECKPOINT_VERSION", 2)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_VERSION", 2)
    with pytest.raises(
        CheckpointError, match="has checkpoint version 1, and no migration from version 1 to 2"
    ):
        resume(copy, ["training.total_timesteps=60"], say=lambda text: None)
    monkeypatch.setitem(manifest.MIGRATIONS, 1, lambda state: {**state, "migrated": True})
    assert resume(copy, ["training.total_timesteps=60"], say=lambda text: None).counters["env_steps"] >= 60


# ---------------------------------------------------------------- errors in the training loop


def raise_at(monkeypatch, call: int, error: Exception) -> None:
    run = HookRunner.run
    calls = 0

    def counted(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        run(self, *args, **kwargs)

    monkeypatch.setattr(HookRunner, "run", counted)


def test_out_of_memory_message_lists_uses_and_advice(tmp_path: Path, monkeypatch, capsys):
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of 1 GiB"
    )
    raise_at(monkeypatch, 2, error)
    monkeypatch.setattr("rl_lab.orchestration.diagnostics._peak", lambda: 3 * 2**30)
    assert main(["train", *WORDS, f"run_dir={tmp_path / 'run'}"]) == 1
    text = capsys.readouterr().err
    assert "Traceback" not in text and text.count("error:") == 1
    for words in (
        *("out of memory", "Tried to allocate 2.00 GiB", "peak: 3.00 GiB", "replay 'replay' when full"),
        *(
            "weights, gradients and optimizer state",
            "algorithm.batch_size",
            "buffers.replay.storage=host",
            "size=",
        ),
    ):
        assert words in text, (words, text)


@pytest.mark.gpu
def test_full_gpu_raises_out_of_memory(tmp_path: Path, capsys):
    """Limit device memory so that the model fits and an update does not."""
    gc.collect()
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved() + 40 * 2**20  # what tests before this one hold counts
    torch.cuda.set_per_process_memory_fraction(taken / torch.cuda.get_device_properties(0).total_memory)
    try:
        words = [*WORDS, "experiment.device=cuda", "training.total_timesteps=5000", "algorithm.batch_size=64"]
        words += ["algorithm.batch_length=16", "algorithm.size.units=256", "algorithm.size.hidden=256"]
        assert main(["train", *words, f"run_dir={tmp_path / 'run'}"]) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
    text = capsys.readouterr().err
    assert "out of memory" in text and "peak: " in text and "weights, gradients and optimizer state" in text


def test_out_of_memory_while_building(tmp_path: Path, monkeypatch, capsys):
    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr("rl_lab.training.build_run", fails)
    assert main(["train", *WORDS, f"run_dir={tmp_path / 'run'}"]) == 1
    assert "buffers.replay.storage=host" in capsys.readouterr().err


def test_first_failure_is_config_error_later_saves_traceback(tmp_path: Path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        raise_at(patch, 1, RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x5 and 4x8)"))
        assert main(["train", *WORDS, f"run_dir={tmp_path / 'first'}"]) == 1
        text = capsys.readouterr().err
        assert "phase 'joint': the first 'update' failed" in text and "mat1 and mat2" in text
    raise_at(monkeypatch, 3, KeyError("reward"))
    assert main(["train", *WORDS, f"run_dir={tmp_path / 'later'}"]) == 1
    captured = capsys.readouterr()
    assert "unexpected KeyError: 'reward'" in captured.err and "Traceback" not in captured.err
    assert "error.txt" in captured.out
    assert "Traceback" in (tmp_path / "later" / "error.txt").read_text()
    raise_at(monkeypatch, 3, KeyError("reward"))
    with pytest.raises(KeyError):
        main(["train", *WORDS, f"run_dir={tmp_path / 'debugged'}", "--debug"])


@pytest.mark.learning
def test_soak_minute_without_violations():
    """A short `rl-lab bench soak`; the result of half an hour is in docs/results/soak.json."""
    from rl_lab.tools.bench import run_benchmark

    result = run_benchmark("soak", ["--minutes", "1", "--every", "8"])
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["soak/violations"]["value"] == 0, rows["soak/violations"]["what"]
    assert rows["soak/faults"]["value"] >= 2
