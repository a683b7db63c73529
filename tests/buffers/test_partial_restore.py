"""Partial restore of a damaged checkpoint: intact rows are restored, no sequence crosses a gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.buffers.prioritized import PrioritizedReplay
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.errors import CheckpointError
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, RowIndex, Spec
from tests.buffers.buffer_helpers import COLUMNS, counter_buffer, counter_rows, extend, seeded
from tests.buffers.test_chunk_files import save


def damage(path: Path, how: str = "flip") -> None:
    content = bytearray(path.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 1
    path.write_bytes(content if how == "flip" else content[:-30])
    if how == "missing":
        path.unlink()


def counts(buffer: ReplayBuffer) -> list[list[int]]:
    held = buffer.total_rows - buffer.oldest_position
    return buffer.read(buffer.oldest_position, held)["obs/count"].tolist()


def firsts(buffer: ReplayBuffer) -> list[int]:
    """Return the counts of the rows of stream 0 with is_first."""
    rows = buffer.read(buffer.oldest_position, buffer.total_rows - buffer.oldest_position)
    return rows["obs/count"][0][rows.is_first[0]].tolist()


@pytest.mark.parametrize("how", ["flip", "short", "missing"])
def test_rows_around_lost_file_are_restored(tmp_path: Path, how: str) -> None:
    buffer = counter_buffer(30)  # files of 0 … 8, 8 … 16, 16 … 24, 24 … 30
    entry = save(buffer, tmp_path)
    damage(tmp_path / "chunk-00000001.pt", how)
    twin = counter_buffer(0)
    lost = twin.restore(tmp_path, entry, skip_corrupt=True)
    assert [(item.file, item.rows) for item in lost] == [("chunk-00000001.pt", 16)]
    assert "chunk-00000001.pt (16 rows)" in str(lost[0])
    kept = [*range(8), *range(16, 30)]
    assert counts(twin) == [kept, [1000 + n for n in kept]]
    assert firsts(twin) == [0, 16]  # the row after the gap is first
    assert twin.size == 44 and twin.oldest_position == 32  # positions that were never used


def test_no_sequence_crosses_gap(tmp_path: Path) -> None:
    buffer = counter_buffer(30)
    entry = save(buffer, tmp_path)
    damage(tmp_path / "chunk-00000001.pt")
    twin = counter_buffer(0)
    twin.restore(tmp_path, entry, skip_corrupt=True)
    within = twin.sample(BatchSpec(size=200, length=5, boundary="within"), generator=seeded())
    assert (within["obs/count"].diff(dim=1) == 1).all()
    assert twin._sampler(BatchSpec(size=1, length=5, boundary="within")).available() == 2 * (4 + 10)
    cross = twin.sample(BatchSpec(size=200, length=5), generator=seeded())
    jumps = cross["obs/count"].diff(dim=1) != 1
    assert jumps.any() and cross.is_first[:, 1:][jumps].all()  # is_first marks the jumps
    extend(twin, 25)  # past the end of the ring
    spec = BatchSpec(size=1, length=5, boundary="within")
    assert twin._sampler(spec).available() == len(twin.ring.unbroken_starts(5)[0])


def test_lost_mutable_file_loses_rows(tmp_path: Path) -> None:
    entry = save(counter_buffer(20), tmp_path)
    name = next(file for file in entry["files"] if file.startswith("mutable-00000000"))
    damage(tmp_path / name)
    twin = counter_buffer(0)
    assert [item.file for item in twin.restore(tmp_path, entry, skip_corrupt=True)] == [name]
    assert counts(twin)[0] == list(range(8, 20)) and firsts(twin) == [8]


def test_row_after_lost_newest_rows_is_first(tmp_path: Path) -> None:
    entry = save(counter_buffer(20), tmp_path)
    damage(tmp_path / "tail-000000000020.pt")
    twin = counter_buffer(0)
    twin.restore(tmp_path, entry, skip_corrupt=True)
    again = counter_buffer(0)  # the gap is saved in a later checkpoint
    again.restore(tmp_path / "next", save(twin, tmp_path / "next"))
    for each in (twin, again):
        rows = counter_rows(2, 20)
        assert not rows["is_first"].any()
        each.add(rows)
        each.add(counter_rows(2, 21))
        assert counts(each)[0] == [*range(16), 20, 21] and firsts(each) == [0, 20]
        assert not rows["is_first"].any()  # the caller's array is not changed


def test_all_files_lost(tmp_path: Path) -> None:
    entry = save(counter_buffer(20), tmp_path)
    for name in entry["files"]:
        damage(tmp_path / name)
    twin = counter_buffer(0)
    assert len(twin.restore(tmp_path, entry, skip_corrupt=True)) == 6
    spec = BatchSpec(size=2, length=3, boundary="within")
    assert twin.size == 0 and not twin.ready(spec)
    extend(twin, 5)
    assert twin.size == 10 and twin.ready(spec)
    assert (twin.sample(spec, generator=seeded())["obs/count"].diff(dim=1) == 1).all()


def test_later_saves_overwrite_nothing(tmp_path: Path) -> None:
    entry = save(counter_buffer(45, episode=7), tmp_path)  # a full ring: 13 … 45
    damage(tmp_path / "chunk-00000003.pt")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    twin = counter_buffer(0)
    twin.restore(tmp_path, entry, skip_corrupt=True)
    extend(twin, 3)
    entry = save(twin, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    again = counter_buffer(0)
    assert again.restore(tmp_path, entry) == []
    assert counts(again) == counts(twin) and firsts(again) == firsts(twin)
    spec = BatchSpec(size=32, length=4, boundary="within")
    for _ in range(10):
        for each in (twin, again):
            extend(each, 5, episode=7)
        ours, its = (each.sample(spec, generator=seeded(3)) for each in (twin, again))
        assert torch.equal(ours["obs/count"], its["obs/count"])


def test_gap_without_is_first_column(tmp_path: Path) -> None:
    columns = {"obs/count": ArraySpec((), "int64")}

    def make() -> ReplayBuffer:
        return ReplayBuffer(columns, capacity=40, num_streams=1, chunk_rows=8)

    buffer = make()
    buffer.add({"obs/count": np.arange(30)[None]})
    entry = save(buffer, tmp_path)
    damage(tmp_path / "chunk-00000001.pt")
    twin = make()
    twin.restore(tmp_path, entry, skip_corrupt=True)
    assert counts(twin) == [list(range(16, 30))]


def test_intact_files_restore_normally(tmp_path: Path) -> None:
    buffer = counter_buffer(45, episode=7)
    entry = save(buffer, tmp_path)
    twin = counter_buffer(0)
    assert twin.restore(tmp_path, entry, skip_corrupt=True) == []
    assert (twin.total_rows, twin.oldest_position) == (45, 13) and counts(twin) == counts(buffer)
    damage(tmp_path / "chunk-00000003.pt", "short")
    with pytest.raises(CheckpointError, match=r"chunk-00000003\.pt"):
        counter_buffer(0).restore(tmp_path, entry)


def test_offline_buffer_loses_only_write_backs(tmp_path: Path) -> None:
    count = np.arange(31.0)
    content = {
        "observations": np.stack([count, count], axis=1),
        "actions": np.zeros(30, dtype=np.int64),
        "rewards": np.ones(30),
        "dones": np.arange(30) == 29,
    }
    np.savez(tmp_path / "episode.npz", **content)
    spec = Spec("toy", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (), choices=(3,)))
    columns = {**spec.row_columns(), "latent": ArraySpec((3,), "bfloat16")}

    def make() -> OfflineBuffer:
        path = tmp_path / "episode.npz"
        return OfflineBuffer(columns, path=path, spec=spec, mutable=["latent"], chunk_rows=8)

    buffer, folder = make(), tmp_path / "saved"
    buffer.write(0, {"latent": torch.ones(1, 31, 3)})
    entry = save(buffer, folder)
    damage(folder / "mutable-00000001-00000001.pt")
    twin = make()
    assert [item.rows for item in twin.restore(folder, entry, skip_corrupt=True)] == [8]
    rows = twin.read(0, 31)
    assert rows["latent"][0, :, 0].tolist() == [1.0] * 8 + [0.0] * 8 + [1.0] * 15
    assert rows.obs["vector"][0, :, 0].tolist() == count.tolist() and rows.is_first.sum() == 1
    damage(folder / "mutable-00000002-00000001.pt", "short")
    with pytest.raises(CheckpointError, match="mutable-00000002"):
        make().restore(folder, entry)


def test_priorities_are_rebuilt_around_gap(tmp_path: Path) -> None:
    def make() -> PrioritizedReplay:
        return PrioritizedReplay(COLUMNS, capacity=64, num_streams=2, mutable=("latent",), chunk_rows=8)

    buffer: Any = make()
    extend(buffer, 30)
    index = RowIndex(torch.tensor([0, 1]), torch.tensor([18, 18]))
    buffer.write_back(
        index, {"priority": torch.full((2, 1), 1e6)}, offset=0
    )  # row 18 of both streams is almost always drawn
    entry = save(buffer, tmp_path)
    damage(tmp_path / "chunk-00000001.pt")
    twin = make()
    twin.restore(tmp_path, entry, skip_corrupt=True)
    spec = BatchSpec(size=100, length=4, boundary="within", sampler="prioritized")
    batch = twin.sample(spec, generator=seeded())
    assert (batch["obs/count"].diff(dim=1) == 1).all()
    assert (batch["obs/count"][:, 0] % 1000 == 18).float().mean() > 0.9
