"""A learned vector for each task, of length at most 1 (TD-MPC2's multi-task form)."""

from __future__ import annotations

import torch
from torch import nn

from rl_lab.errors import ConfigError
from rl_lab.records import Spec


class TaskEmbedding(nn.Module):
    """One row per task; tasks arrive as one-hot vectors, as every whole number in an observation does here.

    `project` shortens rows that have grown beyond length 1. The original asks torch's embedding to do so at every
    look-up, which reads from the device and cannot be captured; here an update ends with it.
    """

    def __init__(self, *, spec: Spec, width: int) -> None:
        super().__init__()
        if "task" not in spec.observations:
            raise ConfigError(
                f"{spec.name} has one task only: its observations are {sorted(spec.observations)}"
            )
        if width < 1:
            raise ConfigError("a task's embedding needs a width: set algorithm.task_width, for example to 96")
        tasks = spec.observations["task"].shape[0]
        self.width = width
        # nicklashansen/tdmpc2 common/init.py: uniform ±0.02
        self.weight = nn.Parameter(torch.empty(tasks, width).uniform_(-0.02, 0.02))

    def forward(self, task: torch.Tensor) -> torch.Tensor:
        """task: (…, tasks) one-hot -> (…, width)."""
        return task.float() @ self.weight

    @torch.no_grad()
    def project(self) -> None:
        norm = torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True)
        self.weight.div_(norm.clamp(min=1.0))
