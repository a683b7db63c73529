"""Shared helpers of the workflow tests: random replay columns, and the parts that a step has changed."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.records import Spec


def random_columns(spec: Spec, size: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Observations and actions, (size, rows, …)."""
    columns: dict[str, torch.Tensor] = {}
    for key, item in spec.observations.items():
        shape = (size, rows, *item.shape)
        if item.dtype == "uint8":
            columns[f"obs/{key}"] = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        else:
            columns[f"obs/{key}"] = torch.randn(shape, generator=generator)
    action = spec.action
    if action.kind == "continuous":
        columns["action"] = torch.rand(size, rows, *action.shape, generator=generator) * 2 - 1
    else:
        draws = [torch.randint(n, (size, rows), generator=generator) for n in action.choices]
        columns["action"] = draws[0] if action.kind == "discrete" else torch.stack(draws, -1)
    return columns


def changed_parts(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {
        name for name in before if any(not torch.equal(before[name][k], after[name][k]) for k in before[name])
    }
