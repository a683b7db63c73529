"""EpisodeBuffer: stored rows, limits of disk and memory, write-backs, errors."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.episodes import recovery as compression
from rl_lab.buffers.episodes import store as episode_store
from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.buffers.episodes.reader import size_of
from rl_lab.buffers.mix import BufferMix
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.errors import ConfigError, LabError, MissingPackageError, RunLockedError, install_line
from rl_lab.records import ArraySpec, BatchSpec, RowIndex
from tests.buffers.episodes.reference import (
    COLUMNS,
    add_episodes,
    episode_buffer,
    everything,
    rows_of,
    seeded,
)

WITHIN = BatchSpec(size=8, length=5, boundary="within")


def single_rows(buffer: EpisodeBuffer, lengths: list[int]) -> None:
    """One vector step at a time, as the Collector adds them."""
    for length in lengths:
        for step in range(length):
            counts = np.full((1, 1), buffer.total_rows)
            rows = rows_of(counts, np.full((1, 1), step == 0), np.full((1, 1), step == length - 1))
            buffer.add({name: value[:, 0] for name, value in rows.items()})


def test_add_single_and_many_rows(tmp_path: Path) -> None:
    one, many = (episode_buffer(tmp_path / name, num_streams=1) for name in ("one", "many"))
    single_rows(one, [3, 9, 1, 6])
    add_episodes(many, [3, 9, 1, 6])
    assert (
        everything(one)
        == everything(many)
        == {0: [0, 1, 2], 1: list(range(3, 12)), 2: [12], 3: list(range(13, 19))}
    )
    assert one._store.table.column("reward").tolist() == [1.5, 31.5, 6.0, 46.5]


def test_reset_without_end_closes_episode(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    first = np.zeros((1, 9), bool)
    first[0, [0, 4]] = True  # row 4 is first, though row 3 is not an end
    ended = np.zeros((1, 9), bool)
    ended[0, 8] = True
    buffer.add(rows_of(np.arange(9)[None], first, ended))
    assert everything(buffer) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7, 8]}
    assert buffer._store.table.ended().tolist() == [False, True]
    batch = buffer.sample(
        BatchSpec(size=50, length=6), generator=seeded()
    )  # across the reset, which is_first marks
    assert (batch["obs/count"].diff(dim=1) == 1).all()
    assert torch.equal(batch.is_first, (batch["obs/count"] == 0) | (batch["obs/count"] == 4))


def test_sampling_matches_replay(tmp_path: Path) -> None:
    """With the same rows and generator, both buffers draw the same uniform and online sequences."""
    episodes = episode_buffer(tmp_path, num_streams=1)
    replay = ReplayBuffer(COLUMNS, capacity=60, num_streams=1, mutable=("latent",))
    cross = BatchSpec(size=8, length=4, context=1)
    online = BatchSpec(size=4, length=4, context=1, sampler="online")
    for buffer in (episodes, replay):
        buffer.make_batch(online)
    generators = seeded(5), seeded(5)
    for length in (7, 3, 12, 9):
        start = episodes.total_rows
        first, ended = np.zeros((1, length), bool), np.zeros((1, length), bool)
        first[0, 0] = ended[0, -1] = True
        rows = rows_of(np.arange(start, start + length)[None], first, ended)
        for buffer in (episodes, replay):
            buffer.add(rows)
        for spec in (online, cross):
            ours, its = (b.sample(spec, generator=g) for b, g in zip((episodes, replay), generators))
            assert all(torch.equal(ours[name], its[name]) for name in its)
            assert torch.equal(ours.index.position, its.index.position)


def test_open_episodes_option(tmp_path: Path) -> None:
    for count in (True, False):
        buffer = episode_buffer(tmp_path / str(count), num_streams=1, open_episodes=count)
        add_episodes(buffer, [9], end=False)
        assert buffer.ready(WITHIN) == count and buffer.size == 9
        if not count:
            assert "1 open ones, and open ones do not count" in buffer.shortage(WITHIN)
            with pytest.raises(ConfigError, match="nothing to sample"):
                buffer.sample(WITHIN, generator=seeded())


def test_long_episodes_are_stored_in_parts(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, max_episode_rows=10)
    add_episodes(buffer, [27])
    assert [len(counts) for counts in everything(buffer).values()] == [10, 10, 7]
    assert buffer._store.table.ended().tolist() == [False, False, True]
    batch = buffer.sample(BatchSpec(size=64, length=15), generator=seeded())  # across the parts
    assert (batch["obs/count"].diff(dim=1) == 1).all()
    assert batch.is_first[batch["obs/count"] > 0].sum() == 0
    with pytest.raises(ConfigError, match="max_episode_rows"):
        episode_buffer(tmp_path / "none", max_episode_rows=0)


# ---------------------------------------------------------------- limits


def test_capacity_evicts_oldest(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=50, chunk_bytes=600)
    for turn in range(40):
        add_episodes(buffer, [7 + turn % 5])
        assert (buffer.size <= 50 and buffer.size + 7 + (turn + 1) % 5 > 50) or turn < 8
        numbers = buffer._store.table.numbers().tolist()
        assert numbers == list(range(numbers[0], turn + 1))
    named = {f"chunk-{chunk:08d}.episodes" for chunk in buffer._store.table.column("chunk").tolist()}
    assert {path.name for path in tmp_path.glob("chunk-*")} == named  # chunks without an episode are deleted
    assert len(everything(buffer)) == buffer.episodes


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_max_bytes(tmp_path: Path, compression: str) -> None:
    buffer = episode_buffer(
        tmp_path, num_streams=1, max_bytes=8000, compression=compression, chunk_bytes=1 << 20
    )
    for turn in range(80):
        add_episodes(buffer, [5 + turn * 7 % 20])
        on_disk = sum(path.stat().st_size for path in tmp_path.glob("chunk-*"))
        assert on_disk == buffer.disk_bytes <= 8000
    assert buffer.disk_bytes > 4000 and buffer.episodes > 3  # and most of it is used
    assert len(everything(buffer)) == buffer.episodes


def test_last_episode_is_kept(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=5)
    add_episodes(buffer, [3, 30])
    assert list(everything(buffer)) == [1] and buffer.size == 30
    add_episodes(buffer, [4])
    assert list(everything(buffer)) == [2]


def test_eviction_ignores_chunk_boundaries(tmp_path: Path) -> None:
    plain, sealed = (episode_buffer(tmp_path / n, num_streams=1, max_bytes=6000) for n in ("plain", "sealed"))
    for turn in range(50):
        for buffer in (plain, sealed):
            add_episodes(buffer, [4 + turn % 9])
        sealed._store.seal()  # as every checkpoint does
        assert everything(plain) == everything(sealed)
    assert len(list((tmp_path / "sealed").glob("chunk-*"))) > len(list((tmp_path / "plain").glob("chunk-*")))


# ---------------------------------------------------------------- memory


def test_cache_size(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, cache_bytes=20_000, mutable=())
    add_episodes(buffer, [30] * 10)
    generator = seeded()
    for _ in range(30):
        buffer.sample(WITHIN, generator=generator)
        assert 0 < buffer._cache.nbytes <= 20_000
    keys = set(buffer._cache)
    assert buffer._cache.nbytes == sum(size_of(buffer._cache.get(key)) for key in keys)


def test_number_of_open_files(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, chunk_bytes=1, cache_bytes=0)
    add_episodes(buffer, [6] * 100)
    assert len(list(tmp_path.glob("chunk-*"))) == 100
    for seed in range(20):
        buffer.sample(BatchSpec(size=32, length=5, boundary="within"), generator=seeded(seed))
    assert len(buffer._store._reader._files) <= 64


def test_reader_threads(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, cache_bytes=0)
    add_episodes(buffer, [20] * 10)
    expected = buffer.sample(WITHIN, generator=seeded(1))
    buffer.close()
    threaded = episode_buffer(tmp_path, num_streams=1, cache_bytes=0, readers=3)
    assert torch.equal(threaded.sample(WITHIN, generator=seeded(1))["obs/count"], expected["obs/count"])
    threaded.close()


# ---------------------------------------------------------------- write-backs


def test_write_back(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    add_episodes(buffer, [20])
    add_episodes(buffer, [9], end=False)  # one on disk, one open: write-backs to both
    spec = BatchSpec(size=6, length=5, context=1)
    generator, expected = seeded(2), {}
    for turn in range(30):
        batch = buffer.sample(spec, generator=generator)
        for b in range(6):
            for t in range(6):
                count = int(batch["obs/count"][b, t])
                assert batch["latent"][b, t].float().tolist() == expected.get(count, [count % 128] * 3)
        value = torch.full((6, 5, 3), float(turn))
        buffer.write_back(batch.index, {"latent": value}, offset=1)
        expected |= {int(c): [float(turn)] * 3 for c in batch["obs/count"][:, 1:].flatten()}
    add_episodes(buffer, [3])  # the open episode is closed with its written columns
    everywhere = buffer.sample(BatchSpec(size=1, length=29), generator=_first_start())
    for t, count in enumerate(everywhere["obs/count"][0].tolist()):
        assert everywhere["latent"][0, t].float().tolist() == expected.get(count, [count % 128] * 3)


def _first_start() -> torch.Generator:
    """Return a generator whose first randint(4) is 0."""
    for seed in range(1000):
        if int(torch.randint(4, (1,), generator=seeded(seed))) == 0:
            return seeded(seed)
    raise AssertionError


def test_write_back_skips_deleted_rows_and_padding(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=20)
    add_episodes(buffer, [6, 6, 6])
    pad = BatchSpec(size=32, length=10, boundary="pad", pad="both")
    batch = buffer.sample(pad, generator=seeded())
    assert not batch.mask.all()
    buffer.write_back(batch.index, {"latent": torch.full((32, 10, 3), 7.0)}, offset=0)
    again = buffer.sample(pad, generator=seeded())
    assert torch.equal(again.mask, batch.mask)
    assert (again["latent"][again.mask] == 7).all() and not again["latent"][~again.mask].any()
    add_episodes(buffer, [6, 6, 6])  # all drawn rows are deleted
    buffer.write_back(batch.index, {"latent": torch.full((32, 10, 3), 9.0)}, offset=0)
    assert (buffer.sample(WITHIN, generator=seeded())["latent"] != 9).all()


def test_written_bytes_limit(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, written_bytes=2000)
    add_episodes(buffer, [40])
    index = RowIndex(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    buffer.write_back(index, {"latent": torch.full((1, 40, 3), 5.0)}, offset=0)
    assert 0 < buffer._written.nbytes <= 2000
    rows = buffer.sample(BatchSpec(size=1, length=40), generator=seeded())
    assert rows["latent"][0, -8:].eq(5).all() and rows["latent"][0, 1].tolist() == [1.0] * 3


# ---------------------------------------------------------------- integration and errors


def test_stream_and_mix(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    add_episodes(buffer, [12] * 5)
    replay = ReplayBuffer(COLUMNS, capacity=64, num_streams=1, mutable=("latent",))
    replay.add(rows_of(np.arange(5000, 5060)[None], np.zeros((1, 60), bool), np.zeros((1, 60), bool)))
    spec = BatchSpec(size=8, length=4, sampler="uniform")
    mix = BufferMix({"a": (buffer, 3), "b": (replay, 1)})
    batch = mix.sample(spec, generator=seeded())
    assert (batch["obs/count"][:6] < 60).all() and (batch["obs/count"][6:] >= 5000).all()
    assert "episodes on disk" in mix.describe() and mix.nbytes > 0
    counted = BatchSpec(size=8, length=4, boundary="within", sampler="episodes")
    ahead = BatchStream(buffer, counted, seeded(3), prefetch=1)
    twin = BatchStream(buffer, BatchSpec(**{**vars(counted), "sampler": "episodes:twin"}), seeded(3))
    for _ in range(5):
        assert torch.equal(ahead.next()["obs/count"], twin.next()["obs/count"])
        ahead.prefetch_next()
    ahead.drop_prefetched()  # a dropped batch is not counted
    ours, its = (buffer._sampler(s.spec).counts.stored().sum() for s in (ahead, twin))
    assert ours == its == 40


def test_config_builds_buffer(tmp_path: Path) -> None:
    config = OmegaConf.load(CONFIG_FOLDER / "buffer" / "episodes.yaml")
    buffer = instantiate(config, columns=COLUMNS, num_streams=4, home=tmp_path, _convert_="object")
    assert buffer.capacity == 10_000_000 and buffer.folder == tmp_path
    assert buffer.describe().startswith(f"episodes on disk in {tmp_path} (")
    config.samplers.episodes.alpha = 3.0
    config.folder = str(tmp_path / "other")
    changed = instantiate(config, columns=COLUMNS, num_streams=4, _convert_="object")
    add_episodes(changed, [9, 9])
    sampler = changed._sampler(BatchSpec(size=2, length=4, boundary="within", sampler="episodes:x"))
    assert sampler._alpha == 3.0


def test_errors(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path / "a")
    for call in (
        lambda: buffer.read(0, 1),
        lambda: buffer.write(0, {}),
        lambda: buffer.add_column("code", ArraySpec((), "int64")),
    ):
        with pytest.raises(LabError, match="buffer=world_model_sequence or buffer=disk"):
            call()
    add_episodes(buffer, [9])
    index = buffer.sample(WITHIN, generator=seeded()).index
    with pytest.raises(ConfigError, match=r"'priority' cannot be changed.*buffer=prioritized"):
        buffer.write_back(index, {"priority": torch.zeros(8, 1)}, offset=0)
    with pytest.raises(ConfigError, match=r"sampler 'epsodes' does not exist.*Did you mean 'episodes'"):
        buffer.ready(BatchSpec(size=2, length=3, sampler="epsodes:world_model"))
    with pytest.raises(ConfigError, match="use boundary 'within' or 'pad'"):
        buffer.ready(BatchSpec(size=2, length=3, sampler="episodes"))
    with pytest.raises(ConfigError, match="column 'reward' is missing"):
        buffer.add(
            {
                name: value
                for name, value in rows_of([[1], [1]], [[True]] * 2, [[True]] * 2).items()
                if name != "reward"
            }
        )
    with pytest.raises(ConfigError, match="folder is missing"):
        EpisodeBuffer(COLUMNS, num_streams=1)
    with pytest.raises(ConfigError, match="capacity must be above 0"):
        episode_buffer(tmp_path / "b", capacity=0)
    with pytest.raises(ConfigError, match="Did you mean 'zstd'"):
        episode_buffer(tmp_path / "b", compression="zst")
    with pytest.raises(RunLockedError, match="is in use by"):
        episode_buffer(tmp_path / "a")
    buffer.close()
    other = {**COLUMNS, "reward": ArraySpec((2,), "float32")}
    with pytest.raises(
        ConfigError, match=r"'reward' is float32 \(2,\) in this run and float32 \(\) in the stored"
    ):
        EpisodeBuffer(other, num_streams=2, folder=tmp_path / "a")
    episode_buffer(tmp_path / "a").close()  # failed attempts leave no lock


def test_replay_refuses_pad_both(tmp_path: Path) -> None:
    replay = ReplayBuffer(COLUMNS, capacity=64, num_streams=1)
    with pytest.raises(ConfigError, match="buffer=episodes"):
        replay.ready(BatchSpec(size=2, length=3, boundary="pad", pad="both"))


def test_zlib_without_zstd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = episode_buffer(tmp_path / "zstd", compression="zstd", num_streams=1)
    add_episodes(packed, [9])
    packed.close()
    monkeypatch.setattr(compression, "_zstd_module", lambda: "")
    buffer = episode_buffer(tmp_path / "zlib", num_streams=1)
    add_episodes(buffer, [9])
    assert buffer._store.compression == "zlib" and everything(buffer) == {0: list(range(9))}
    with pytest.raises(MissingPackageError, match="zstandard: " + re.escape(install_line("zstd"))):
        episode_buffer(tmp_path / "other", compression="zstd")
    with pytest.raises(MissingPackageError, match="compressed with zstd"):
        everything(episode_buffer(tmp_path / "zstd", num_streams=1))


def test_full_disk_keeps_written_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = episode_buffer(tmp_path / "a", num_streams=1)
    add_episodes(buffer, [9, 5])
    real = buffer._store._chunk

    class Full:
        """A file that accepts a few bytes and then raises."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            if len(data) > 7:
                return real.write(data[:7])
            raise OSError(28, "No space left on device")

    size = real.seek(0, 2)
    monkeypatch.setattr(buffer._store, "_chunk", Full())
    monkeypatch.setattr(episode_store, "ROOM_TIMEOUT_S", 0.0)
    with pytest.raises(LabError, match=r"No space left on device.*max_bytes"):
        add_episodes(buffer, [12])
    assert real.seek(0, 2) == size
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(everything(episode_buffer(tmp_path / "b", num_streams=1))) == 2


def test_disk_that_is_full_for_a_while_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = episode_buffer(tmp_path / "a", num_streams=1)
    add_episodes(buffer, [9])
    real, calls = buffer._store._chunk, []

    class FullForAWhile:
        """Takes half of the data and raises, three times."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            calls.append(len(data))
            if len(calls) <= 6 and len(calls) % 2 == 0:
                raise OSError(28, "No space left on device")
            return real.write(data[: len(data) // 2] if len(calls) <= 6 else data)

    monkeypatch.setattr(buffer._store, "_chunk", FullForAWhile())
    monkeypatch.setattr(episode_store, "ROOM_POLL_S", 0.01)
    with pytest.warns(UserWarning, match="the disk is full; waiting up to 60 s"):
        add_episodes(buffer, [5])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    undisturbed = episode_buffer(tmp_path / "c", num_streams=1)
    add_episodes(undisturbed, [9])
    add_episodes(undisturbed, [5])
    assert len(calls) == 7
    assert len(everything(episode_buffer(tmp_path / "b", num_streams=1))) == len(everything(undisturbed)) == 2


def test_benchmark_rows(tmp_path: Path) -> None:
    path = CONFIG_FOLDER.parents[1] / "benchmarks" / "episodes.py"
    module_spec = importlib.util.spec_from_file_location("bench_episodes", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    rows = module.run(["--rows", "60000", "--batches", "3", "--folder", str(tmp_path)])
    values = {row["name"]: row["value"] for row in rows}
    assert values["episodes/stored_rows"] > 30_000 and values["episodes/rows_lost_by_kill"] < 20_800
    assert values["episodes/sample_32x21_batches_per_s"] > 0 and values["episodes/rss_sampling_mb"] > 0
    assert list(tmp_path.iterdir()) == []  # no files are left
