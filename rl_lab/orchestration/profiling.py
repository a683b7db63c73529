"""Where the time goes: a trace of a few updates (`training.profile=20`), or a table of the device's kernels (benchmarks)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

SKIPPED_UPDATES = 100  # warm-up, capture and autotuning would drown what is looked for


class Trace:
    """Starts by itself after `skip` updates of this process, and writes the trace `updates` later."""

    def __init__(self, path: Path, updates: int, *, skip: int = SKIPPED_UPDATES) -> None:
        self.path = path
        self.updates = updates
        self.skip = skip
        self._first: int | None = None
        self._profiler: Any = None
        self.written = False

    def tick(self, totals: Mapping[str, int]) -> None:
        """Called after every action."""
        if self.written:
            return
        if self._first is None:
            self._first = totals["updates"]
        seen = totals["updates"] - self._first
        if self._profiler is None and seen >= self.skip:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()
        elif self._profiler is not None and seen >= self.skip + self.updates:
            self.close()

    def close(self) -> None:
        """Write what there is; a run that ends early still gives a trace."""
        if self._profiler is None or self.written:
            return
        self._profiler.__exit__(None, None, None)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.path))
        self.written = True


def print_kernels(update: Callable[[], Any], *, most: int = 45) -> None:
    """Where the device's time goes in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        update()
        torch.cuda.synchronize()
    rows = [row for row in recorded.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1000
    print(f"{sum(row.count for row in rows)} kernels, {total:.2f} ms busy")
    for row in rows[:most]:
        print(f"{row.self_device_time_total / 1000:8.3f} ms {row.count:6d} x {row.key[:110]}")
