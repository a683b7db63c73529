"""TensorFloat-32 products for a block of work: ten bits of mantissa, several times the speed, on recent NVIDIA GPUs.

Ten bits are what float16 has, without its narrow range, and three more than bfloat16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


def asks_for_tensor_float(precision: str) -> bool:
    """Whether `training.precision` is the one whose updates have such products."""
    return precision == "tensorfloat32"


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
