"""Floating-point precision of matrix products and convolutions."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from rl_lab.errors import ConfigError, closest

PRECISIONS = ("auto", "float32", "tensorfloat32", "bfloat16")


def resolve_precision(precision: str, device: torch.device | str) -> torch.dtype:
    """The autocast dtype; `auto` is bfloat16 on GPUs that support it, else float32. Parameters stay float32.

    tensorfloat32 is float32 except in a GPU's tensor cores (launch/runtime.py).
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"training.precision is '{precision}'.{closest(precision, PRECISIONS)}")
    device = torch.device(device)
    if precision == "auto":
        # A T4 emulates bfloat16, which is slower than float32.
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if on_gpu else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(
    dtype: torch.dtype, device: torch.device | str, *, cache: bool = True
) -> AbstractContextManager[object]:
    """Compute matrix products and convolutions in `dtype`; no effect for float32.

    cache: keep cast weights until the outermost context exits.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype, cache_enabled=cache)


def product_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype of matrix products in this context: autocast's, or float32."""
    kind = torch.device(device).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
