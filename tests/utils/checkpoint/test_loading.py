"""Loading: the newest good one, loudly."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.utils.checkpoint import manifest as manifest_module
from rl_lab.utils.checkpoint.loading import load_checkpoint, restore_buffers
from rl_lab.utils.checkpoint.manager import CheckpointManager
from rl_lab.utils.checkpoint.manifest import MIGRATIONS, write_manifest
from rl_lab.utils.files import crc32_of


def state_of(step: int) -> dict:
    return {"global_step": step, "components": {"w": torch.full((200,), float(step))}}


@pytest.fixture
def run(tmp_path, chunk_buffer):
    """Two checkpoints, at steps 1 and 2; chunk_0 belongs to both."""
    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    buffer = chunk_buffer().fill(15)
    manager.save(1, state_of(1), {"replay": buffer})
    manager.save(2, state_of(2), {"replay": buffer.fill(10)})
    return manager


def damage(path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncate":
        data = data[: len(data) // 2]
    elif how == "flip":
        data[len(data) // 2] ^= 1
    elif how == "grow":
        data += b"x"
    if how == "delete":
        path.unlink()
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncate", "flip", "grow", "delete"])
@pytest.mark.parametrize("file", ["step_000000002.pt", "step_000000002.json", "replay/replay/tail_2.json"])
def test_damage_falls_back_with_warning(run, chunk_buffer, file, how):
    damage(run.folder / file, how)
    if (file, how) == ("step_000000002.json", "delete"):
        assert run.load().step == 1  # without a manifest it never existed
        return
    with pytest.warns(UserWarning, match="CHECKPOINT DAMAGED.*trying the one before it") as caught:
        loaded = run.load()
    assert file.split("/")[-1] in str(caught[0].message)
    assert loaded.step == 1 and loaded.state["components"]["w"][0] == 1
    buffer = chunk_buffer()
    run.restore_buffers(loaded, {"replay": buffer})
    assert buffer.rows == list(range(15))


def test_callback_replaces_warnings(run, recwarn):
    said: list[str] = []
    run.on_warning = said.append
    damage(run.folder / "step_000000002.pt", "flip")
    run.load()
    assert len(said) == 1 and "checksum" in said[0] and not list(recwarn)


def test_no_intact_checkpoint_lists_tried(run):
    damage(run.folder / "replay/replay/chunk_0.json", "flip")
    with pytest.warns(UserWarning), pytest.raises(CheckpointError, match="tried") as caught:
        run.load()
    assert "step_000000002" in str(caught.value) and "step_000000001" in str(caught.value)
    # Weights can still be had: they need no replay.
    assert run.load(weights=True).step == 2


def test_save_after_fallback_deletes_later_checkpoint(run, chunk_buffer):
    said: list[str] = []
    run.on_warning = said.append
    run.save(3, state_of(3), {"replay": chunk_buffer().fill(3)})
    damage(run.folder / "step_000000003.pt", "truncate")
    loaded = run.load()
    assert loaded.step == 2
    buffer = chunk_buffer()
    run.restore_buffers(loaded, {"replay": buffer})
    said.clear()
    # The next save comes at an earlier step than the damaged one: that one must not be taken for the newest.
    manager = CheckpointManager(run.folder, on_warning=said.append)
    manager.save(2, state_of(2), {"replay": buffer})
    assert manager.steps() == [2] and "from a later step" in said[0]
    assert manager.load().step == 2


def test_accepted_paths(run):
    folder = run.folder
    for path in (
        folder.parent,
        folder,
        folder / "last.pt",
        folder / "step_000000002.pt",
        folder / "step_000000002.json",
    ):
        assert load_checkpoint(path).step == 2
        assert load_checkpoint(str(path)).complete
    assert load_checkpoint(folder / "step_000000001.pt").step == 1
    with pytest.raises(
        CheckpointError, match=r"step_000000003\.pt: there is no checkpoint .*step_000000002\.pt"
    ):
        load_checkpoint(folder / "step_000000003.pt")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        load_checkpoint(folder.parent.parent)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(folder.parent / "nowhere")


def test_named_file_is_loaded_or_raises(run):
    damage(run.folder / "step_000000002.pt", "flip")
    with pytest.raises(CheckpointError, match="changed since"):
        run.load(run.folder / "step_000000002.pt")
    with pytest.raises(CheckpointError, match="changed since"):
        run.load(run.folder / "last.pt")


def test_file_without_manifest_is_weights(run, tmp_path, chunk_buffer):
    lone = tmp_path / "download.pt"
    shutil.copy(run.folder / "step_000000002.pt", lone)
    loaded = load_checkpoint(lone)
    assert loaded.manifest is None and loaded.step == 2 and not loaded.complete and loaded.info == {}
    with pytest.warns(UserWarning, match="no replay for buffer 'replay'"):
        assert restore_buffers(loaded, {"replay": chunk_buffer()}) == ["replay"]
    damage(lone, "flip")
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(lone)


def test_not_a_checkpoint(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list"):
        load_checkpoint(tmp_path / "list.pt")
    torch.save({"weight": torch.ones(1)}, tmp_path / "foreign.pt")
    with pytest.raises(CheckpointError, match="has no checkpoint version"):
        load_checkpoint(tmp_path / "foreign.pt")


class Evil:
    def __reduce__(self):
        return os.system, ("touch hacked",)


def test_code_is_not_executed(tmp_path):
    torch.save({"version": 1, "a": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"needs code to load .*system"):
        load_checkpoint(tmp_path / "evil.pt")
    assert not (tmp_path / "hacked").exists()


def test_newer_versions_raise(run):
    path = run.folder / "step_000000002.json"
    content = manifest_module.read_manifest(path)
    write_manifest(path, content | {"version": 99})
    with pytest.raises(CheckpointError, match=r"version 99.*newer RL Lab.*update"):
        run.load()
    torch.save({"version": 99}, run.folder.parent / "new.pt")
    with pytest.raises(CheckpointError, match="version 99"):
        load_checkpoint(run.folder.parent / "new.pt")


def test_older_versions(run, monkeypatch):
    monkeypatch.setattr(manifest_module, "CHECKPOINT_VERSION", 3)
    with pytest.raises(CheckpointError, match="no migration from version 1 to 3"):
        run.load()
    monkeypatch.setitem(MIGRATIONS, 1, lambda state: state | {"counted": 1})
    with pytest.raises(CheckpointError, match="no migration from version 2 to 3"):
        run.load()
    monkeypatch.setitem(MIGRATIONS, 2, lambda state: state | {"counted": state["counted"] + 1})
    state = run.load().state
    assert state["counted"] == 2 and state["version"] == 3 and state["global_step"] == 2


def test_manifest_paths_stay_in_folder(run, tmp_path):
    shutil.copy(run.folder / "step_000000002.pt", tmp_path / "outside.pt")
    path = run.folder / "step_000000002.json"
    content = manifest_module.read_manifest(path)
    write_manifest(path, content | {"state": content["state"] | {"file": "../../outside.pt"}})
    with pytest.warns(UserWarning, match="is not the name of a file beside it"):
        assert run.load().step == 1


def test_replay_of_other_run_is_linked(run, tmp_path, chunk_buffer):
    other = CheckpointManager(tmp_path / "other" / "checkpoints")
    loaded = other.load(run.folder / "step_000000002.pt")
    buffer = chunk_buffer()
    other.restore_buffers(loaded, {"replay": buffer})
    assert buffer.rows == list(range(25))
    other.save(3, state_of(3), tag="best")  # takes nothing away that the buffer still counts on
    assert {"chunk_0.json", "chunk_1.json"} <= {
        p.name for p in (other.folder / "replay" / "replay").iterdir()
    }
    other.save(9, state_of(9), {"replay": buffer})
    shutil.rmtree(run.folder)
    again = chunk_buffer()
    other.restore_buffers(other.load(), {"replay": again})
    assert again.rows == list(range(25))


def test_failed_restore_raises(run):
    class Broken:
        def restore(self, folder, entry):
            raise ValueError("columns differ")

    with pytest.raises(CheckpointError, match=r"buffer 'replay'.*columns differ"):
        run.restore_buffers(run.load(), {"replay": Broken()})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_detected(run, tmp_path, data):
    """For any damage to one file of the newest checkpoint, exactly step 2 or exactly step 1 is loaded."""
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run.folder, copy, symlinks=True)
    file = data.draw(
        st.sampled_from(["step_000000002.pt", "step_000000002.json", "replay/replay/tail_2.json"])
    )
    content = bytearray((copy / file).read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    else:
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (copy / file).write_bytes(content)
    loaded = load_checkpoint(copy, on_warning=lambda message: None)
    assert loaded.state["global_step"] == loaded.step
    assert torch.equal(loaded.state["components"]["w"], torch.full((200,), float(loaded.step)))


class PartialBuffer:
    """Restores intact files only, as real buffers do."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def restore(self, folder, entry, *, skip_corrupt=False):
        lost = []
        for name, facts in entry["files"].items():
            if skip_corrupt and crc32_of(folder / name) != facts["crc32"]:
                lost.append(f"{name} (10 rows) has changed")
            else:
                self.rows += json.loads((folder / name).read_bytes())
        return lost


@pytest.mark.parametrize("choice", ["older", "skip"])
def test_damaged_shared_chunk_loses_only_its_rows(run, choice):
    damage(run.folder / "replay/replay/chunk_0.json", "flip")
    said: list[str] = []
    manager = CheckpointManager(run.folder, on_damaged_replay=choice, on_warning=said.append)
    loaded = manager.load()
    assert loaded.step == 2 and list(loaded.damaged["replay"]) == ["chunk_0.json"]
    buffer = PartialBuffer()
    assert manager.restore_buffers(loaded, {"replay": buffer}) == ["replay"]
    assert buffer.rows == list(range(10, 25))
    assert "REPLAY DAMAGED: buffer 'replay' lost chunk_0.json (10 rows)" in said[-1]
    assert "exactly those of step 2" in said[-1]


def test_buffer_without_partial_restore_starts_empty(run, chunk_buffer, tmp_path):
    damage(run.folder / "replay/replay/chunk_0.json", "delete")
    said: list[str] = []
    other = CheckpointManager(tmp_path / "other", on_damaged_replay="skip", on_warning=said.append)
    loaded = other.load(run.folder / "step_000000002.pt")
    buffer = chunk_buffer()
    assert other.restore_buffers(loaded, {"replay": buffer}) == ["replay"] and buffer.rows == []
    assert "all rows" in said[-1]


def test_older_intact_checkpoint_is_preferred(run):
    damage(run.folder / "replay/replay/tail_2.json", "flip")
    loads = {
        choice: CheckpointManager(run.folder, on_damaged_replay=choice, on_warning=lambda text: None).load()
        for choice in ("older", "skip", "stop")
    }
    assert {choice: loaded.step for choice, loaded in loads.items()} == {"older": 1, "skip": 2, "stop": 1}
    assert [choice for choice, loaded in loads.items() if loaded.damaged] == ["skip"]


def test_damaged_state_is_never_loaded(run):
    damage(run.folder / "replay/replay/chunk_0.json", "flip")
    damage(run.folder / "step_000000002.pt", "truncate")
    loaded = CheckpointManager(run.folder, on_damaged_replay="older", on_warning=lambda text: None).load()
    assert loaded.step == 1 and loaded.damaged


def test_unknown_on_damaged_replay(tmp_path):
    with pytest.raises(ConfigError, match=r"on_damaged_replay is 'skipp'.*Did you mean 'skip'"):
        CheckpointManager(tmp_path, on_damaged_replay="skipp")


@pytest.mark.parametrize("field", ["step", "kind", "state", "buffers", "info"])
def test_manifest_with_missing_field(run, field):
    path = run.folder / "step_000000002.json"
    content = manifest_module.read_manifest(path)
    del content[field]
    write_manifest(path, content)
    with pytest.warns(UserWarning, match=f"is not a valid manifest: '{field}' is missing"):
        assert run.load().step == 1
