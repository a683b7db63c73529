"""Writing and reading a set of any length takes the same memory: four times as many rows, hardly a byte more."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from rl_lab.buffers.formats.dataset import FORMATS, create_dataset, open_dataset
from rl_lab.buffers.formats.episode import PlainEpisode
from rl_lab.buffers.formats.hdf5 import METADATA_CACHE, array_at, open_hdf5
from rl_lab.records import ActionSpec, ArraySpec, Spec

STEPS, WIDTH = 200, 64  # 270 bytes for each step
SPEC = Spec(
    "wide",
    {"vector": ArraySpec((WIDTH,), "float32")},
    ActionSpec("continuous", (2,), low=(-1.0,) * 2, high=(1.0,) * 2),
)
FEW, MANY = 100, 400  # episodes: 20,000 and 80,000 rows, 16 MB apart
POOLS: list[object] = []  # of pyarrow: buffers that are freed later, in garbage collection, still need them
EPISODE_BYTES = 1000  # that an episode may take in memory, of the 54,000 that it has


def episodes(count: int) -> Iterator[PlainEpisode]:
    random = np.random.default_rng(0)
    end = np.arange(STEPS) == STEPS - 1
    for _ in range(count):
        yield PlainEpisode(
            {"vector": random.standard_normal((STEPS + 1, WIDTH), dtype=np.float32)},
            random.uniform(-1, 1, (STEPS, 2)).astype(np.float32),
            random.random(STEPS, dtype=np.float32),
            np.zeros(STEPS, bool),
            end,
        )


def most_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that Python, NumPy and pyarrow held during a call, or since it set the peak back."""
    pyarrow = sys.modules.get("pyarrow")  # it has its own memory
    if pyarrow is not None:
        usual = pyarrow.default_memory_pool()
        pool = pyarrow.proxy_memory_pool(usual)  # counts from 0
        POOLS.append(pool)
        pyarrow.set_memory_pool(pool)
    tracemalloc.start(1)
    try:
        work()
        most = tracemalloc.get_traced_memory()[1]
        return most if pyarrow is None else most + pool.max_memory()
    finally:
        tracemalloc.stop()
        if pyarrow is not None:
            pyarrow.set_memory_pool(usual)


def write(path: Path, format: str, count: int) -> Path:
    with create_dataset(path, SPEC, format) as writer:
        for each in episodes(count):
            writer.add(each)
        return writer.finish()


def read(path: Path) -> None:
    with open_dataset(path) as data:
        tracemalloc.reset_peak()  # files are opened with buffers as large as they may be, which are not filled
        for _ in data:
            pass
        data.episode(0)


@pytest.mark.parametrize(
    "format",
    [
        pytest.param(name, marks=[pytest.mark.extras] if name == "lerobot" else [])
        for name, each in FORMATS.items()
        if each.writable
    ],
)
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, format: str) -> None:
    package = FORMATS[format].package
    if package:
        pytest.importorskip(package, reason=f"not run: needs {package}")
    write(tmp_path / "first", format, 2)  # imports are not counted
    written, taken = {}, {}
    for count in (FEW, MANY):
        written[count] = most_bytes(partial(write, tmp_path / str(count), format, count))
        taken[count] = most_bytes(partial(read, next(tmp_path.glob(f"{count}*"))))
    limit = (MANY - FEW) * EPISODE_BYTES
    assert written[MANY] - written[FEW] < limit
    assert taken[MANY] - taken[FEW] < limit


def test_hdf5_keeps_little_of_the_episodes_that_were_read(tmp_path: Path) -> None:
    """HDF5 caches the headers of groups and arrays in C, which tracemalloc does not see."""
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "many.hdf5"
    with open_hdf5(path, "w") as file:
        for number in range(1500):
            file[f"data/demo_{number}/obs/vector"] = np.zeros((2, 3), np.float32)
    with open_hdf5(path) as file:
        for number in range(1500):
            array_at(file, f"data/demo_{number}/obs/vector")
        most, _, now, _ = file.id.get_mdc_size()
        assert now <= most <= METADATA_CACHE == file.id.get_mdc_config().max_size
    with h5py.File(path, "r") as file:
        assert (
            file.id.get_mdc_config().max_size > METADATA_CACHE
        )  # otherwise this limit is not needed anymore
