"""TensorFloat-32 products for a block of work: ten bits of mantissa, several times the speed, on recent NVIDIA GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def tensor_float(on: bool) -> Iterator[None]:
    """float32 matrix products use TensorFloat-32 inside the block, if `on`; afterwards what held before holds again."""
    if not on:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
