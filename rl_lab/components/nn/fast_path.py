"""Whether the fast forms of networks are used: fused kernels, a scan with its own backward pass, cheaper convolutions.

The plain modules are the specification; tests hold the fast forms to their numbers. A workflow switches them on around
the work that they speed up. On CUDA the pieces are Triton kernels, elsewhere their plain torch definitions.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from collections.abc import Iterator

import torch

from rl_lab.errors import ConfigError

CHOICES = ("auto", "on", "off")
_state = threading.local()


def fast() -> bool:
    """Whether fast forms are wanted here."""
    return getattr(_state, "on", False)


def fast_without_gradient(x: torch.Tensor) -> bool:
    """Whether a kernel that knows no gradient may work on x here."""
    return x.is_cuda and fast() and not (x.requires_grad and torch.is_grad_enabled())


@contextlib.contextmanager
def fast_path(on: bool = True) -> Iterator[None]:
    """Fast forms inside the block."""
    before = fast()
    _state.on = on
    try:
        yield
    finally:
        _state.on = before


def resolve_fast_path(choice: str | bool, device: torch.device | str) -> bool:
    """`auto`: on CUDA, where Triton is installed (it comes with torch's CUDA builds)."""
    name = {True: "on", False: "off"}.get(choice, choice) if isinstance(choice, bool) else str(choice)
    if name not in CHOICES:
        raise ConfigError(f"training.fast_path is '{choice}'; it can be {', '.join(CHOICES)}")
    on_cuda = torch.device(device).type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "on" and on_cuda and not has_triton:
        raise ConfigError("training.fast_path=on needs the package triton on CUDA: pip install triton")
    return name == "on" or (name == "auto" and on_cuda and has_triton)
