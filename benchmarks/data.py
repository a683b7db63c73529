"""Ten million rows: how fast are they written, converted and sampled, in which formats, and is memory constant?

`--formats all` converts sets of several sizes to every format and back, compares each bit, and reads episodes in random
order. Each of these is a process of its own, whose memory is looked at every 10 ms.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
import psutil
import torch

from rl_lab.buffers.episodes.buffer import StoredEpisodes
from rl_lab.buffers.formats.dataset import FORMATS, Dataset, create_dataset, find_format, open_dataset
from rl_lab.buffers.formats.episode import PlainEpisode
from rl_lab.errors import MissingPackageError
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec

SPEC = Spec(
    "walker",
    {"vector": ArraySpec((24,), "float32")},
    ActionSpec("continuous", (6,), low=(-1.0,) * 6, high=(1.0,) * 6),
)
SMALL = Spec(
    "small",
    {"vector": ArraySpec((8,), "float32")},
    ActionSpec("continuous", (2,), low=(-1.0,) * 2, high=(1.0,) * 2),
)
CACHE = 16 << 20  # bytes, of sampling in the runs with --formats: less than the smallest set
RANDOM = 300  # episodes that are read in random order


def run(argv: list[str], file: Any) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="rl-lab bench data")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--length", type=int, default=500, help="steps of an episode (default: 500)")
    parser.add_argument("--batches", type=int, default=500, help="sampled batches of 256 sequences of 4 rows")
    parser.add_argument(
        "--to", default="lab,lab", help="formats to write one after the other (default: lab,lab)"
    )
    parser.add_argument(
        "--formats",
        help="convert to each of these and back instead, such as zarr,npz; all: every one that is installed",
    )
    parser.add_argument(
        "--sizes", default="1000000,4000000,10000000", help="rows of the sets that --formats converts"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the data is written and deleted (default: a temporary folder)"
    )
    args = parser.parse_args(argv)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        return measure_formats(Path(folder), args, file) if args.formats else measure(Path(folder), args)


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


def episode(number: int, steps: int, spec: Spec = SPEC) -> PlainEpisode:
    random = np.random.default_rng(number)
    shape = (steps + 1, *spec.observations["vector"].shape)
    walk = random.standard_normal(shape, dtype=np.float32).cumsum(0, dtype=np.float32)
    end = np.arange(steps) == steps - 1
    return PlainEpisode(
        {"vector": walk},
        random.uniform(-1, 1, (steps, spec.action.size)).astype(np.float32),
        random.random(steps, dtype=np.float32),
        np.zeros(steps, bool),
        end,
    )


def write(path: Path, format: str, episodes: Any, memory: Memory | None, spec: Spec = SPEC) -> None:
    with create_dataset(path, spec, format) as writer:
        for number, each in enumerate(episodes):
            writer.add(each)
            if memory is not None and number % 256 == 0:
                memory.look()
        done = writer.finish()
    if done != path:  # a format that is one file with a suffix
        done.rename(path)


def convert(source: Path, target: Path, format: str, memory: Memory) -> None:
    with open_dataset(source) as data:
        write(target, format, iter(data), memory)


def sample(
    path: Path, batches: int, memory: Memory | None, spec: Spec = SPEC, cache_bytes: int = 256 << 20
) -> None:
    """Batches as training draws them from `buffer/offline_episodes`, with its cache (default: 256 MiB)."""
    buffer = StoredEpisodes(spec.row_columns(), path=path, spec=spec, cache_bytes=cache_bytes)
    wanted = BatchSpec(256, 4, boundary="within")
    generator, out = torch.Generator().manual_seed(0), None
    for number in range(batches):
        out = buffer.sample(wanted, generator=generator, out=out)
        if memory is not None and number % 16 == 0:
            memory.look()
    buffer.close()


# --- Every format -------------------------------------------------------------------------------


def measure_formats(folder: Path, args: Any, file: Any) -> list[dict[str, Any]]:
    """Rows for every format and size; the file of --json is written after each part.

    Rows per second are of the process's CPU time as well, because other work on the machine does not change that.
    """
    results: list[dict[str, Any]] = []
    most: dict[str, list[float]] = {}  # part -> memory at each size

    def add(name: str, value: float, unit: str) -> None:
        results.append({"name": f"data/{name}", "value": value, "unit": unit})
        print(f"{name}: {value:,.1f} {unit}", flush=True)

    def part(name: str, size: int, command: list[str], counts: dict[str, int]) -> dict[str, Any]:
        found = run_part(command)
        for work, count in counts.items():
            what = "episodes" if work.endswith("episodes") else "rows"
            seconds, cpu = found["seconds"][work], found["cpu"][work]
            add(f"{name}/{work}_{size}_per_second", count / seconds, f"{what}/s")
            add(f"{name}/{work}_{size}_per_cpu_second", count / max(cpu, 1e-3), f"{what}/s")
        memory_of = f"{name}/{'_'.join(counts)}"
        add(f"{memory_of}_{size}_memory", found["memory"], "MiB")
        most.setdefault(memory_of, []).append(found["memory"])
        file.write(results)
        return found

    def path_of(size: int) -> Path:
        return folder / f"source_{size}"

    sizes = [int(number) for number in args.sizes.split(",")]
    for size in sizes:
        episodes = -(-size // (args.length + 1))
        source, rows = path_of(size), episodes * (args.length + 1)
        part("lab", size, ["create", str(source), str(episodes), str(args.length)], {"write": rows})
        part("lab", size, ["sample", str(source), str(args.batches)], {"sample": args.batches * 256 * 4})
        add(f"lab/{size}_bytes_per_row", size_of(source) / rows, "bytes")
    for name in chosen_formats(args.formats):
        for size in sizes:
            episodes = -(-size // (args.length + 1))
            source, rows = path_of(size), episodes * (args.length + 1)
            target, back = folder / f"target{find_format(name).module().Writer.suffix}", folder / "back"
            part(name, size, ["write", str(source), str(target), name], {"write": rows})
            add(f"{name}/{size}_bytes_per_row", size_of(target) / rows, "bytes")
            counts = {"random_episodes": min(RANDOM, episodes), "read": rows}
            part(name, size, ["read", str(target), str(back)], counts)
            if same_files(source, back):
                add(f"{name}/{size}_arrays_that_differ", 0, "arrays")
            else:
                found = run_part(["compare", str(source), str(back), "but_last" if name == "pt" else ""])
                add(f"{name}/{size}_arrays_that_differ", found["different"], "arrays")
            file.write(results)
            for path in (target, back):
                remove(path)
    for name, values in most.items():
        add(f"{name}_memory_growth", values[-1] - values[0], "MiB")
    return results


def same_files(first: Path, second: Path) -> bool:
    """Return whether the episodes of two sets are the same bytes: our own format is deterministic."""
    names = [sorted(file.name for file in path.glob("*.episodes")) for path in (first, second)]
    return names[0] == names[1] and all(filecmp.cmp(first / n, second / n, shallow=False) for n in names[0])


def chosen_formats(text: str) -> list[str]:
    """Return the formats of --formats; of `all`, those whose package is installed, and names the others."""
    if text != "all":
        return text.split(",")
    found = []
    for name, each in FORMATS.items():
        try:
            each.module()
        except MissingPackageError as error:
            print(error)
            continue
        if each.writable and name != "lab":
            found.append(name)
    return found


def run_part(command: list[str]) -> dict[str, Any]:
    """Run one part in a process of its own; returns what it printed, and its memory without imports, in MiB."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    watched, most = psutil.Process(process.pid), 0
    try:
        while process.poll() is None:
            used = watched.memory_info()
            most = max(most, int(used.rss - getattr(used, "shared", 0)))
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        pass
    finally:
        process.kill() if process.poll() is None else None
    assert process.stdout is not None
    text = process.stdout.read()
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    found = dict(json.loads(text.splitlines()[-1]))
    return {**found, "memory": max(0.0, most / 2**20 - found["base"])}


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) or path.stat().st_size


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(argv: list[str]) -> None:
    """Body of the process of one part: prints its seconds, CPU seconds and memory before it began."""
    torch.set_num_threads(1)
    kind, path, *rest = argv
    if kind == "write":
        find_format(rest[1]).module()
    facts: dict[str, Any] = {"base": Memory()._now() / 2**20, "seconds": {}, "cpu": {}}

    def timed(work: str, call: Callable[[], None]) -> None:
        started, cpu = perf_counter(), process_time()
        call()
        facts["seconds"][work], facts["cpu"][work] = perf_counter() - started, process_time() - cpu

    if kind == "create":
        count, length = int(rest[0]), int(rest[1])
        episodes = (episode(k, length, SMALL) for k in range(count))
        timed("write", lambda: write(Path(path), "lab", episodes, None, SMALL))
    elif kind == "write":
        with open_dataset(path) as data:
            timed("write", lambda: write(Path(rest[0]), rest[1], iter(data), None, data.spec))
    elif kind == "read":
        with open_dataset(path) as data:  # opening is not counted
            timed("random_episodes", lambda: read_random(data))
            timed("read", lambda: write(Path(rest[0]), "lab", iter(data), None, data.spec))
    elif kind == "sample":
        timed("sample", lambda: sample(Path(path), int(rest[0]), None, SMALL, CACHE))
    elif kind == "compare":
        facts["different"] = different(Path(path), Path(rest[0]), but_last=bool(rest[1]))
    print(json.dumps(facts))


def read_random(data: Dataset) -> None:
    for index in np.random.default_rng(0).permutation(len(data))[:RANDOM]:
        data.episode(int(index))


def different(first: Path, second: Path, *, but_last: bool) -> int:
    """Return how many arrays of two sets differ. but_last: in a format without it, the last observation may."""
    count = 0
    with open_dataset(first) as a, open_dataset(second) as b:
        assert len(a) == len(b)
        for left, right in zip(a, b):
            pairs = [(getattr(left, k), getattr(right, k)) for k in ("actions", "rewards")]
            for name, value in left.observations.items():
                other = right.observations[name]
                pairs.append((value[:-1], other[:-1]) if but_last else (value, other))
            if but_last:  # one array for both kinds of ends
                pairs.append((left.terminated | left.truncated, right.terminated | right.truncated))
            else:
                pairs += [(left.terminated, right.terminated), (left.truncated, right.truncated)]
            count += sum(x.dtype != y.dtype or x.tobytes() != y.tobytes() for x, y in pairs)
    return count


if __name__ == "__main__":
    main(sys.argv[1:])
