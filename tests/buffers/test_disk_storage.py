"""Rows in memory-mapped files behave like rows in memory, take disk space when written, and leave no files."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from rl_lab.buffers.replay import ReplayBuffer
from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.config.compose import compose_config
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import ArraySpec, Batch, BatchSpec
from tests.buffers.buffer_helpers import COLUMNS, assert_aligned, counter_buffer, extend, seeded

SPECS = [
    BatchSpec(size=8, length=5, context=1, sampler="online"),
    BatchSpec(size=8, length=5, boundary="within"),
    BatchSpec(size=8, length=5, boundary="pad", pad="left"),
]


def everything(buffer: ReplayBuffer) -> Batch:
    return buffer.read(buffer.oldest_position, buffer.total_rows - buffer.oldest_position)


def same(left: Batch, right: Batch) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.boundary)
def test_disk_matches_memory(spec: BatchSpec, tmp_path: Path) -> None:
    memory, disk = counter_buffer(0), counter_buffer(0, storage="disk", folder=tmp_path)
    mine, theirs = seeded(3), seeded(3)
    for turn in range(20):  # 60 rows in rings of 32
        extend(memory, 3, episode=7)
        extend(disk, 3, episode=7)
        if not all(
            [memory.ready(spec), disk.ready(spec)]
        ):  # both, because ready() creates the sampler and its queue
            continue
        ours, its = memory.sample(spec, generator=mine), disk.sample(spec, generator=theirs)
        assert_aligned(its)
        assert same(ours, its)
        for buffer, batch in ((memory, ours), (disk, its)):
            latent = torch.full((8, 5, 3), float(turn))
            buffer.write_back(batch.index, {"latent": latent}, offset=spec.context)
    assert same(everything(memory), everything(disk))
    assert disk.storage_device.type == "cpu" and disk.on_host


def test_checkpoints_are_interchangeable(tmp_path: Path) -> None:
    for source, target in (("host", "disk"), ("disk", "host")):
        folder = tmp_path / source
        saved = counter_buffer(45, episode=6, storage=source)
        saved.add_column("code", ArraySpec((2,), "int16"))
        saved.write(40, {"code": torch.full((2, 5, 2), 9, dtype=torch.int16)})
        restored = counter_buffer(3, storage=target)
        restored.restore(folder, saved.checkpoint(folder))
        assert same(everything(saved), everything(restored))
        extend(restored, 5, episode=6)
        extend(saved, 5, episode=6)
        assert same(everything(saved), everything(restored))


def test_files_are_sparse_and_temporary(tmp_path: Path) -> None:
    buffer = counter_buffer(0, per_stream=10_000_000, storage="disk", folder=tmp_path / "scratch")
    files = buffer._columns.files
    assert buffer.nbytes > 0.8e9
    assert files.used_bytes() < 100_000
    extend(buffer, 300)
    assert 300 * 2 * 20 < files.used_bytes() < 1_000_000
    buffer.add_column(
        "code", ArraySpec((1000,), "float32")
    )  # disk space for stored rows is reserved immediately
    assert files.used_bytes() > 512 * 2 * 4000
    assert list((tmp_path / "scratch").iterdir()) == []  # unnamed: a killed process leaves no files
    assert f"on disk in {tmp_path / 'scratch'}" in buffer.describe() and "are free there" in buffer.describe()


@pytest.mark.parametrize("can_reserve", [True, False])
def test_full_disk_error(monkeypatch: pytest.MonkeyPatch, can_reserve: bool) -> None:
    buffer = counter_buffer(0, per_stream=1000, storage="disk")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if not can_reserve:
        monkeypatch.delattr(os, "posix_fallocate")
    extend(buffer, 256)
    monkeypatch.setattr(os, "posix_fallocate" if can_reserve else "pwrite", full, raising=False)
    with pytest.raises(LabError, match=r"no space for more rows.*No space left on device.*resume"):
        extend(buffer, 1)
    assert buffer.total_rows == 256  # the stored rows can still be saved
    assert_aligned(buffer.sample(BatchSpec(size=4, length=8), generator=seeded()))
    monkeypatch.undo()
    extend(buffer, 10)
    assert_aligned(buffer.sample(BatchSpec(size=4, length=8), generator=seeded()))


def test_file_creation_errors(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be created \(.*set another folder"):
        counter_buffer(0, storage="disk", folder=blocked / "below")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(
            ConfigError,
            match=r"a file of .* GB for column 'obs/count' cannot be created.*lower the buffer's capacity",
        ):
            counter_buffer(0, per_stream=1000, storage="disk")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(ConfigError, match="folder is used only with storage: disk"):
        counter_buffer(0, storage="host", folder=tmp_path)


def test_config() -> None:
    path = CONFIG_FOLDER / "buffer" / "disk.yaml"
    first, comment, *_ = path.read_text().splitlines()
    assert first == "# @package buffers.replay" and comment.startswith("# ")
    config = compose_config(["experiment=random_cartpole", "buffer=disk"])
    assert config.buffers.replay.storage == "disk" and config.buffers.replay.capacity == 100_000
    buffer = instantiate(OmegaConf.load(path), columns=COLUMNS, num_streams=4, _convert_="object")
    assert isinstance(buffer, ReplayBuffer) and buffer.capacity == 10_000_000
