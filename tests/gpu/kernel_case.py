"""What tests of kernels share: the tolerance, and both number formats."""

from __future__ import annotations

import pytest
import torch

EPS = 1e-4
HALF = 2e-2  # what rounding to bfloat16 at other places may cost
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def agree(cuda: torch.Tensor, cpu: torch.Tensor, tolerance: float = 2e-5) -> None:
    error = (cuda.cpu().float() - cpu.float()).abs().max()
    assert error <= tolerance * max(1.0, float(cpu.float().abs().max())), float(error)


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]
