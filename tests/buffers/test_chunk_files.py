from __future__ import annotations

import io
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.errors import CheckpointError
from rl_lab.records import ArraySpec, BatchSpec
from tests.buffers.buffer_helpers import COLUMNS, assert_aligned, counter_buffer, extend, seeded

SPEC = BatchSpec(size=4, length=5, context=1, sampler="online")


def save(buffer: ReplayBuffer, folder: Path) -> dict[str, Any]:
    """Save a checkpoint, check its files and return the entry after a JSON round trip."""
    entry = json.loads(json.dumps(buffer.checkpoint(folder)))
    for name, info in entry["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (info["bytes"], info["crc32"])
    return entry


def same_rows(left: ReplayBuffer, right: ReplayBuffer) -> bool:
    if (left.total_rows, left.oldest_position) != (right.total_rows, right.oldest_position):
        return False
    count = left.total_rows - left.oldest_position
    mine, other = left.read(left.oldest_position, count), right.read(right.oldest_position, count)
    return list(mine) == list(other) and all(torch.equal(mine[name], other[name]) for name in mine)


def write_back_something(buffer: ReplayBuffer, generator: torch.Generator) -> torch.Tensor:
    batch = buffer.sample(SPEC, generator=generator)
    latent = torch.rand(4, 5, 3, generator=generator)
    buffer.write_back(batch.index, {"latent": latent}, offset=1)
    return batch["obs/count"].clone()


@pytest.mark.parametrize("rows", [0, 5, 8, 31, 32, 45, 130])
def test_restored_buffer_matches_original(tmp_path: Path, rows: int) -> None:
    buffer = counter_buffer(0)
    buffer.make_batch(SPEC)
    extend(buffer, rows, episode=7)
    generator = seeded(1)
    if buffer.ready(SPEC):
        write_back_something(buffer, generator)
    entry, state = save(buffer, tmp_path), buffer.get_state()
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)

    twin = counter_buffer(0)
    twin.set_state(torch.load(stored, weights_only=True))
    twin.restore(tmp_path, entry)
    twin_generator = seeded()
    twin_generator.set_state(generator.get_state())
    assert same_rows(buffer, twin)
    for _ in range(12):
        for each in (buffer, twin):
            extend(each, 3, episode=7)
        if buffer.ready(SPEC):
            ours, theirs = write_back_something(buffer, generator), write_back_something(twin, twin_generator)
            assert torch.equal(ours, theirs)
    assert same_rows(buffer, twin)
    assert str(buffer.get_state()) == str(twin.get_state())
    assert_aligned(twin.sample(SPEC, generator=seeded()))


def test_complete_chunks_are_written_once(tmp_path: Path) -> None:
    buffer = counter_buffer(20)
    first = save(buffer, tmp_path)
    assert sorted(first["files"]) == [
        "chunk-00000000.pt",
        "chunk-00000001.pt",
        "mutable-00000000-00000001.pt",
        "mutable-00000001-00000001.pt",
        "mutable-00000002-00000001.pt",
        "tail-000000000020.pt",
    ]
    identity = {name: (tmp_path / name).stat() for name in first["files"]}
    extend(buffer, 9)
    second = save(buffer, tmp_path)
    for name in set(first["files"]) & set(second["files"]):
        stat = (tmp_path / name).stat()
        assert (stat.st_ino, stat.st_mtime_ns) == (identity[name].st_ino, identity[name].st_mtime_ns)
    assert set(second["files"]) - set(first["files"]) == {
        "chunk-00000002.pt",
        "tail-000000000029.pt",
        "mutable-00000002-00000002.pt",
        "mutable-00000003-00000002.pt",
    }
    write_back_something(buffer, seeded())
    third = save(buffer, tmp_path)
    assert {name for name in third["files"] if name not in second["files"]} == {
        f"mutable-0000000{chunk}-00000003.pt" for chunk in range(4)
    }
    assert all((tmp_path / name).exists() for name in first["files"])  # earlier checkpoints stay complete


def test_earlier_checkpoint_is_unchanged(tmp_path: Path) -> None:
    buffer, reference = counter_buffer(20), counter_buffer(20)
    entry = save(buffer, tmp_path)
    extend(buffer, 30)
    write_back_something(buffer, seeded())
    save(buffer, tmp_path)
    twin = counter_buffer(3)  # with its own rows, which are replaced
    twin.restore(tmp_path, entry)
    assert same_rows(twin, reference)


def test_save_after_restore_reuses_files(tmp_path: Path) -> None:
    entry = save(counter_buffer(40), tmp_path)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in entry["files"]}
    twin = counter_buffer(0)
    twin.restore(tmp_path, entry)
    assert set(save(twin, tmp_path)["files"]) == set(entry["files"])
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in entry["files"]}
    elsewhere = tmp_path / "other_run"
    assert set(save(twin, elsewhere)["files"]) == {path.name for path in elsewhere.iterdir()}


def test_save_ignores_files_after_checkpoint(tmp_path: Path) -> None:
    buffer = counter_buffer(12)
    entry = save(buffer, tmp_path)
    extend(buffer, 12)
    save(buffer, tmp_path)  # chunk 1 is in the folder; the run then restores the first checkpoint
    twin = counter_buffer(0)
    twin.restore(tmp_path, entry)
    extend(twin, 12, episode=3)  # and collects different rows
    again = counter_buffer(0)
    again.restore(tmp_path, save(twin, tmp_path))
    assert same_rows(again, twin) and not same_rows(again, buffer)


def test_restore_with_another_chunk_size(tmp_path: Path) -> None:
    buffer = counter_buffer(50)
    twin = counter_buffer(0, chunk_rows=5)
    twin.restore(tmp_path, save(buffer, tmp_path))
    again = counter_buffer(0)
    again.restore(tmp_path, save(twin, tmp_path))
    assert same_rows(buffer, again)


def test_added_columns(tmp_path: Path) -> None:
    buffer = counter_buffer(20, mutable=())
    buffer.add_column("code", ArraySpec((), "int16"))
    buffer.write(8, {"code": torch.ones(2, 4, dtype=torch.int16)})
    entry = save(buffer, tmp_path)
    assert set(save(buffer, tmp_path)["files"]) == set(entry["files"])
    buffer.write(0, {"code": torch.ones(2, 1, dtype=torch.int16)})
    changed = set(save(buffer, tmp_path)["files"]) - set(entry["files"])
    assert changed == {"mutable-00000000-00000003.pt"}
    twin = counter_buffer(0, mutable=())
    twin.restore(tmp_path, entry)
    assert twin.read(0, 20)["code"].sum() == 8 and twin.columns["code"] == ArraySpec((), "int16")


def test_layout_mismatch_errors(tmp_path: Path) -> None:
    entry = save(counter_buffer(20), tmp_path)
    with pytest.raises(CheckpointError, match="capacity 64, but this run's config asks for 80"):
        counter_buffer(0, per_stream=40).restore(tmp_path, entry)
    with pytest.raises(CheckpointError, match="num_streams 2, but this run's config asks for 4"):
        counter_buffer(0, num_streams=4, per_stream=16).restore(tmp_path, entry)
    columns = {**COLUMNS, "action": ArraySpec((5,), "float32"), "depth": ArraySpec((), "float32")}
    other = ReplayBuffer(columns, capacity=64, num_streams=2)
    with pytest.raises(
        CheckpointError, match=r"'action' is float32 \(5,\) in this run and float32 \(2,\) in the stored data"
    ) as error:
        other.restore(tmp_path, entry)
    assert "'depth' is float32 () in this run and absent in the stored data" in str(error.value)
    with pytest.raises(CheckpointError, match="format 99"):
        counter_buffer(0).restore(tmp_path, {**entry, "meta": {**entry["meta"], "format": 99}})


@pytest.mark.parametrize("damage", ["missing", "short", "garbage", "wrong rows", "other file", "path"])
def test_damaged_file_errors(tmp_path: Path, damage: str) -> None:
    entry = save(counter_buffer(20), tmp_path)
    name = "chunk-00000001.pt"
    path = tmp_path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        path.write_bytes(content[:-40])
    elif damage == "garbage":
        path.write_bytes(b"\x80\x04" + bytes(len(content) - 2))
    elif damage == "wrong rows":
        torch.save({"start": 8, "columns": {"reward": torch.zeros(2, 3)}}, path)
        entry["files"][name]["bytes"] = path.stat().st_size
    elif damage == "other file":
        path.write_bytes((tmp_path / "chunk-00000000.pt").read_bytes())
        entry["files"][name]["bytes"] = path.stat().st_size
    elif damage == "path":
        entry["meta"]["parts"]["fixed"][1][0] = "../chunk-00000001.pt"
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        counter_buffer(0).restore(tmp_path, entry)


def test_incomplete_file_list_error(tmp_path: Path) -> None:
    entry = save(counter_buffer(20), tmp_path)
    entry["meta"]["parts"]["fixed"].pop(0)
    with pytest.raises(CheckpointError, match="do not hold all of the 20 rows"):
        counter_buffer(0).restore(tmp_path, entry)


def test_pickled_objects_are_refused(tmp_path: Path) -> None:
    entry = save(counter_buffer(20), tmp_path)
    path = tmp_path / "chunk-00000000.pt"
    torch.save({"start": 0, "columns": {"reward": Path("/")}}, path)  # an object that is not plain data
    entry["files"][path.name]["bytes"] = path.stat().st_size
    with pytest.raises(CheckpointError, match="cannot be read"):
        counter_buffer(0).restore(tmp_path, entry)
