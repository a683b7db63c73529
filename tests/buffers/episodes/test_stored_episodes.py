"""Episodes of another run as training data, in memory (OfflineBuffer) or on disk (StoredEpisodes)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import rl_lab
from rl_lab.buffers.episodes.buffer import EpisodeBuffer, StoredEpisodes
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.errors import CheckpointError, ConfigError, LabError
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec
from rl_lab.training import resume
from tests.buffers.episodes.reference import seeded

SPEC = Spec("toy", {"vector": ArraySpec((2,), "float32")}, ActionSpec("discrete", (), choices=(3,)))
OTHER = Spec("other", SPEC.observations, ActionSpec("discrete", (), choices=(4,)))
LATENT = {"latent": ArraySpec((3,), "bfloat16")}
WITHIN = BatchSpec(size=16, length=4, boundary="within")


def rows(counts: np.ndarray, first: np.ndarray, ended: np.ndarray) -> dict[str, Any]:
    counts = counts.astype(np.float32)
    return {
        "obs/vector": np.stack([counts, -counts], axis=-1),
        "action": counts.astype(np.int64) % 3,
        "reward": np.where(first, 0, 1).astype(np.float32),
        "terminated": ended,
        "truncated": np.zeros_like(ended),
        "is_first": first,
    }


def write(folder: Path, **options: Any) -> EpisodeBuffer:
    """Two streams: episodes of 10 and 7 rows, with one open in each at the end."""
    buffer = EpisodeBuffer(
        SPEC.row_columns(), num_streams=2, spec=SPEC, folder=folder, block_rows=4, **options
    )
    counts = np.array([[0], [100]]) + np.arange(25)
    ended = np.stack([np.arange(25) % 10 == 9, np.arange(25) % 7 == 6])
    first = np.stack([np.arange(25) % 10 == 0, np.arange(25) % 7 == 0])
    buffer.add(rows(counts, first, ended))
    return buffer


def stored(path: Path, columns: dict[str, ArraySpec] | None = None, **options: Any) -> StoredEpisodes:
    wanted = {**SPEC.row_columns(), **LATENT} if columns is None else columns
    return StoredEpisodes(wanted, path=path, spec=SPEC, mutable=["latent"], **options)


def check_rows(buffer: OfflineBuffer, counts: list[int], firsts: list[int]) -> None:
    held = buffer.read(0, buffer.total_rows)
    assert held.obs["vector"][0, :, 0].tolist() == counts
    assert held.obs["vector"][0][held.is_first[0], 0].tolist() == firsts
    assert torch.equal(held.action[0], held.obs["vector"][0, :, 0].long() % 3)


def test_offline_from_buffer_folder(tmp_path: Path) -> None:
    write(tmp_path / "data").close()
    buffer = OfflineBuffer(SPEC.row_columns(), path=tmp_path / "data", spec=SPEC)
    check_rows(buffer, [*range(20), *range(100, 121)], [0, 10, 100, 107, 114])
    assert "5 episodes, 36 steps, return mean 7.2" in buffer.describe()
    with pytest.raises(ConfigError, match="use data of the same environment"):
        OfflineBuffer(OTHER.row_columns(), path=tmp_path / "data", spec=OTHER)


def test_offline_from_checkpoint_with_open_episodes(tmp_path: Path) -> None:
    source = write(tmp_path / "run" / "buffers" / "replay")
    from rl_lab.utils.checkpoint.manager import CheckpointManager

    manager = CheckpointManager(tmp_path / "run" / "checkpoints")
    manager.save(25, {"global_step": 25}, {"replay": source})
    source.close()
    shutil.rmtree(tmp_path / "run" / "buffers")
    for path in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_000000025.pt"):
        buffer = OfflineBuffer(SPEC.row_columns(), path=path, spec=SPEC)
        check_rows(
            buffer,
            [*range(20), *range(100, 121), *range(20, 25), *range(121, 125)],
            [0, 10, 100, 107, 114, 20, 121],
        )
    with pytest.raises(ConfigError, match="has no buffer 'demos'"):
        OfflineBuffer(SPEC.row_columns(), path=tmp_path / "run", spec=SPEC, buffer="demos")


def test_consecutive_parts_form_one_episode(tmp_path: Path) -> None:
    write(tmp_path / "data", max_episode_rows=4).close()
    buffer = OfflineBuffer(SPEC.row_columns(), path=tmp_path / "data", spec=SPEC)
    held = buffer.read(0, buffer.total_rows)
    assert held.obs["vector"][0][held.is_first[0], 0].tolist() == [0, 10, 20, 100, 107, 114, 121]


def test_damaged_episodes_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "data").close()
    path = tmp_path / "data" / "chunk-00000000.episodes"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1  # in the last episode
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"chunk-00000000\.episodes \(1 episodes with 7 rows\)"):
        buffer = OfflineBuffer(SPEC.row_columns(), path=tmp_path / "data", spec=SPEC)
    check_rows(buffer, [*range(20), *range(100, 114)], [0, 10, 100, 107])
    direct = stored(tmp_path / "data", cache_bytes=0)
    with pytest.warns(UserWarning, match="the other episodes are used"):
        for seed in range(20):
            batch = direct.sample(WITHIN, generator=seeded(seed))
            assert (batch.obs["vector"][..., 0].diff(dim=1) == 1).all()
    assert path.read_bytes() == content  # the data is not changed


def test_stored_episodes_are_read_in_place(tmp_path: Path) -> None:
    writer = write(tmp_path / "run" / "buffers" / "replay")  # it continues to write there
    for path in (tmp_path / "run", tmp_path / "run" / "buffers" / "replay"):
        buffer = stored(path)
        assert (buffer.episodes, buffer.size, buffer.read_only) == (5, 41, True)
        batch = buffer.sample(replace_sampler("episodes:model"), generator=seeded())
        assert (batch.obs["vector"][..., 0].diff(dim=1) == 1).all() and not batch["latent"].any()
    assert "latent begin as zeros" in buffer.describe() and "5 episodes, 41 rows" in buffer.describe()
    with pytest.raises(LabError, match="is read-only"):
        buffer.add({})
    writer.add(rows(np.array([[25], [125]]), np.zeros((2, 1), bool), np.ones((2, 1), bool)))
    assert buffer.episodes == 5 and stored(tmp_path / "run").episodes == 7


def replace_sampler(name: str) -> BatchSpec:
    return BatchSpec(size=16, length=4, boundary="within", sampler=name)


def test_checkpoint_holds_only_written_columns(tmp_path: Path) -> None:
    write(tmp_path / "data").close()
    buffer = stored(tmp_path / "data")
    batch = buffer.sample(WITHIN, generator=seeded(3))
    buffer.write_back(batch.index, {"latent": torch.full((16, 4, 3), 2.0)}, offset=0)
    entry = json.loads(json.dumps(buffer.checkpoint(tmp_path / "saved")))
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["memory-00000001.pt"]
    twin = stored(tmp_path / "data")
    assert twin.restore(tmp_path / "saved", entry) == []
    assert twin.sample(WITHIN, generator=seeded(3))["latent"].eq(2).all()
    (tmp_path / "saved" / "memory-00000001.pt").write_bytes(b"x")
    assert len(twin.restore(tmp_path / "saved", entry, skip_corrupt=True)) == 1
    assert not twin.sample(WITHIN, generator=seeded(3))["latent"].any()
    more = write(tmp_path / "data")
    more.close()
    with pytest.raises(CheckpointError, match="is not the data that this run was trained on"):
        stored(tmp_path / "data").restore(tmp_path / "saved", entry)


def test_mismatch_errors(tmp_path: Path) -> None:
    write(tmp_path / "data").close()
    with pytest.raises(ConfigError, match="of the same environment"):
        StoredEpisodes(OTHER.row_columns(), path=tmp_path / "data", spec=OTHER)
    image = Spec("pixels", {"image": ArraySpec((3, 8, 8), "uint8")}, SPEC.action)
    with pytest.raises(
        ConfigError, match=r"'obs/image' is absent in .*data, but uint8 \(3, 8, 8\) in pixels"
    ):
        StoredEpisodes(image.row_columns(), path=tmp_path / "data", spec=image)
    with pytest.raises(ConfigError, match=r"actions are .* in this run and .* in the stored data"):
        EpisodeBuffer(OTHER.row_columns(), num_streams=2, spec=OTHER, folder=tmp_path / "data")
    (tmp_path / "run" / "buffers").mkdir(parents=True)
    shutil.move(tmp_path / "data", tmp_path / "run" / "buffers" / "replay")
    with pytest.raises(ConfigError, match=r"no episodes of a buffer 'reply'.*Did you mean 'replay'"):
        stored(tmp_path / "run", buffer="reply")
    with pytest.raises(ConfigError, match="Use buffer=offline for other data"):
        stored(tmp_path)


def test_config_needs_path(tmp_path: Path) -> None:
    write(tmp_path / "data").close()
    config = OmegaConf.load(CONFIG_FOLDER / "buffer" / "offline_episodes.yaml")
    config.path = str(tmp_path / "data")
    buffer = instantiate(config, _convert_="all", _partial_=True)(columns=SPEC.row_columns(), spec=SPEC)
    assert buffer.episodes == 5 and buffer.ready(replace_sampler("ends"))


def test_train_and_resume(tmp_path: Path) -> None:
    quiet = ["debug=tiny", "logging.progress=off", "logging.tensorboard=false"]
    rl_lab.train(
        "random_cartpole",
        [*quiet, "buffer=episodes", "training.total_timesteps=60", f"run_dir={tmp_path / 'data'}"],
    )
    phase = (
        "training.phases=[{name: learn, type: offline, buffer: offline, duration_updates: 4,"
        " workflow_hooks: [update_world_model]}]"
    )
    words = [
        *quiet,
        "+buffer@buffers.offline=offline_episodes",
        f"buffers.offline.path={tmp_path / 'data'}",
        "algorithm.sampler=uniform",
        phase,
        f"run_dir={tmp_path / 'learned'}",
    ]
    assert rl_lab.train("dreamer_cartpole", words).counters["updates"] == 4
    assert resume(tmp_path / "learned").counters["updates"] == 4
