"""Compares two runs bit for bit: weights, optimizers, counters, generators, collector and replay rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_lab.orchestration.orchestrator import Orchestrator
from rl_lab.utils.checkpoint.manager import CheckpointManager

# Where and when a run took place is not part of what it computed; a stop logs one more line, which changes `interval`.
IGNORED = {"time", "interval"}


@contextmanager
def stopped_at(monkeypatch: pytest.MonkeyPatch, steps: int | None = None) -> Iterator[None]:
    """Stop runs after `steps` environment steps (None: half of them), within a cycle and an episode."""
    do = Orchestrator.run_action

    def do_and_stop(self: Orchestrator, action: str, phase: Any) -> None:
        do(self, action, phase)
        done, total = self.scheduler.totals["env_steps"], self.scheduler.total_timesteps or 0
        self.interrupted = done * 2 >= total if steps is None else done >= steps

    with monkeypatch.context() as patch:
        patch.setattr(Orchestrator, "run_action", do_and_stop)
        yield


def assert_same(first: Any, second: Any, path: str = "state") -> None:
    """Check recursive equality, bit for bit; the message has the path of the first difference."""
    assert type(first) is type(second), f"{path}: {type(first)} and {type(second)}"
    if isinstance(first, dict):
        assert first.keys() == second.keys(), f"{path}: {first.keys() ^ second.keys()}"
        for key in first:
            if key not in IGNORED:
                assert_same(first[key], second[key], f"{path}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), f"{path}: {len(first)} and {len(second)} items"
        for index, (a, b) in enumerate(zip(first, second)):
            assert_same(a, b, f"{path}[{index}]")
    elif isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype and first.shape == second.shape, path
        same = torch.equal(_as_bytes(first), _as_bytes(second))
        assert same or bool((first.isnan() & second.isnan()).all()), f"{path} differs"
    else:
        assert first == second or (first != first and second != second), f"{path}: {first!r} and {second!r}"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Clone for the strides: 1×1 channels-last images count as contiguous but have unusual strides."""
    if not tensor.dim() or not tensor.numel():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def replay_rows(run: Path, name: str = "replay") -> dict[str, torch.Tensor]:
    """Read all stored rows of a run's replay from its files, by column."""
    loaded = CheckpointManager(run / "checkpoints").load()
    folder = run / "checkpoints" / "replay" / name
    columns: dict[str, list[torch.Tensor]] = {}
    assert loaded.manifest is not None
    for file in sorted(loaded.manifest["buffers"][name]["files"]):
        for key, value in _tensors(torch.load(folder / file, weights_only=True), ""):
            columns.setdefault(key, []).append(value.flatten().view(torch.uint8) if value.dim() else value)
    return {key: torch.cat([part.flatten() for part in parts]) for key, parts in columns.items()}


def _tensors(node: Any, prefix: str) -> list[tuple[str, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        return [(prefix, node)]
    if isinstance(node, dict):
        return [pair for key, value in node.items() for pair in _tensors(value, f"{prefix}/{key}")]
    return []


def assert_same_run(first: Path, second: Path, buffers: tuple[str, ...] = ("replay",)) -> None:
    """Check that the newest checkpoints of two run folders have the same state and the same replay."""
    states = [CheckpointManager(run / "checkpoints").load().state for run in (first, second)]
    assert_same(*states)
    for name in buffers:
        assert_same(replay_rows(first, name), replay_rows(second, name), f"replay {name}")


def metric_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("time", "evolution/seconds", "evolution/evaluations_per", "evolution/steps_per")
    return [
        {key: value for key, value in row.items() if not key.startswith(timed) and "per_second" not in key}
        for row in rows
    ]
