"""Diagnostics: explains out-of-memory errors, and writes profiler traces (`training.profile=20`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rl_lab.errors import OutOfMemoryError

GIB = 2**30
SMALLER_BATCH = "algorithm.batch_size or algorithm.batch_length (or those of each part)"


@dataclass(frozen=True)
class MemoryUse:
    """A part of a run that uses device memory, and how to reduce it."""

    name: str
    bytes: int
    advice: str


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error is out of memory: torch has a class for GPUs, and none for the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("out of memory", "can't allocate memory", "not enough memory")
    )


def out_of_memory(error: BaseException, orchestrator: Any = None) -> OutOfMemoryError:
    """Return an error that lists memory uses and advice. orchestrator: None while the run is built."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"out of memory: {lines[0] if lines else type(error).__name__}"
    uses = memory_uses(orchestrator) if orchestrator is not None else []
    peak = _peak()
    if peak:
        text += f"\n  peak: {peak / GIB:.2f} GiB allocated"
        rest = peak - sum(use.bytes for use in uses)
        if rest > 0:
            advice = f"a lower {SMALLER_BATCH}; training.precision=bfloat16"
            uses.append(MemoryUse("activations and everything else", rest, advice))
    for use in sorted(uses, key=lambda use: -use.bytes):
        text += f"\n  {use.name}: {_size(use.bytes)}; reduce it with {use.advice}"
    advice = (
        f"Lower {SMALLER_BATCH}, split batches (a higher algorithm.grad_acc_steps), choose a smaller model (size=), keep replay in host "
        "memory (buffers.replay.storage=host) or lower its capacity."
    )
    return OutOfMemoryError(
        f"{text}\n{advice} Saved checkpoints are intact: rl-lab resume continues from the last one."
    )


def memory_uses(orchestrator: Any) -> list[MemoryUse]:
    """Return the parts of a run that use memory of the training device."""
    found = []
    for name, buffer in (orchestrator.storage.buffers if orchestrator.storage is not None else {}).items():
        if not getattr(buffer, "on_host", True) or not torch.cuda.is_available():
            advice = f"buffers.{name}.storage=host, or a lower buffers.{name}.capacity"
            found.append(MemoryUse(f"replay '{name}' when full", int(getattr(buffer, "nbytes", 0)), advice))
    state = orchestrator.run_state
    parts = [*state.components.values()]
    if state.controller_manager is not None:
        parts += [part for _, part in state.controller_manager.items()]
    model = _bytes(p for part in parts if isinstance(part, torch.nn.Module) for p in part.parameters())
    moments = _bytes(_tensors([optimizer.state_dict() for optimizer in state.optimizers.values()]))
    gradients = _bytes(
        p.grad
        for part in parts
        if isinstance(part, torch.nn.Module)
        for p in part.parameters()
        if p.grad is not None
    )
    found.append(
        MemoryUse("weights, gradients and optimizer state", model + gradients + moments, "a smaller size=")
    )
    graphs = sum(runner.graph_bytes for runner in orchestrator.runners.values())
    if graphs:
        advice = f"a lower {SMALLER_BATCH}; training.capture=false records no graph"
        found.append(MemoryUse("graph pool (activations of one update)", graphs, advice))
    return found


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tensors(node: Any) -> Iterable[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _tensors(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _tensors(value)


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


# ---------------------------------------------------------------- profiling


SKIPPED_UPDATES = 100  # warm-up, capture and autotuning would dominate the trace


class Trace:
    """Profiles `updates` updates after the first `skip` of this process, and writes a Chrome trace."""

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
        """Write the trace; a run that ends early writes what was recorded so far."""
        if self._profiler is None or self.written:
            return
        self._profiler.__exit__(None, None, None)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(self.path))
        self.written = True


def print_kernels(update: Callable[[], Any], *, most: int = 45) -> None:
    """Print the device time of each kernel in one call of `update`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        update()
        torch.cuda.synchronize()
    rows = [row for row in recorded.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows) / 1000
    print(f"{sum(row.count for row in rows)} kernels, {total:.2f} ms busy")
    for row in rows[:most]:
        print(f"{row.self_device_time_total / 1000:8.3f} ms {row.count:6d} x {row.key[:110]}")
