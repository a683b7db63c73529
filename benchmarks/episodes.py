"""Ten million rows of episodes on disk: write, kill, reopen and sample, with memory measurements.

A row is 16 floats of observation, 4 of action, reward and flags: 87 bytes. 16 environments, episodes of 200
to 800 rows.

A separate process writes and is killed by SIGKILL after two thirds; the folder is reopened (timed), the lost
rows are counted against those that the process reported, and another process writes the rest. Then batches
are sampled, once with the files in the page cache and once after dropping it, each with a full buffer cache
that holds a small part of the data. Every batch is checked: rows have a counter that must increase by one
within an episode. CPU times are reported next to wall times, because other processes slow the latter
(`load`). Memory is the resident set of the writing and of the sampling process, measured every half second
and every few batches; `spread` is the maximum minus the minimum after the first tenth, during which the
caches fill.

    rl-lab bench episodes [--rows 10000000] [--batches 400] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from rl_lab.buffers.episodes.buffer import EpisodeBuffer
from rl_lab.records import ActionSpec, ArraySpec, BatchSpec, Spec

STREAMS, STEPS = 16, 500  # rows per stream that are added at a time
SHORTEST, LONGEST = 200, 800  # rows of an episode
CACHE_BYTES = 128 << 20
SPEC = Spec(
    "bench",
    {"state": ArraySpec((16,), "float32")},
    ActionSpec("continuous", (4,), low=(-1.0,) * 4, high=(1.0,) * 4),
)
SPECS = {"16x64": BatchSpec(16, 64, boundary="within"), "32x21": BatchSpec(32, 21, boundary="within")}

Row = dict[str, Any]


def run(argv: list[str]) -> list[Row]:
    """Return rows of name, value, unit."""
    parser = argparse.ArgumentParser(prog="rl-lab bench episodes", description="episodes on disk")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument(
        "--folder",
        type=Path,
        default=None,
        help="where to write (default: a temporary folder in the current one)",
    )
    chosen = parser.parse_args(argv)
    home = Path(tempfile.mkdtemp(prefix="bench_episodes_", dir=chosen.folder or Path.cwd()))
    try:
        return measure(home / "data", chosen.rows, chosen.batches)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def measure(folder: Path, rows: int, batches: int) -> list[Row]:
    results: list[Row] = []

    def note(name: str, value: float, unit: str, **more: Any) -> None:
        results.append({"name": f"episodes/{name}", "value": value, "unit": unit, **more})
        print(f"  {name} {value:,.4g} {unit}", flush=True)

    first = write_until_killed(folder, rows * 2 // 3)
    begin = time.perf_counter()
    said: list[str] = []
    buffer = open_buffer(folder, said)
    note("reopened_after_kill_s", time.perf_counter() - begin, "s", said=said)
    note("rows_when_killed", first.rows, "rows")
    note("rows_lost_by_kill", first.rows - buffer.size, "rows")
    most = STREAMS * (LONGEST + STEPS)  # open episodes, and rows added after the last report
    assert 0 <= first.rows - buffer.size + STREAMS * STEPS <= most + STREAMS * STEPS
    held = buffer.size
    buffer.close()
    second = write_until_killed(folder, rows - held, kill=False)
    speed = (first.rows + second.rows) / (first.seconds + second.seconds)
    note("write_rows_per_s", speed, "rows/s")
    note("write_cpu_us_per_row", 1e6 * (first.cpu + second.cpu) / (first.rows + second.rows), "µs")
    note_memory(note, "writing", first.memory)

    begin = time.perf_counter()
    buffer = open_buffer(folder, said)
    note("reopened_s", time.perf_counter() - begin, "s")
    note("stored_rows", buffer.size, "rows")
    note("stored_episodes", buffer.episodes, "episodes")
    raw = buffer.size * buffer._store.layout.row_bytes
    note("disk_mb", buffer.disk_bytes / 1e6, "MB")
    note("bytes_per_row_on_disk", buffer.disk_bytes / buffer.size, "bytes")
    note("packed_to", buffer.disk_bytes / raw, "of the raw bytes", compression=buffer._store.compression)
    note("cache_mb", CACHE_BYTES / 1e6, "MB")
    memory: list[float] = []
    while buffer._cache.nbytes < min(
        0.95 * CACHE_BYTES, 0.5 * raw
    ):  # steady state: each batch read evicts another
        sample_rate(buffer, SPECS["16x64"], 10, memory)
    memory = []
    for name, spec in SPECS.items():
        for label, drop in (("", False), ("_dropped_from_system_cache", True)):
            if drop:
                drop_from_cache(folder)
            rate, cpu = sample_rate(buffer, spec, batches, memory)
            note(f"sample_{name}{label}_batches_per_s", rate, "batches/s")
            note(f"sample_{name}{label}_rows_per_s", rate * spec.size * spec.rows, "rows/s")
            note(f"sample_{name}{label}_cpu_ms_per_batch", cpu, "ms")
    note_memory(note, "sampling", memory)
    note("load", os.getloadavg()[0], "processes waiting to run, with this one")
    buffer.close()
    return results


def note_memory(note: Callable[..., None], what: str, memory: list[float]) -> None:
    """Return the maximum, and maximum minus minimum after the first tenth; with every twentieth value."""
    late = memory[len(memory) // 10 :] or memory
    series = [round(value) for value in memory[:: max(1, len(memory) // 20)]]
    print(f"  rss while {what}, MB: {series}")
    note(f"rss_{what}_mb", max(memory), "MB", series=series)
    note(f"rss_{what}_spread_mb", max(late) - min(late), "MB")


def open_buffer(folder: Path, said: list[str]) -> EpisodeBuffer:
    return EpisodeBuffer(
        SPEC.row_columns(),
        num_streams=STREAMS,
        spec=SPEC,
        folder=folder,
        cache_bytes=CACHE_BYTES,
        on_warning=said.append,
    )


def sample_rate(
    buffer: EpisodeBuffer, spec: BatchSpec, batches: int, memory: list[float]
) -> tuple[float, float]:
    """Return batches per second and CPU milliseconds per batch, without the checks."""
    out, generator = buffer.make_batch(spec), torch.Generator().manual_seed(len(memory))
    spent = cpu = 0.0
    for batch in range(batches):
        begin, busy = time.perf_counter(), time.process_time()
        buffer.sample(spec, generator=generator, out=out)
        spent, cpu = spent + time.perf_counter() - begin, cpu + time.process_time() - busy
        counter = out.obs["state"][..., 0]
        assert (counter.diff(dim=1) == 1).all(), "rows that are not consecutive"
        if batch % 10 == 0:
            memory.append(resident(os.getpid()))
    return batches / spent, 1e3 * cpu / batches


def drop_from_cache(folder: Path) -> None:
    """Ask the system to drop the files from the page cache. It may refuse silently."""
    for path in folder.glob("chunk-*"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Written:
    """Report of a writing process."""

    def __init__(self) -> None:
        self.rows = 0
        self.seconds = 0.0
        self.cpu = 0.0
        self.memory: list[float] = []

    def take(self, line: str) -> None:
        rows, seconds, cpu = line.split()
        self.rows, self.seconds, self.cpu = int(rows), float(seconds), float(cpu)


def write_until_killed(folder: Path, rows: int, *, kill: bool = True) -> Written:
    """Run a writing process until it has reported `rows` rows, then kill it, or let it end."""
    result = Written()
    command = [sys.executable, str(Path(__file__).resolve()), str(folder), str(rows if not kill else 1 << 60)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            try:
                result.memory.append(resident(process.pid))
                if result.memory[-1] < 1:  # it has ended
                    result.memory.pop()
            except psutil.Error:
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for line in process.stdout:
            result.take(line)
            if kill and result.rows >= rows:
                process.send_signal(signal.SIGKILL)
                break
        for line in process.stdout:  # reported before it ended
            result.take(line)
        code = process.wait()
        assert kill or code == 0, "the writing process failed"
    finally:
        done.set()
        watcher.join()
        if process.poll() is None:
            process.kill()
    return result


def write(folder: Path, rows: int) -> None:
    """Body of the writing process: reports rows, seconds and CPU seconds, without generating the data."""
    buffer = open_buffer(folder, [])
    rng = np.random.default_rng(os.getpid())
    noise = rng.standard_normal((STREAMS, STEPS, 16)).astype(np.float32)
    action = rng.uniform(-1, 1, (STREAMS, STEPS, 4)).astype(np.float32)
    left = rng.integers(SHORTEST, LONGEST, STREAMS)  # rows until the end of each stream's episode
    is_first, counter = np.ones(STREAMS, dtype=bool), np.zeros(STREAMS, dtype=np.int64)
    added, spent, cpu = 0, 0.0, 0.0
    while added < rows:
        ends, first, counters = (np.zeros((STREAMS, STEPS), dtype=kind) for kind in (bool, bool, np.float32))
        for step in range(STEPS):
            first[:, step] = is_first
            counter = np.where(is_first, 0, counter + 1)
            counters[:, step] = counter
            left -= 1
            ends[:, step] = is_first = left == 0
            left[is_first] = rng.integers(SHORTEST, LONGEST, int(is_first.sum()))
        state = noise[:, rng.permutation(STEPS)]
        state[..., 0] = counters
        begin, busy = time.perf_counter(), time.process_time()
        buffer.add(
            {
                "obs/state": state,
                "action": action,
                "reward": counters,
                "terminated": ends,
                "truncated": np.zeros_like(ends),
                "is_first": first,
            }
        )
        spent, cpu = spent + time.perf_counter() - begin, cpu + time.process_time() - busy
        added += STREAMS * STEPS
        print(added, spent, cpu, flush=True)
    buffer.close()


def resident(process: int) -> float:
    """Megabytes."""
    return psutil.Process(process).memory_info().rss / 1e6


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]), int(sys.argv[2]))
