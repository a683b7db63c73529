"""Triton where it can run, and stand-ins elsewhere: `jit`, `tl`, `cdiv`, `next_power_of_2`; and `row_tiles`.

Kernel modules import these names, not Triton. Triton is loaded where there is a CUDA device, or where its interpreter is
asked for (TRITON_INTERPRET=1). Elsewhere kernels can be defined and not launched: the plain forms run there.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

__all__ = ["CAN_RUN", "cdiv", "jit", "next_power_of_2", "row_tiles", "tl"]

CAN_RUN = importlib.util.find_spec("triton") is not None and (
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
)


class _NoKernel:
    """A kernel that can be named and imported, and not launched."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.__name__} is a Triton kernel, which needs a CUDA device and the package triton (pip install "
            "triton), or TRITON_INTERPRET=1 for its interpreter"
        )

    __getitem__ = __call__  # the grid of a launch


class _NoLanguage:
    """Any name of triton.language, where a kernel's definition mentions it."""

    def __getattr__(self, name: str) -> _NoLanguage:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


def _cdiv(x: int, y: int) -> int:
    return -(-x // y)


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


if TYPE_CHECKING or CAN_RUN:
    import triton.language as tl
    from triton import cdiv, jit, next_power_of_2
else:
    jit, tl, cdiv, next_power_of_2 = _NoKernel, _NoLanguage(), _cdiv, _next_power_of_2


def row_tiles(rows: int, features: int) -> tuple[int, int, int]:
    """Tiles of kernels that norm rows (rows, features): padded width, rows of a program, warps."""
    block = next_power_of_2(features)
    many = max(1, min(8, 2048 // block), 1024 // block)
    group = 1 if rows <= 4096 else many  # few rows: spread them over the chip
    return block, group, 4 if block * group <= 2048 else 8
