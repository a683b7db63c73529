"""Checkpoints of EpisodeBuffer: exact resume, hard links, damaged files."""

from __future__ import annotations

import io
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rl_lab
from rl_lab.buffers.episodes import checkpoint as episode_checkpoint
from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.errors import CheckpointError
from rl_lab.records import ArraySpec, BatchSpec
from rl_lab.training import resume
from rl_lab.utils.checkpoint.manager import CheckpointManager
from tests.buffers.episodes.reference import (
    COLUMNS,
    add_episodes,
    episode_buffer,
    everything,
    rows_of,
    seeded,
)
from tests.same_run import assert_same, stopped_at

SPECS = [
    BatchSpec(size=4, length=5, context=1, sampler="online"),
    BatchSpec(size=4, length=4, boundary="within", sampler="episodes:a"),
    BatchSpec(size=4, length=4, boundary="pad", pad="both", sampler="episodes:b"),
    BatchSpec(size=4, length=4, boundary="pad", pad="left", sampler="ends"),
]


def save(buffer: EpisodeBuffer, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Save a checkpoint and check its files; return the entry and the samplers' state after a round trip."""
    entry = json.loads(json.dumps(buffer.checkpoint(folder)))
    for name, info in entry["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), zlib.crc32(content)) == (info["bytes"], info["crc32"])
    stored = io.BytesIO()
    torch.save(buffer.get_state(), stored)
    stored.seek(0)
    return entry, torch.load(stored, weights_only=True)


def live(buffer: EpisodeBuffer, generator: torch.Generator, turn: int) -> list[Any]:
    """Add rows, draw a batch of each kind and write back. returns: everything that was drawn"""
    rng = np.random.default_rng(turn)
    n, start = buffer.num_streams, buffer.total_rows
    counts = 1000 * np.arange(n)[:, None] + np.arange(start, start + 9)
    ended = rng.random((n, 9)) < 0.15
    first = np.concatenate([np.full((n, 1), turn == 0), ended[:, :-1]], axis=1) | (rng.random((n, 9)) < 0.05)
    buffer.add(rows_of(counts, first, ended))
    drawn: list[Any] = []
    for spec in SPECS:
        if buffer.ready(spec):
            batch = buffer.sample(spec, generator=generator)
            drawn += [value.clone() for value in batch.columns.values()]
            drawn += [batch.index.stream.clone(), batch.index.position.clone()]
            drawn += [] if batch.mask is None else [batch.mask.clone()]
            latent = torch.rand(4, spec.length, 3, generator=generator)
            buffer.write_back(batch.index, {"latent": latent}, offset=spec.context)
    return drawn


@pytest.mark.parametrize("options", [{}, {"capacity": 60}, {"max_bytes": 5000}, {"cache_bytes": 0}], ids=str)
def test_restored_buffer_matches_original(tmp_path: Path, options: dict[str, Any]) -> None:
    buffer, generator = episode_buffer(tmp_path / "one", **options), seeded(1)
    for spec in SPECS:
        buffer.make_batch(spec)
    for turn in range(12):
        live(buffer, generator, turn)
    entry, state = save(buffer, tmp_path / "checkpoint")
    twin, again = episode_buffer(tmp_path / "two", **options), seeded()
    again.set_state(generator.get_state())
    assert twin.restore(tmp_path / "checkpoint", entry) == []
    twin.set_state(state)
    for turn in range(12, 24):
        ours, its = live(buffer, generator, turn), live(twin, again, turn)
        assert len(ours) > 20 and len(ours) == len(its)
        assert all(torch.equal(a, b) for a, b in zip(ours, its))
    assert everything(buffer) == everything(twin)
    assert_same(buffer.get_state(), twin.get_state())


def test_restore_deletes_later_episodes(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path / "live", num_streams=1)
    add_episodes(buffer, [9, 4])
    entry, _ = save(buffer, tmp_path / "checkpoint")
    add_episodes(buffer, [7, 7])
    save(buffer, tmp_path / "checkpoint")
    buffer.restore(tmp_path / "checkpoint", entry)
    assert list(everything(buffer)) == [0, 1]
    add_episodes(buffer, [3])  # different episodes, in files with other names
    again, _ = save(buffer, tmp_path / "checkpoint")
    assert everything(buffer)[2] == [13, 14, 15]
    twin = episode_buffer(tmp_path / "twin", num_streams=1)
    twin.restore(tmp_path / "checkpoint", again)
    assert everything(twin) == everything(buffer)
    buffer.close()
    reopened = episode_buffer(tmp_path / "live", num_streams=1)
    assert everything(reopened) == everything(twin)


def test_chunks_are_hard_links(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path / "live", num_streams=1, capacity=20, chunk_bytes=1)
    add_episodes(buffer, [9, 9])
    entry, _ = save(buffer, tmp_path / "checkpoint")
    chunks = [name for name in entry["files"] if name.startswith("chunk-")]
    assert len(chunks) == 2
    assert all((tmp_path / "live" / n).samefile(tmp_path / "checkpoint" / n) for n in chunks)
    add_episodes(buffer, [9, 9])  # the first two are deleted from the buffer
    assert not any((tmp_path / "live" / name).exists() for name in chunks)
    twin = episode_buffer(tmp_path / "twin", num_streams=1, capacity=20)
    twin.restore(tmp_path / "checkpoint", entry)
    assert everything(twin) == {0: list(range(9)), 1: list(range(9, 18))}


def test_copy_to_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(episode_checkpoint.os, "link", refuse)
    buffer = episode_buffer(tmp_path / "live", num_streams=1)
    add_episodes(buffer, [9, 9])
    entry, _ = save(buffer, tmp_path / "checkpoint")
    twin = episode_buffer(tmp_path / "twin", num_streams=1)
    twin.restore(tmp_path / "checkpoint", entry)
    assert everything(twin) == everything(buffer)
    assert (tmp_path / "checkpoint" / "chunk-00000000.episodes").stat().st_nlink == 1


def test_episodes_after_checkpoint_are_ignored(tmp_path: Path) -> None:
    """In the run's own folder only a checkpoint defines the episodes."""

    def start() -> EpisodeBuffer:
        return EpisodeBuffer(COLUMNS, num_streams=1, home=tmp_path / "home")

    buffer = start()
    add_episodes(buffer, [9])
    entry, _ = save(buffer, tmp_path / "checkpoint")
    add_episodes(buffer, [5])
    buffer.close()
    fresh = start()  # no checkpoint is restored: it is empty
    assert fresh.size == 0 and not fresh.ready(SPECS[0])
    fresh.close()
    resumed = start()
    resumed.restore(tmp_path / "checkpoint", entry)
    assert everything(resumed) == {0: list(range(9))}
    resumed.close()
    other = start()
    add_episodes(other, [4])
    assert everything(other) == {0: list(range(4))}
    other.close()
    assert len(list((tmp_path / "home").glob("chunk-*"))) == 1
    changed = {**COLUMNS, "reward": ArraySpec((2,), "float32")}  # of a run with another config
    EpisodeBuffer(changed, num_streams=1, home=tmp_path / "home").close()
    start().close()


# ---------------------------------------------------------------- damage


def damaged_checkpoint(folder: Path, name: str, how: str) -> tuple[dict[str, Any], dict[int, list[int]]]:
    buffer = episode_buffer(folder / "live", num_streams=1, chunk_bytes=700)
    add_episodes(buffer, [9, 8, 14, 7, 6])
    add_episodes(buffer, [5], end=False)
    entry, _ = save(buffer, folder / "checkpoint")
    content = everything(buffer)
    path = folder / "checkpoint" / name
    shutil.copy(path, folder / "copy")
    os.replace(folder / "copy", path)  # no longer a hard link to the buffer's file
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[len(data) // 2] ^= 1
    path.write_bytes(data if how == "flip" else data[:-5])
    if how == "missing":
        path.unlink()
    buffer.close()
    return entry, content


@pytest.mark.parametrize("how", ["flip", "short", "missing"])
@pytest.mark.parametrize("name", ["chunk-00000001.episodes", "index-00000001.log", "memory-00000001.pt"])
def test_damaged_files(tmp_path: Path, name: str, how: str) -> None:
    entry, content = damaged_checkpoint(tmp_path, name, how)
    if how != "flip":  # a flipped byte is found by the manager's checksum, or when the row is read
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            episode_buffer(tmp_path / "strict", num_streams=1).restore(tmp_path / "checkpoint", entry)
    twin = episode_buffer(tmp_path / "twin", num_streams=1)
    lost = twin.restore(tmp_path / "checkpoint", entry, skip_corrupt=True)
    kept = everything(twin)
    assert all(content[number] == counts for number, counts in kept.items())
    missing = sum(len(counts) for number, counts in content.items() if number not in kept)
    if name.startswith("index"):
        assert kept == content and lost == []
    elif name.startswith("memory"):
        assert kept == content and [item.rows for item in lost] == [5] and twin.size == 44
    else:
        assert [item.rows for item in lost] == [missing] and lost[0].episodes == 5 - len(kept)
        assert 0 < missing < 44 and "episodes with" in str(lost[0])
    assert twin._store.table.end == 5
    batch = twin.sample(BatchSpec(size=64, length=6), generator=seeded())  # no episode continues across a gap
    assert (batch["obs/count"].diff(dim=1) == 1).all()
    add_episodes(twin, [4])
    again, _ = save(twin, tmp_path / "next")
    other = episode_buffer(tmp_path / "other", num_streams=1)
    other.restore(tmp_path / "next", again)
    assert everything(other) == everything(twin)


def test_mismatch_errors(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path / "live")
    add_episodes(buffer, [9])
    entry, _ = save(buffer, tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="of 2 environments, but this run's config asks for 3"):
        episode_buffer(tmp_path / "three", num_streams=3).restore(tmp_path / "checkpoint", entry)
    for change, words in (({"kind": "other"}, "not a buffer of episodes"), ({"format": 9}, "format 9")):
        with pytest.raises(CheckpointError, match=words):
            episode_buffer(tmp_path / words).restore(
                tmp_path / "checkpoint", {**entry, "meta": {**entry["meta"], **change}}
            )
    outside = {**entry, "files": {**entry["files"], "../chunk-00000009.episodes": {"bytes": 1, "crc32": 1}}}
    with pytest.raises(CheckpointError, match="list of files"):
        episode_buffer(tmp_path / "outside").restore(tmp_path / "checkpoint", outside)


def test_restore_with_another_block_size(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path / "live", num_streams=1)
    add_episodes(buffer, [19])
    entry, _ = save(buffer, tmp_path / "checkpoint")
    twin = episode_buffer(tmp_path / "twin", num_streams=1, block_rows=7)
    twin.restore(tmp_path / "checkpoint", entry)
    add_episodes(twin, [11])
    assert everything(twin) == {0: list(range(19)), 1: list(range(19, 30))}
    twin.close()
    assert len(everything(episode_buffer(tmp_path / "twin", num_streams=1, block_rows=7))) == 2


# ---------------------------------------------------------------- a run

WORDS = [
    "experiment=dreamer_cartpole",
    "debug=tiny",
    "buffer=episodes",
    "buffers.replay.capacity=40",
    "environment.time_limit=12",
    "training.total_timesteps=100",
    "logging.progress=off",
    "logging.tensorboard=false",
]


def test_resumed_run_matches_uninterrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rl_lab.train(None, [*WORDS, f"run_dir={tmp_path / 'whole'}"])
    with stopped_at(monkeypatch):
        assert rl_lab.train(None, [*WORDS, f"run_dir={tmp_path / 'half'}"]).interrupted
    shutil.rmtree(tmp_path / "half" / "buffers")  # only the checkpoint is left
    resume(tmp_path / "half")
    whole, half = (CheckpointManager(tmp_path / name / "checkpoints").load() for name in ("whole", "half"))
    assert_same(whole.state, half.state)
    rows = []
    for loaded in (whole, half):
        entry = loaded.manifest["buffers"]["replay"]
        folder = loaded.folder / "replay" / "replay"
        memory = torch.load(folder / entry["meta"]["memory"], weights_only=True)
        twin = EpisodeBuffer(
            _columns(entry), num_streams=2, folder=tmp_path / f"open{len(rows)}", mutable=("deter", "stoch")
        )
        twin.restore(folder, entry)
        numbers = twin._store.table.numbers().tolist()
        blocks = [twin._store.read([(number, 0)])[0] for number in numbers]
        rows.append(
            (numbers, memory, [{k: torch.from_numpy(v.copy()) for k, v in b.items()} for b in blocks])
        )
        assert twin._store.table.first > 0  # some episodes were evicted
    assert_same(*rows)


def _columns(entry: dict[str, Any]) -> dict[str, Any]:
    from rl_lab.buffers.row_layout import RowLayout

    return RowLayout.from_dict(entry["meta"]["layout"]).columns
