"""A profiler trace of a few updates, for `chrome://tracing` or Perfetto: `training.profile=20`."""

from __future__ import annotations

from collections.abc import Mapping
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
