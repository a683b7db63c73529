"""The device of a process, and the floating-point precision of its matrix products and convolutions."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch

from rl_lab.errors import ConfigError, closest

PRECISIONS = ("auto", "float32", "tensorfloat32", "bfloat16")


def resolve_device(name: str) -> torch.device:
    """Return the device for `auto | cpu | cuda | cuda:N | mps`, if this machine has it."""
    if torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True  # shapes are fixed, so benchmarking the algorithms pays off
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("cpu")
    if name.split(":")[0] == "tpu":
        raise ConfigError(
            f"experiment.device is '{name}', but there is no torch-xla for torch 2.11 or newer, which RL Lab needs: its "
            "newest release, 2.9.0, fits torch 2.9 (checked in November 2026); use auto"
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"experiment.device must be auto, cpu, cuda, cuda:N or mps, not '{name}'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if name == "cuda" and count:
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        if (device.index or 0) >= count:
            raise ConfigError(
                f"experiment.device is '{name}', but this machine has {count} CUDA devices: use auto"
            )
        return torch.device("cuda", device.index or 0)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("experiment.device is 'mps', which this machine does not have: use auto")
    return device


def resolve_precision(precision: str, device: torch.device | str) -> torch.dtype:
    """The autocast dtype; `auto` is bfloat16 on GPUs that support it, else float32. Parameters stay float32.

    tensorfloat32 is float32 except in a GPU's tensor cores (`tensor_float`).
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


# --- TensorFloat-32 ---
# TensorFloat-32 matrix products inside a `with` block: several times faster on recent NVIDIA GPUs.
#
# TensorFloat-32 has 10 bits of mantissa, as float16 but with float32's range; bfloat16 has 7.


def asks_for_tensor_float(precision: str) -> bool:
    """Return whether `training.precision` asks for TensorFloat-32 in updates."""
    return precision == "tensorfloat32"


@contextlib.contextmanager
def tensor_float(on: bool) -> Iterator[None]:
    """Use TensorFloat-32 for float32 matrix products inside the block, if `on`.

    Restore the old setting after it.
    """
    if not on:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
