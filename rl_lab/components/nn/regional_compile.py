"""Small functions that become one kernel each where a workflow asks for it.

A network of small layers is bound by the number of kernels it launches. Compiling it whole takes minutes; compiling
only what stands between two matrix products takes seconds, and the same few functions serve every layer. The plain
function is the specification: outside the `compiling` block it is what runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Widths, number formats, with and without gradients: one piece serves more kinds of calls than torch expects (8).
RECOMPILE_LIMIT = 64
_state = threading.local()


@contextlib.contextmanager
def compiling(on: bool = True) -> Iterator[None]:
    """Pieces run compiled inside the block."""
    before = getattr(_state, "on", False)
    _state.on = on
    try:
        yield
    finally:
        _state.on = before


def piece(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Marks such a function. One compilation serves any number of rows: only the last axis of a tensor is fixed."""
    compiled: list[Callable[..., torch.Tensor]] = []

    @functools.wraps(function)
    def call(*arguments: Any) -> torch.Tensor:
        if not getattr(_state, "on", False) or torch.compiler.is_compiling():
            return function(*arguments)
        if not compiled:
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
            compiled.append(torch.compile(function, fullgraph=True))
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                for axis in range(argument.ndim - 1):
                    torch._dynamo.maybe_mark_dynamic(argument, axis)
        return compiled[0](*arguments)

    return call
