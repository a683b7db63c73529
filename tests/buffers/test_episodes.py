"""Episodes on disk: what is stored, the budget, memory that stays bounded, write-backs, and what is refused."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from episode_reference import COLUMNS, add_episodes, episode_buffer, everything, rows_of, seeded
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.episodes import recovery as compression
from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.buffers.episodes.reader import size_of
from rl_lab.buffers.mix import BufferMix
from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.errors import ConfigError, LabError, MissingPackageError, RunLockedError
from rl_lab.records import ArraySpec, BatchSpec, RowIndex
from rl_lab.utils.install import install_line

WITHIN = BatchSpec(size=8, length=5, boundary="within")


def single_rows(buffer: EpisodeBuffer, lengths: list[int]) -> None:
    """One vector step at a time, as the Collector adds them."""
    for length in lengths:
        for step in range(length):
            counts = np.full((1, 1), buffer.total_rows)
            rows = rows_of(counts, np.full((1, 1), step == 0), np.full((1, 1), step == length - 1))
            buffer.add({name: value[:, 0] for name, value in rows.items()})


def test_rows_one_by_one_or_many_at_once_are_the_same(tmp_path: Path) -> None:
    one, many = (episode_buffer(tmp_path / name, num_streams=1) for name in ("one", "many"))
    single_rows(one, [3, 9, 1, 6])
    add_episodes(many, [3, 9, 1, 6])
    assert (
        everything(one)
        == everything(many)
        == {0: [0, 1, 2], 1: list(range(3, 12)), 2: [12], 3: list(range(13, 19))}
    )
    assert one._store.table.column("reward").tolist() == [1.5, 31.5, 6.0, 46.5]


def test_a_restarted_environment_cuts_its_episode_off(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1)
    first = np.zeros((1, 9), bool)
    first[0, [0, 4]] = True  # row 4 begins anew, though row 3 was no end
    ended = np.zeros((1, 9), bool)
    ended[0, 8] = True
    buffer.add(rows_of(np.arange(9)[None], first, ended))
    assert everything(buffer) == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7, 8]}
    assert buffer._store.table.ended().tolist() == [False, True]
    batch = buffer.sample(
        BatchSpec(size=50, length=6), generator=seeded()
    )  # across the cut, which is_first marks
    assert (batch["obs/count"].diff(dim=1) == 1).all()
    assert torch.equal(batch.is_first, (batch["obs/count"] == 0) | (batch["obs/count"] == 4))


def test_sampling_is_that_of_replay_where_both_can(tmp_path: Path) -> None:
    """The same rows, the same generator: uniform draws over the same starts, and fresh ones in the same order."""
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


def test_open_episodes_count_or_do_not(tmp_path: Path) -> None:
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


# ---------------------------------------------------------------- the budget


def test_the_oldest_episodes_go_first_and_rows_stay_below_capacity(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=50, chunk_bytes=600)
    for turn in range(40):
        add_episodes(buffer, [7 + turn % 5])
        assert (buffer.size <= 50 and buffer.size + 7 + (turn + 1) % 5 > 50) or turn < 8
        numbers = buffer._store.table.numbers().tolist()
        assert numbers == list(range(numbers[0], turn + 1))
    named = {f"chunk-{chunk:08d}.episodes" for chunk in buffer._store.table.column("chunk").tolist()}
    assert {path.name for path in tmp_path.glob("chunk-*")} == named  # chunks without an episode are gone
    assert len(everything(buffer)) == buffer.episodes


@pytest.mark.parametrize("compression", ["none", "zlib"])
def test_files_stay_below_max_bytes(tmp_path: Path, compression: str) -> None:
    buffer = episode_buffer(
        tmp_path, num_streams=1, max_bytes=8000, compression=compression, chunk_bytes=1 << 20
    )
    for turn in range(80):
        add_episodes(buffer, [5 + turn * 7 % 20])
        on_disk = sum(path.stat().st_size for path in tmp_path.glob("chunk-*"))
        assert on_disk == buffer.disk_bytes <= 8000
    assert buffer.disk_bytes > 4000 and buffer.episodes > 3  # and most of it is used
    assert len(everything(buffer)) == buffer.episodes


def test_one_episode_is_kept_however_large(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=5)
    add_episodes(buffer, [3, 30])
    assert list(everything(buffer)) == [1] and buffer.size == 30
    add_episodes(buffer, [4])
    assert list(everything(buffer)) == [2]


def test_which_episodes_go_does_not_depend_on_where_chunks_begin(tmp_path: Path) -> None:
    plain, sealed = (episode_buffer(tmp_path / n, num_streams=1, max_bytes=6000) for n in ("plain", "sealed"))
    for turn in range(50):
        for buffer in (plain, sealed):
            add_episodes(buffer, [4 + turn % 9])
        sealed._store.seal()  # as every checkpoint does
        assert everything(plain) == everything(sealed)
    assert len(list((tmp_path / "sealed").glob("chunk-*"))) > len(list((tmp_path / "plain").glob("chunk-*")))


# ---------------------------------------------------------------- memory


def test_the_cache_stays_within_its_bytes(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, cache_bytes=20_000, mutable=())
    add_episodes(buffer, [30] * 10)
    generator = seeded()
    for _ in range(30):
        buffer.sample(WITHIN, generator=generator)
        assert 0 < buffer._cache.nbytes <= 20_000
    keys = set(buffer._cache)
    assert buffer._cache.nbytes == sum(size_of(buffer._cache.get(key)) for key in keys)


def test_many_chunks_are_read_with_few_open_files(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, chunk_bytes=1, cache_bytes=0)
    add_episodes(buffer, [6] * 100)
    assert len(list(tmp_path.glob("chunk-*"))) == 100
    for seed in range(20):
        buffer.sample(BatchSpec(size=32, length=5, boundary="within"), generator=seeded(seed))
    assert len(buffer._store._reader._files) <= 64


def test_threads_read_the_same(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, cache_bytes=0)
    add_episodes(buffer, [20] * 10)
    expected = buffer.sample(WITHIN, generator=seeded(1))
    buffer.close()
    threaded = episode_buffer(tmp_path, num_streams=1, cache_bytes=0, readers=3)
    assert torch.equal(threaded.sample(WITHIN, generator=seeded(1))["obs/count"], expected["obs/count"])
    threaded.close()


# ---------------------------------------------------------------- write-backs


def test_written_back_columns_are_read_again(tmp_path: Path) -> None:
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
    add_episodes(buffer, [3])  # the open one is closed, with what was written back
    everywhere = buffer.sample(BatchSpec(size=1, length=29), generator=_first_start())
    for t, count in enumerate(everywhere["obs/count"][0].tolist()):
        assert everywhere["latent"][0, t].float().tolist() == expected.get(count, [count % 128] * 3)


def _first_start() -> torch.Generator:
    """A generator whose first draw below a small number is 0."""
    for seed in range(1000):
        if int(torch.randint(4, (1,), generator=seeded(seed))) == 0:
            return seeded(seed)
    raise AssertionError


def test_late_and_padded_write_backs_hit_nothing(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, capacity=20)
    add_episodes(buffer, [6, 6, 6])
    pad = BatchSpec(size=32, length=10, boundary="pad", pad="both")
    batch = buffer.sample(pad, generator=seeded())
    assert not batch.mask.all()
    buffer.write_back(batch.index, {"latent": torch.full((32, 10, 3), 7.0)}, offset=0)
    again = buffer.sample(pad, generator=seeded())
    assert torch.equal(again.mask, batch.mask)
    assert (again["latent"][again.mask] == 7).all() and not again["latent"][~again.mask].any()
    add_episodes(buffer, [6, 6, 6])  # everything drawn has been deleted
    buffer.write_back(batch.index, {"latent": torch.full((32, 10, 3), 9.0)}, offset=0)
    assert (buffer.sample(WITHIN, generator=seeded())["latent"] != 9).all()


def test_write_backs_beyond_their_bytes_are_forgotten(tmp_path: Path) -> None:
    buffer = episode_buffer(tmp_path, num_streams=1, written_bytes=2000)
    add_episodes(buffer, [40])
    index = RowIndex(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    buffer.write_back(index, {"latent": torch.full((1, 40, 3), 5.0)}, offset=0)
    assert 0 < buffer._written.nbytes <= 2000
    rows = buffer.sample(BatchSpec(size=1, length=40), generator=seeded())
    assert rows["latent"][0, -8:].eq(5).all() and rows["latent"][0, 1].tolist() == [1.0] * 3


# ---------------------------------------------------------------- as part of the lab


def test_streams_and_mixes_take_it_like_any_buffer(tmp_path: Path) -> None:
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
        ahead.ahead()
    ahead.settle()  # a batch that nobody took is not counted
    ours, its = (buffer._sampler(s.spec).counts.stored().sum() for s in (ahead, twin))
    assert ours == its == 40


def test_shipped_configs_build_buffers(tmp_path: Path) -> None:
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


def test_what_it_cannot_do_is_said(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"no sampler 'epsodes'.*Did you mean 'episodes'"):
        buffer.ready(BatchSpec(size=2, length=3, sampler="epsodes:world_model"))
    with pytest.raises(ConfigError, match="use boundary 'within' or 'pad'"):
        buffer.ready(BatchSpec(size=2, length=3, sampler="episodes"))
    with pytest.raises(ConfigError, match="lacks column 'reward'"):
        buffer.add(
            {
                name: value
                for name, value in rows_of([[1], [1]], [[True]] * 2, [[True]] * 2).items()
                if name != "reward"
            }
        )
    with pytest.raises(ConfigError, match="needs a folder"):
        EpisodeBuffer(COLUMNS, num_streams=1)
    with pytest.raises(ConfigError, match="capacity above 0"):
        episode_buffer(tmp_path / "b", capacity=0)
    with pytest.raises(ConfigError, match="Did you mean 'zstd'"):
        episode_buffer(tmp_path / "b", compression="zst")
    with pytest.raises(RunLockedError, match="already working in"):
        episode_buffer(tmp_path / "a")
    buffer.close()
    other = {**COLUMNS, "reward": ArraySpec((2,), "float32")}
    with pytest.raises(ConfigError, match=r"'reward' is float32 \(2,\) here and float32 \(\) there"):
        EpisodeBuffer(other, num_streams=2, folder=tmp_path / "a")
    episode_buffer(tmp_path / "a").close()  # refused attempts left no lock behind


def test_replay_says_what_only_episodes_can(tmp_path: Path) -> None:
    replay = ReplayBuffer(COLUMNS, capacity=64, num_streams=1)
    with pytest.raises(ConfigError, match="buffer=episodes"):
        replay.ready(BatchSpec(size=2, length=3, boundary="pad", pad="both"))


def test_without_zstd_zlib_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = episode_buffer(tmp_path / "zstd", compression="zstd", num_streams=1)
    add_episodes(packed, [9])
    packed.close()
    monkeypatch.setattr(compression, "_zstd_module", lambda: "")
    buffer = episode_buffer(tmp_path / "zlib", num_streams=1)
    add_episodes(buffer, [9])
    assert buffer._store.compression == "zlib" and everything(buffer) == {0: list(range(9))}
    with pytest.raises(MissingPackageError, match="zstandard: " + re.escape(install_line("zstd"))):
        episode_buffer(tmp_path / "other", compression="zstd")
    with pytest.raises(MissingPackageError, match="packed with zstd"):
        everything(episode_buffer(tmp_path / "zstd", num_streams=1))


def test_a_full_disk_ends_the_run_and_loses_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = episode_buffer(tmp_path / "a", num_streams=1)
    add_episodes(buffer, [9, 5])
    real = buffer._store._chunk

    class Full:
        """A file that takes a few bytes more, and then no others."""

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

        def write(self, data: bytes) -> int:
            if len(data) > 7:
                return real.write(data[:7])
            raise OSError(28, "No space left on device")

    size = real.seek(0, 2)
    monkeypatch.setattr(buffer._store, "_chunk", Full())
    with pytest.raises(LabError, match=r"No space left on device.*max_bytes"):
        add_episodes(buffer, [12])
    assert real.seek(0, 2) == size
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert len(everything(episode_buffer(tmp_path / "b", num_streams=1))) == 2


def test_benchmark_gives_its_rows(tmp_path: Path) -> None:
    path = CONFIG_FOLDER.parents[1] / "benchmarks" / "episodes.py"
    module_spec = importlib.util.spec_from_file_location("bench_episodes", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    rows = module.run(["--rows", "60000", "--batches", "3", "--folder", str(tmp_path)])
    values = {row["name"]: row["value"] for row in rows}
    assert values["episodes/stored_rows"] > 30_000 and values["episodes/rows_lost_by_kill"] < 20_800
    assert values["episodes/sample_32x21_batches_per_s"] > 0 and values["episodes/rss_sampling_mb"] > 0
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
