"""Which number format the heavy products use."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

from rl_lab.errors import ConfigError, closest

PRECISIONS = ("auto", "float32", "tensorfloat32", "bfloat16")


def resolve_precision(precision: str, device: torch.device | str) -> torch.dtype:
    """`auto` is bfloat16 where the GPU has it, else float32. Parameters stay float32 either way.

    tensorfloat32 is float32 to everyone but a GPU's matrix units (utils/tensor_float.py).
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"training.precision is '{precision}'.{closest(precision, PRECISIONS)}")
    device = torch.device(device)
    if precision == "auto":
        on_gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if on_gpu else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def autocast(
    dtype: torch.dtype, device: torch.device | str, *, cache: bool = True
) -> AbstractContextManager[object]:
    """Matrix products and convolutions in `dtype`; nothing changes for float32.

    cache: keep each weight's cast until the outermost context ends.
    """
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=dtype, cache_enabled=cache)


def product_dtype(device: torch.device | str) -> torch.dtype:
    """What matrix products compute in here: autocast's dtype, or float32."""
    kind = torch.device(device).type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
