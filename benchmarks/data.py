"""Ten million rows: how fast are they written, converted, checked and sampled, and is memory constant?"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
import torch

from rl_lab.buffers.episodes.buffer import StoredEpisodes
from rl_lab.buffers.formats.dataset import create_dataset, open_dataset
from rl_lab.buffers.formats.episode import PlainEpisode
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec

SPEC = Spec(
    "walker",
    {"vector": ArraySpec((24,), "float32")},
    ActionSpec("continuous", (6,), low=(-1.0,) * 6, high=(1.0,) * 6),
)


def run(argv: list[str]) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="rl-lab bench data")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--length", type=int, default=500, help="steps of an episode (default: 500)")
    parser.add_argument("--batches", type=int, default=500, help="sampled batches of 256 sequences of 4 rows")
    parser.add_argument(
        "--to", default="lab,lab", help="formats to write one after the other (default: lab,lab)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the data is written and deleted (default: a temporary folder)"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return measure(Path(folder), args)


def measure(folder: Path, args: Any) -> list[dict[str, Any]]:
    episodes = -(-args.rows // (args.length + 1))
    rows = episodes * (args.length + 1)
    results: list[dict[str, Any]] = [{"name": "data/rows", "value": rows, "unit": "rows"}]
    memory = Memory()

    def timed(name: str, work: Callable[[], None], count: int) -> None:
        memory.start()
        started = perf_counter()
        work()
        seconds = perf_counter() - started
        results.append({"name": f"data/{name}_rows_per_second", "value": count / seconds, "unit": "rows/s"})
        results.append({"name": f"data/{name}_memory_growth", "value": memory.growth(), "unit": "MiB"})

    first, *rest = args.to.split(",")
    path = folder / "0"
    timed(
        f"write_{first}",
        lambda: write(path, first, (episode(k, args.length) for k in range(episodes)), memory),
        rows,
    )
    for number, name in enumerate(rest, start=1):
        source, target = folder / str(number - 1), folder / str(number)
        timed(f"convert_to_{name}", lambda s=source, t=target, n=name: convert(s, t, n, memory), rows)  # type: ignore[misc]
    last = folder / str(len(rest))
    with open_dataset(last) as data:
        memory.start()
        started = perf_counter()
        order = np.random.default_rng(0).permutation(len(data))[:2000]
        for index in order:
            data.episode(int(index))
            memory.look()
        seconds = perf_counter() - started
        results.append(
            {"name": "data/random_episodes_per_second", "value": len(order) / seconds, "unit": "episodes/s"}
        )
        results.append(
            {"name": "data/random_episodes_memory_growth", "value": memory.growth(), "unit": "MiB"}
        )
    if (last / "layout.json").is_file():
        timed("sample", lambda: sample(last, args.batches, memory), args.batches * 256 * 4)
    size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    results.append({"name": "data/bytes_per_row", "value": size / rows, "unit": "bytes"})
    return results


class Memory:
    """Largest growth of this process's memory since `start`, in MiB, without mapped files."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._base = self._most = self._now()

    def _now(self) -> int:
        used = self._process.memory_info()
        return int(used.rss - getattr(used, "shared", 0))

    def start(self) -> None:
        self._base = self._most = self._now()

    def look(self) -> None:
        self._most = max(self._most, self._now())

    def growth(self) -> float:
        self.look()
        return (self._most - self._base) / 2**20


def episode(number: int, steps: int) -> PlainEpisode:
    random = np.random.default_rng(number)
    walk = random.standard_normal((steps + 1, 24), dtype=np.float32).cumsum(0, dtype=np.float32)
    end = np.arange(steps) == steps - 1
    return PlainEpisode(
        {"vector": walk},
        random.uniform(-1, 1, (steps, 6)).astype(np.float32),
        random.random(steps, dtype=np.float32),
        np.zeros(steps, bool),
        end,
    )


def write(path: Path, format: str, episodes: Any, memory: Memory) -> None:
    with create_dataset(path, SPEC, format) as writer:
        for number, each in enumerate(episodes):
            writer.add(each)
            if number % 256 == 0:
                memory.look()
        done = writer.finish()
    if done != path:  # a format that is one file with a suffix
        done.rename(path)


def convert(source: Path, target: Path, format: str, memory: Memory) -> None:
    with open_dataset(source) as data:
        write(target, format, iter(data), memory)


def sample(path: Path, batches: int, memory: Memory) -> None:
    """Batches as training draws them from `buffer/offline_episodes`, with its cache of 256 MiB."""
    buffer = StoredEpisodes(SPEC.row_columns(), path=path, spec=SPEC)
    spec = BatchSpec(256, 4, boundary="within")
    generator, out = torch.Generator().manual_seed(0), None
    for number in range(batches):
        out = buffer.sample(spec, generator=generator, out=out)
        if number % 16 == 0:
            memory.look()
    buffer.close()
