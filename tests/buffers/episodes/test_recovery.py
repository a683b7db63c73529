"""A folder of episodes opens after a crash or damage: intact episodes are used, lost ones reported once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.buffers.episodes.table import EpisodeRecord, pack, read_log
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import BatchSpec
from tests.buffers.episodes.reference import add_episodes, episode_buffer, everything, rows_of, seeded

LENGTHS = [9, 3, 14, 1, 6]
WITHIN = BatchSpec(size=16, length=3, boundary="within")


def killed(folder: Path, lengths: list[int] = LENGTHS, **options: Any) -> dict[int, list[int]]:
    """Create a folder as a killed process leaves it, with nothing closed or sealed. returns: its content"""
    buffer = episode_buffer(folder, num_streams=1, **options)
    add_episodes(buffer, lengths)
    content = everything(buffer)
    buffer._store.stop_writing()
    buffer._store._lock.release()
    return content


def reopen(folder: Path, **options: Any) -> tuple[EpisodeBuffer, list[str]]:
    reported: list[str] = []
    return episode_buffer(folder, num_streams=1, on_warning=reported.append, **options), reported


def check_continues(buffer: EpisodeBuffer, content: dict[int, list[int]]) -> None:
    """Check that new episodes follow the old ones, and that both are found after reopening."""
    folder, start = buffer.folder, buffer.total_rows
    add_episodes(buffer, [4])
    content = {**content, buffer._store.table.end - 1: list(range(start, start + 4))}
    assert everything(buffer) == content
    buffer.close()
    again, reported = reopen(folder)
    assert everything(again) == content and reported == []
    again.close()


def records_in(data: bytes) -> list[int]:
    """Return the start of each record of an index, and the end of the last one."""
    positions, position = [], 0
    for record in read_log(data)[0]:
        positions.append(position)
        position += len(pack(record))
    return [*positions, position]


def test_truncated_index_loses_nothing(tmp_path: Path) -> None:
    content = killed(tmp_path / "live")
    data = (tmp_path / "live" / "index.log").read_bytes()
    borders = records_in(data)
    assert borders[-1] == len(data) and len(borders) == 7  # FirstKept and five episodes
    cuts = sorted(
        {*borders, *(b + 1 for b in borders[:-1]), *(b - 1 for b in borders[1:]), *range(5, len(data), 37)}
    )
    for cut in cuts:
        folder = tmp_path / f"cut{cut}"
        shutil.copytree(tmp_path / "live", folder)
        os.truncate(folder / "index.log", cut)
        buffer, reported = reopen(folder)
        assert everything(buffer) == content  # found in the chunk
        assert len(reported) == (0 if cut in borders[1:] else 1)
        if reported and cut:
            assert f"index.log was cut at byte {max(b for b in borders if b <= cut)}" in reported[0]
        check_continues(buffer, content)
        shutil.rmtree(folder)


def test_truncated_chunk_keeps_complete_episodes(tmp_path: Path) -> None:
    content = killed(tmp_path / "live")
    chunk = tmp_path / "live" / "chunk-00000000.episodes"
    episodes = [
        r for r in read_log((tmp_path / "live" / "index.log").read_bytes())[0] if isinstance(r, EpisodeRecord)
    ]
    ends = [episode.offset + episode.size for episode in episodes]
    assert ends[-1] == chunk.stat().st_size
    cuts = sorted(
        {0, *ends, *(end - 1 for end in ends), *(end + 3 for end in ends[:-1]), *range(7, ends[-1], 41)}
    )
    for cut in cuts:
        for with_index in (True, False):  # the index may be complete or missing
            folder = tmp_path / f"cut{cut}{with_index}"
            shutil.copytree(tmp_path / "live", folder)
            os.truncate(folder / chunk.name, cut)
            if not with_index:
                (folder / "index.log").unlink()
            kept = {number: counts for (number, counts), end in zip(content.items(), ends) if end <= cut}
            buffer, reported = reopen(folder)
            assert everything(buffer) == kept
            lost, rows = 5 - len(kept), sum(LENGTHS) - sum(map(len, kept.values()))
            if with_index and lost:
                assert f"{chunk.name} ({lost:,} episodes with {rows:,} rows) is cut off: lost" in " ".join(
                    reported
                )
            if not with_index and cut and cut not in ends:
                assert "was being written when the process ended; it is lost" in " ".join(reported)
            start = buffer.total_rows
            add_episodes(buffer, [4])
            assert list(everything(buffer).values()) == [*kept.values(), list(range(start, start + 4))]
            buffer.close()
            again, reported = reopen(folder)
            assert reported == [] and len(everything(again)) == len(kept) + 1
            again.close()
            shutil.rmtree(folder)


@pytest.mark.parametrize("found", ["on open", "while sampling"])
def test_flipped_byte_loses_one_episode(tmp_path: Path, found: str) -> None:
    content = killed(tmp_path / "live", [9, 8, 14, 7, 6])
    buffer, _ = reopen(tmp_path / "live")
    buffer.close()  # sealed now
    path = tmp_path / "live" / "chunk-00000000.episodes"
    record = next(
        r
        for r in read_log((tmp_path / "live" / "index.log").read_bytes())[0]
        if isinstance(r, EpisodeRecord) and r.number == 2
    )
    for at in (0, record.blocks[0][0], sum(size for size, _ in record.blocks) - 1):
        folder = tmp_path / f"flip{at}"
        shutil.copytree(tmp_path / "live", folder)
        data = bytearray(path.read_bytes())
        data[record.offset + record.head_size + at] ^= 0x10
        (folder / path.name).write_bytes(data)
        buffer, reported = reopen(folder, verify=found == "on open", cache_bytes=0)
        for seed in range(20):
            batch = buffer.sample(WITHIN, generator=seeded(seed))
            assert (batch["obs/count"].diff(dim=1) == 1).all()
        assert len(reported) == 1 and f"{path.name} (1 episodes with 14 rows) has changed" in reported[0]
        kept = {number: counts for number, counts in content.items() if number != 2}
        assert everything(buffer) == kept
        check_continues(buffer, kept)


def test_all_episodes_lost(tmp_path: Path) -> None:
    killed(tmp_path, [9])
    buffer, reported = reopen(tmp_path)
    buffer.close()
    path = tmp_path / "chunk-00000000.episodes"
    path.write_bytes(bytes(path.stat().st_size))
    buffer, reported = reopen(tmp_path)
    with pytest.raises(ConfigError, match="nothing to sample: the buffer holds 0 rows"):
        buffer.sample(WITHIN, generator=seeded())
    assert len(reported) == 1 and "1 episodes with 9 rows" in reported[0]


def test_damaged_chunk_is_renamed(tmp_path: Path) -> None:
    content = killed(tmp_path, [9, 8, 7], chunk_bytes=1)
    path = tmp_path / "chunk-00000001.episodes"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    buffer, reported = reopen(tmp_path, verify=True)
    assert len(reported) == 1 and "1 episodes with 8 rows" in reported[0]
    kept = {n: c for n, c in content.items() if n != 1}
    assert everything(buffer) == kept
    assert not path.exists() and path.with_name(path.name + ".damaged").exists()
    check_continues(buffer, kept)


def test_missing_files_are_reported(tmp_path: Path) -> None:
    content = killed(tmp_path, [9, 8, 7, 6], chunk_bytes=1)
    (tmp_path / "chunk-00000002.episodes").unlink()
    buffer, reported = reopen(tmp_path, chunk_bytes=1)
    kept = {n: c for n, c in content.items() if n != 2}
    assert everything(buffer) == kept
    assert (
        len(reported) == 1
        and "chunk-00000002.episodes (1 episodes with 7 rows) is missing: lost" in reported[0]
    )
    check_continues(buffer, kept)
    (tmp_path / "index.log").unlink()
    buffer, reported = reopen(tmp_path)
    assert len(reported) == 1 and "is missing and was rebuilt" in reported[0]
    assert [c for c in everything(buffer).values() if c in kept.values()] == list(kept.values())
    buffer.close()
    layout = (tmp_path / "layout.json").read_text()
    for damaged in ('{"format": 1}', layout.replace('"block_rows": 4', '"block_rows": 5'), layout[:-9]):
        (tmp_path / "layout.json").write_text(damaged)
        with pytest.raises(ConfigError, match=r"layout\.json cannot be read"):
            reopen(tmp_path)


def test_damaged_index_keeps_episodes_deleted(tmp_path: Path) -> None:
    content = killed(tmp_path, [9] * 12, capacity=40, chunk_bytes=1)
    assert list(content) == [8, 9, 10, 11]
    data = bytearray((tmp_path / "index.log").read_bytes())
    data[records_in(bytes(data))[6] + 9] ^= 1  # in the record of a deleted episode
    (tmp_path / "index.log").write_bytes(data)
    buffer, reported = reopen(tmp_path, capacity=40)
    assert everything(buffer) == content
    assert len(reported) == 1 and "was cut at byte" in reported[0]


def test_unused_chunk_is_deleted(tmp_path: Path) -> None:
    content = killed(tmp_path, [9] * 6, capacity=40, chunk_bytes=1)
    shutil.copy(tmp_path / "chunk-00000005.episodes", tmp_path / "chunk-00000000.episodes")  # not yet deleted
    buffer, reported = reopen(tmp_path, capacity=40)
    assert everything(buffer) == content and reported == []
    assert not (tmp_path / "chunk-00000000.episodes").exists()


def test_index_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_lab.buffers.episodes.store.SPARE_RECORDS", 20)
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=40)
    for _ in range(30):
        add_episodes(buffer, [4] * 10)
        assert len(read_log((tmp_path / "index.log").read_bytes())[0]) < 60
    content = everything(buffer)
    buffer.close()
    again, reported = reopen(tmp_path, capacity=40)
    assert everything(again) == content and reported == []


WRITER = """
import sys
import numpy as np
from tests.buffers.episodes.reference import episode_buffer, rows_of
buffer = episode_buffer(sys.argv[1], num_streams=3, chunk_bytes=20000, capacity=4000)
row = 0
while True:
    counts = 1000000 * np.arange(3)[:, None] + np.arange(row, row + 50)
    ended = np.random.default_rng(row).random((3, 50)) < 0.05
    first = np.roll(ended, 1, axis=1)
    buffer.add(rows_of(counts, first, ended))
    row += 50
    print(row, flush=True)
"""


def test_kill_9_while_writing(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    written = 0
    while written < 3000:
        written = int(process.stdout.readline())
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait()
    written = int(rest[-1]) if rest else written
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = episode_buffer(tmp_path, num_streams=3, capacity=4000)
    held = everything(buffer)
    assert buffer.total_rows >= written - 300  # all except the open episodes, of twenty rows on average
    for counts in held.values():
        assert counts == list(range(counts[0], counts[0] + len(counts)))
    batch = buffer.sample(BatchSpec(size=64, length=30), generator=seeded())
    steps = batch["obs/count"].diff(dim=1)
    assert (steps == 1).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_damage_never_gives_wrong_rows(data: st.DataObject) -> None:
    """With any bytes changed, removed or added, sampled rows are correct or a LabError is raised."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "live"
        killed(folder, [5, 9, 2, 12, 7], chunk_bytes=600)
        for _ in range(data.draw(st.integers(1, 3), "damages")):
            file = data.draw(st.sampled_from(sorted(path.name for path in folder.iterdir())), "file")
            content = bytearray((folder / file).read_bytes())
            at = data.draw(st.integers(0, max(0, len(content) - 1)), "at")
            how = data.draw(st.sampled_from(["flip", "cut", "zero", "more"]), "how")
            if how == "flip" and content:
                content[at] ^= data.draw(st.integers(1, 255), "bits")
            elif how == "cut":
                content = content[:at]
            elif how == "zero":
                content[at : at + 20] = bytes(len(content[at : at + 20]))
            else:
                content += data.draw(st.binary(min_size=1, max_size=60), "bytes")
            (folder / file).write_bytes(content)
        try:
            buffer, _ = reopen(folder, cache_bytes=0)
            for seed in range(4):
                if buffer.ready(WITHIN):
                    batch = buffer.sample(WITHIN, generator=seeded(seed))
                    assert (batch["obs/count"].diff(dim=1) == 1).all()
                    assert (batch["obs/image"][..., 0, 0] == batch["obs/count"] % 251).all()
                    assert (batch.index.position[:, None] == batch["obs/count"][:, :1]).all()
            start = buffer.total_rows
            add_episodes(buffer, [6])
            newest = buffer._store.table.end - 1
            assert everything(buffer, [newest]) == {newest: list(range(start, start + 6))}
            buffer.close()
        except LabError:
            pass  # a clear error is allowed


def test_rows_after_reopening_start_new_episode(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    add_episodes(buffer, [6])
    add_episodes(buffer, [5], end=False)  # in memory only
    buffer.close()
    again = episode_buffer(tmp_path, num_streams=1)
    nothing = np.zeros((1, 5), bool)
    again.add(rows_of(np.arange(100, 105)[None], nothing, nothing))  # without is_first
    batch = again.sample(BatchSpec(size=64, length=4), generator=seeded())
    assert (batch["obs/count"].diff(dim=1) == 1).all()
