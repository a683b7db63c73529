"""The greatest of each row: as `torch.topk`, where rows are few and short (a planner's elites)."""

from __future__ import annotations

import torch

from rl_lab.components.nn.fast_path import fast

LONGEST = 2048  # every number is compared with every other one of its row


def top_values(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values (N, S), none of them NaN -> the greatest (N, count), in descending order, and their places, int64."""
    if values.is_cuda and fast() and values.shape[1] <= LONGEST:
        from rl_lab.components.nn.kernels import top_values_triton

        return top_values_triton.top_values(values.contiguous(), count)
    return torch.topk(values, count, dim=1)
