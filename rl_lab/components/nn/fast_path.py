"""Whether the fast forms of networks are used: fused kernels, a scan with its own backward pass, cheaper convolutions.

The plain modules are the specification; tests hold the fast forms to their numbers. A workflow switches them on around
the work that they speed up. On CUDA the pieces are Triton kernels, elsewhere their plain torch definitions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

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


# --------------------
# Small functions that become one kernel each where a workflow asks for it.
#
# A network of small layers is bound by the number of kernels it launches. Compiling it whole takes minutes; compiling
# only what stands between two matrix products takes seconds, and the same few functions serve every layer. The plain
# function is the specification: outside the `compiling` block it is what runs.


# Widths, number formats, with and without gradients: one piece serves more kinds of calls than torch expects (8).
RECOMPILE_LIMIT = 64


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


# --------------------
# Work that the GPU may do beside other work: a stream that leaves the current one and comes back to it.
#
# It can be recorded into a CUDA graph. Memory is safe without more ado, because each lane's work is asked for and joined by
# one and the same stream: what the work reads is held until it is joined, and the lane reuses what it allocated only after
# the next start, which waits for all that was asked of the current stream until then.


T = TypeVar("T")
_streams: dict[tuple[int, int], Any] = {}


class Aside(Generic[T]):
    """Starts work(*inputs) on a lane's stream; `join` gives its result, which the current stream may use from then on.

    Work of one lane is done in order. It has to be joined, and without gradients for others: what it gives may go on
    backward only in later work of the same lane.
    On the CPU, and on the plain path, it is a call.
    """

    def __init__(self, work: Callable[..., T], *inputs: Any, device: torch.device, lane: int = 0) -> None:
        self._inputs = inputs
        self._stream: Any = None
        if device.type != "cuda" or not fast():
            self._result = work(*inputs)
            return
        self._device = device
        self._stream = _stream(device, lane)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._result = work(*inputs)

    def join(self) -> T:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream = None
        self._inputs = ()
        return self._result


def _stream(device: torch.device, lane: int) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    if (index, lane) not in _streams:
        _streams[index, lane] = torch.cuda.Stream(device)
    return _streams[index, lane]
