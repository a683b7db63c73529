"""Saving checkpoints atomically."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
import zlib

import pytest
import torch

from rl_lab.errors import CheckpointError
from rl_lab.utils import files
from rl_lab.utils.checkpoint import manager as checkpoint
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.checkpoint.manifest import CHECKPOINT_VERSION, read_manifest


def state_of(step: int) -> dict:
    return {
        "global_step": step,
        "workflow_name": "Plain",
        "components": {"encoder": {"weight": torch.full((4,), float(step))}},
        "controllers": {},
        "workflow_custom": {},
        "optimizers": {"adam": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}},
        "generators": {},
    }


def names(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def test_save_and_load(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path)
    assert not manager.has_any() and manager.steps() == []
    buffer = chunk_buffer().fill(25)
    info = {"metrics_bytes": 77, "score": float("nan")}
    path = manager.save(12000, state_of(12000), {"replay": buffer}, info=info)
    assert path == tmp_path / "step_000012000.pt"
    assert os.readlink(tmp_path / "last.pt") == path.name
    assert names(tmp_path) == {
        "step_000012000.pt",
        "step_000012000.json",
        "last.pt",
        "replay/replay/chunk_0.json",
        "replay/replay/chunk_1.json",
        "replay/replay/tail_1.json",
    }
    manifest = json.loads((tmp_path / "step_000012000.json").read_text())
    assert manifest["version"] == CHECKPOINT_VERSION and manifest["torch"] == torch.__version__
    assert set(manifest["buffers"]["replay"]["files"]) == {"chunk_0.json", "chunk_1.json", "tail_1.json"}
    assert torch.load(path, weights_only=True)["global_step"] == 12000

    loaded = CheckpointManager(tmp_path).load()
    assert loaded.step == 12000 and loaded.complete and loaded.path == path
    assert loaded.info == {"metrics_bytes": 77, "score": "NaN"}
    assert torch.equal(loaded.state["components"]["encoder"]["weight"], torch.full((4,), 12000.0))
    fresh = chunk_buffer()
    assert manager.restore_buffers(loaded, {"replay": fresh}) == []
    assert fresh.rows == buffer.rows


def test_unsaveable_state_writes_nothing(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path / "checkpoints")
    state = state_of(1) | {"workflow_custom": {"history": [0, 1, 2, {3}]}}
    with pytest.raises(CheckpointError, match=r"workflow_custom\.history\[3\].*set"):
        manager.save(1, state, {"replay": chunk_buffer().fill(5)})
    assert names(tmp_path) == set()


@pytest.mark.parametrize("stage", ["replay", "state", "manifest"])
def test_failed_save_keeps_previous_checkpoint(tmp_path, chunk_buffer, monkeypatch, stage):
    manager = CheckpointManager(tmp_path)
    buffer = chunk_buffer().fill(15)
    manager.save(1, state_of(1), {"replay": buffer})
    before = names(tmp_path)
    buffer.fill(10)

    real_replace = os.replace

    def replace(source, target):
        target = str(target)
        hit = {"replay": "tail_", "state": ".pt", "manifest": "step_000000002.json"}[stage]
        if hit in target.split("/")[-1]:
            raise OSError(28, "No space left on device")
        real_replace(source, target)

    monkeypatch.setattr(files.os, "replace", replace)
    with pytest.raises(
        CheckpointError, match=rf"step 2 was not saved.*{stage}.*No space left.*bytes are free"
    ):
        manager.save(2, state_of(2), {"replay": buffer})
    monkeypatch.undo()
    left = names(tmp_path) - before
    assert all(name.startswith("replay/") for name in left) and not any(
        name.endswith(".tmp") for name in left
    )
    loaded = manager.load()
    assert loaded.step == 1

    # With free space the next save succeeds, and no file of the failed attempt remains.
    manager.save(3, state_of(3), {"replay": buffer})
    assert manager.load().step == 3
    named = {f"replay/replay/{name}" for step in (1, 3) for name in _files(tmp_path, step)}
    assert {name for name in names(tmp_path) if name.startswith("replay/")} == named


def _files(folder, step) -> list[str]:
    return list(read_manifest(folder / f"step_{step:09d}.json")["buffers"]["replay"]["files"])


FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from rl_lab.errors import CheckpointError
from rl_lab.utils.checkpoint import CheckpointManager
folder = Path(sys.argv[1])
manager = CheckpointManager(folder)
manager.save(1, {"components": {"w": torch.ones(1000)}})
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    manager.save(2, {"components": {"w": torch.ones(1_000_000)}})
except CheckpointError as error:
    print("refused:", error)
print(sorted(path.name for path in folder.iterdir()))
print(manager.load().step)
manager.save(3, {"components": {"w": torch.ones(1000)}})
print(manager.load().step)
"""


def test_full_disk_during_state_write(tmp_path, subprocess_env):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, env=subprocess_env
    )
    assert done.returncode == 0, done.stderr
    refused, listing, second, third = done.stdout.strip().splitlines()
    assert "state" in refused and "File too large" in refused and "bytes are free" in refused
    assert listing == "['last.pt', 'step_000000001.json', 'step_000000001.pt']"
    assert (second, third) == ("1", "3")
    assert "Traceback" not in done.stderr and "terminate" not in done.stderr


def save_for_ever(folder, make_buffer, reports) -> None:
    """Goes on from what it finds, checks it, and saves until it is killed."""
    manager, buffer, step = CheckpointManager(folder), make_buffer(), 0
    if manager.has_any():
        loaded = manager.load()
        step = loaded.step
        manager.restore_buffers(loaded, {"replay": buffer})
        if buffer.rows != list(range(7 * step)) or loaded.state["w"].tolist() != [float(step)] * 20_000:
            reports.send(f"step {step} came back wrong")
    while True:
        step += 1
        manager.save(step, {"w": torch.full((20_000,), float(step))}, {"replay": buffer.fill(7)})
        reports.send(step)


def test_kill_while_saving(tmp_path, chunk_buffer):
    fork = multiprocessing.get_context("fork")
    for kill in range(6):
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=save_for_ever, args=(tmp_path, chunk_buffer, sender))
        process.start()
        sender.close()
        reports = [receiver.recv() for _ in range(2)]
        time.sleep(0.004 * kill)  # somewhere in the next save
        process.kill()
        process.join()
        assert all(isinstance(report, int) for report in reports), reports
        assert CheckpointManager(tmp_path, on_warning=pytest.fail).load().step >= reports[-1]


def test_saving_same_step_twice(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path)
    manager.save(5, state_of(5))

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", fails)
    with pytest.raises(CheckpointError):
        manager.save(5, state_of(50))
    monkeypatch.undo()
    assert manager.load().state["global_step"] == 5
    for value in (51, 52, 53):
        manager.save(5, state_of(value))
        assert manager.load().state["global_step"] == value
        assert len(list(tmp_path.glob("step_*.pt"))) == 1
        assert manager.load(tmp_path / "last.pt").state["global_step"] == value


def test_best_is_weights_only_and_replaced(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path)
    manager.save(1, state_of(1), {"replay": chunk_buffer().fill(5)})
    for step in (2, 4):
        manager.save(step, state_of(step), {"replay": chunk_buffer()}, tag="best", info={"return": step})
    loaded = manager.load(tmp_path / "best.pt")
    assert loaded.step == 4 and loaded.info == {"return": 4} and not loaded.complete
    assert "optimizers" not in loaded.state and "components" in loaded.state
    assert torch.load(tmp_path / "best.pt", weights_only=True)["global_step"] == 4
    assert len(list(tmp_path.glob("best*"))) == 3  # link, file, manifest
    assert manager.load().step == 1 and manager.steps() == [1]


def test_epoch_weights_are_kept(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path, keep=1)
    for step in (1, 2, 3):
        manager.save(step, state_of(step), tag=f"epoch_{step}")
        manager.save(step, state_of(step), {"replay": chunk_buffer().fill(5)})
    assert manager.steps() == [3]
    for step in (1, 2, 3):
        loaded = CheckpointManager.load_file(tmp_path / f"epoch_{step}.pt", weights=True)
        assert loaded.step == step and not loaded.complete


@pytest.mark.parametrize("tag", ["", "last", "../x", "step_1", "Best"])
def test_bad_tags(tmp_path, tag):
    with pytest.raises(CheckpointError, match="cannot be the name"):
        CheckpointManager(tmp_path).save(1, state_of(1), tag=tag)


def test_missing_chunk_raises_on_save(tmp_path):
    class Forgetful:
        def checkpoint(self, folder):
            return {"files": {"chunk_0": {"bytes": 10, "crc32": 1}}, "meta": {}}

    with pytest.raises(CheckpointError, match="chunk_0 should have 10 bytes"):
        CheckpointManager(tmp_path).save(1, state_of(1), {"replay": Forgetful()})


def test_save_and_load_without_links(tmp_path, monkeypatch):
    def fails(*args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", fails)
    said: list[str] = []
    manager = CheckpointManager(tmp_path, on_warning=said.append)
    manager.save(1, state_of(1))
    manager.save(2, state_of(2), tag="best")
    assert "could not be linked" in said[0]
    assert manager.load(tmp_path / "last.pt").step == 1
    assert manager.load(tmp_path / "best.pt").step == 2


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(CheckpointError, match="at least one"):
        CheckpointManager(tmp_path, keep=0)


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_changed_chunk_is_rewritten(tmp_path, chunk_buffer, damage):
    said: list[str] = []
    manager = CheckpointManager(tmp_path, on_warning=said.append)
    buffer = chunk_buffer().fill(25)
    manager.save(1, state_of(1), {"replay": buffer})
    chunk = tmp_path / "replay" / "replay" / "chunk_0.json"
    content = chunk.read_bytes()
    if damage == "delete":
        chunk.unlink()
    else:
        chunk.write_bytes(content.replace(b"3", b"4") if damage == "flip" else content[:5])
        os.utime(chunk, ns=(1, 1))
    manager.save(2, state_of(2), {"replay": buffer.fill(5)})
    assert chunk.read_bytes() == content
    assert damage == "delete" or "written again" in said[0]  # a buffer with its own check rewrites it
    assert manager.load(tmp_path / "step_000000001.pt").step == 1 and manager.load().step == 2


def test_touched_chunk_is_not_rewritten(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path, on_warning=pytest.fail)
    buffer = chunk_buffer().fill(25)
    manager.save(1, state_of(1), {"replay": buffer})
    os.utime(tmp_path / "replay" / "replay" / "chunk_0.json", ns=(1, 1))
    manager.save(2, state_of(2), {"replay": buffer.fill(5)})


def test_unrepairable_replay_file_warns_on_save(tmp_path):
    class Linked:
        """The file also exists elsewhere and is linked again with its damage."""

        def checkpoint(self, folder):
            if not (folder / "chunk").exists():
                (folder / "chunk").write_bytes(b"bad")
            return {"files": {"chunk": {"bytes": 3, "crc32": zlib.crc32(b"old")}}, "meta": {}}

    said: list[str] = []
    manager = CheckpointManager(tmp_path, on_warning=said.append)
    (tmp_path / "replay" / "replay").mkdir(parents=True)
    (tmp_path / "replay" / "replay" / "chunk").write_bytes(b"old")
    manager.save(1, state_of(1), {"replay": Linked()})
    (tmp_path / "replay" / "replay" / "chunk").write_bytes(b"bad")
    os.utime(tmp_path / "replay" / "replay" / "chunk", ns=(1, 1))
    manager.save(2, state_of(2), {"replay": Linked()})
    assert "written again" in said[0]
