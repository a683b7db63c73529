from __future__ import annotations

import pytest
import torch

from rl_lab.utils.checkpoint import manager as retention
from rl_lab.utils.checkpoint.manager import CheckpointManager


def state_of(step: int) -> dict:
    return {
        "global_step": step,
        "components": {"w": torch.full((20,), float(step))},
        "optimizers": {"m": torch.ones(2000)},
    }


def replay_names(folder) -> set[str]:
    return {path.name for path in (folder / "replay").rglob("*") if path.is_file()}


def test_only_newest_keep_replay(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path, keep=2)
    buffer = chunk_buffer()
    for step in range(1, 6):
        manager.save(step, state_of(step), {"replay": buffer.fill(6)})
    assert manager.steps() == [4, 5]
    assert {path.name for path in tmp_path.glob("*.pt")} == {
        "step_000000004.pt",
        "step_000000005.pt",
        "last.pt",
    }
    # Complete chunks are shared; of the tails only those that the two manifests name are left.
    assert replay_names(tmp_path) == {
        "chunk_0.json",
        "chunk_1.json",
        "chunk_2.json",
        "tail_4.json",
        "tail_5.json",
    }


def test_unreferenced_chunks_are_deleted(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path, keep=2)
    old, new = chunk_buffer().fill(30), chunk_buffer().fill(5)
    new.saves = 10
    manager.save(1, state_of(1), {"replay": old})
    manager.save(2, state_of(2), {"replay": new})
    assert "chunk_2.json" in replay_names(tmp_path)  # step 1 is still kept
    manager.save(3, state_of(3), {"replay": new})
    assert replay_names(tmp_path) == {"tail_11.json", "tail_12.json"}
    manager.save(4, state_of(4), {})
    manager.save(5, state_of(5), {})
    assert replay_names(tmp_path) == set() and not (tmp_path / "replay" / "replay").exists()


def test_older_checkpoints_keep_weights(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path, keep=1, keep_weights=2)
    for step in range(1, 6):
        manager.save(step, state_of(step), {"replay": chunk_buffer().fill(6)})
    assert manager.steps() == [3, 4, 5]
    loaded = manager.load(tmp_path / "step_000000003.weights.pt")
    assert loaded.step == 3 and not loaded.complete
    assert "optimizers" not in loaded.state and loaded.state["components"]["w"][0] == 3
    assert (tmp_path / "step_000000003.weights.pt").stat().st_size < 5000
    # Training does not resume from weights unless requested.
    (tmp_path / "step_000000005.pt").unlink()
    with (
        pytest.warns(UserWarning),
        pytest.raises(Exception, match=r"step_000000004\.weights\.pt.* hold weights only"),
    ):
        manager.load()
    with pytest.warns(UserWarning):
        assert manager.load(weights=True).step == 4


def test_all_older_checkpoints_keep_weights(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1, keep_weights=-1)
    for step in range(1, 6):
        manager.save(step, state_of(step))
    assert manager.steps() == [1, 2, 3, 4, 5]


def test_deletion_waits_for_new_manifest(tmp_path, chunk_buffer, monkeypatch):
    manager = CheckpointManager(tmp_path, keep=1)
    buffer = chunk_buffer().fill(12)
    manager.save(1, state_of(1), {"replay": buffer})
    buffer.fill(10)
    order: list[str] = []
    unlink = type(tmp_path).unlink

    def watched(self, missing_ok=False):
        if self.exists() and not self.name.endswith(".tmp"):
            order.append(self.name)
            assert (tmp_path / "step_000000002.json").exists()
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(type(tmp_path), "unlink", watched)
    manager.save(2, state_of(2), {"replay": buffer})
    assert order[0] == "step_000000001.json"  # its manifest first, then what it named
    assert set(order[1:]) == {"step_000000001.pt", "tail_1.json"}


def test_unreadable_manifest_defers_deletion(tmp_path, chunk_buffer):
    manager = CheckpointManager(tmp_path, keep=2)
    buffer = chunk_buffer()
    manager.save(1, state_of(1), {"replay": buffer.fill(3)})
    (tmp_path / "step_000000001.json").write_text("{")
    manager.save(2, state_of(2), {"replay": buffer.fill(3)})
    assert "tail_1.json" in replay_names(tmp_path)
    manager.save(3, state_of(3), {"replay": buffer.fill(3)})
    assert manager.steps() == [2, 3]
    assert replay_names(tmp_path) == {"tail_2.json", "tail_3.json"}


def test_foreign_files_are_kept(tmp_path):
    manager = CheckpointManager(tmp_path, keep=1)
    (tmp_path / "notes.json").write_text("mine")
    (tmp_path / "mine.pt").write_text("mine")
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    assert (tmp_path / "notes.json").exists() and (tmp_path / "mine.pt").exists()
    assert manager.steps() == [3] and len(list(tmp_path.glob("step_*.pt"))) == 1


def test_failed_cleanup_does_not_fail_save(tmp_path, monkeypatch):
    said: list[str] = []
    manager = CheckpointManager(tmp_path, keep=1, on_warning=said.append)
    manager.save(1, state_of(1))

    def fails(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(retention, "sync_folder", fails)
    manager.save(2, state_of(2))
    assert manager.load().step == 2 and "could not be cleaned up" in said[0]
