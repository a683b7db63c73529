"""The fast path of networks: fused kernels, compiled pointwise functions, side streams.

A layer with two implementations has an attribute `fast`, False at first: its plain form is the specification, and
tests compare the fast one with it. `use_fast_path` sets it, once, when a workflow binds its parts; so
`workflow.rssm.fast` says which form runs. A layer whose settings have no fused form has `has_fast_form` False and stays
plain. Fused operations are Triton kernels on CUDA and plain torch code elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from rl_lab.errors import ConfigError

CHOICES = ("auto", "on", "off")
_compiling = threading.local()  # of `compiling`


def use_fast_path(on: bool, *parts: Any) -> None:
    """Choose the fast or the plain form of every layer of these parts: modules, optimizers, planners."""
    for part in parts:
        for layer in part.modules() if isinstance(part, nn.Module) else [part]:
            if isinstance(getattr(layer, "fast", None), bool):
                layer.fast = on and getattr(layer, "has_fast_form", True)


def kernel_without_gradient(x: torch.Tensor) -> bool:
    """Whether a kernel without a backward pass can compute with x."""
    return x.is_cuda and not (x.requires_grad and torch.is_grad_enabled())


def resolve_fast_path(choice: str | bool, device: torch.device | str) -> bool:
    """Whether to use the fast path; `auto`: on CUDA with Triton, which torch's CUDA builds include."""
    name = {True: "on", False: "off"}.get(choice, choice) if isinstance(choice, bool) else str(choice)
    if name not in CHOICES:
        raise ConfigError(f"training.fast_path is '{choice}': set it to one of {', '.join(CHOICES)}")
    on_cuda = torch.device(device).type == "cuda"
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "on" and on_cuda and not has_triton:
        raise ConfigError("training.fast_path=on needs the package triton on CUDA: pip install triton")
    return name == "on" or (name == "auto" and on_cuda and has_triton)


# --- Compiled pointwise functions ---
# Small layers are bound by kernel launches. Compiling a complete network takes minutes; compiling only the
# operations between two matrix products takes seconds, and all layers share the same few functions.

# One function is called with many widths and dtypes, with and without gradients; torch's default limit is 8.
RECOMPILE_LIMIT = 64


@contextlib.contextmanager
def compiling(on: bool = True) -> Iterator[None]:
    """Run functions marked with `compiled_pointwise` compiled inside the block."""
    before = getattr(_compiling, "on", False)
    _compiling.on = on
    try:
        yield
    finally:
        _compiling.on = before


def compiled_pointwise(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorator: compile the function inside a `compiling` block, run it as it is elsewhere.

    All axes of a tensor but the last are dynamic, so one compilation serves any number of rows.
    """
    compiled: list[Callable[..., torch.Tensor]] = []

    @functools.wraps(function)
    def call(*arguments: Any) -> torch.Tensor:
        if not getattr(_compiling, "on", False) or torch.compiler.is_compiling():
            return function(*arguments)
        first = not compiled
        if first:
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, RECOMPILE_LIMIT)
            compiled.append(torch.compile(function, fullgraph=True))
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                for axis in range(argument.ndim - 1):
                    torch._dynamo.maybe_mark_dynamic(argument, axis)
        # What the compiler imports may change which warnings are shown: then every environment step could print some.
        with warnings.catch_warnings() if first else contextlib.nullcontext():
            return compiled[0](*arguments)

    return call


# --- Side streams ---

T = TypeVar("T")
_streams: dict[tuple[int, int], Any] = {}


class SideStream(Generic[T]):
    """Runs work(*inputs) on a side stream, concurrently with the current stream; `join` returns the result.

    Work on one stream runs in order. Each result must be joined; gradients may flow through it only in later
    work on the same stream. On the CPU, and if not `fast`, the work runs immediately.

    A CUDA graph can capture it. `record_stream` is not needed, because the same stream starts and joins the
    work: its inputs are held until it is joined, and the side stream reuses its memory only after the next
    start, which waits for the current stream.
    """

    def __init__(
        self, work: Callable[..., T], *inputs: Any, fast: bool, device: torch.device, stream: int = 0
    ) -> None:
        self._inputs = inputs
        self._stream: Any = None
        if device.type != "cuda" or not fast:
            self._result = work(*inputs)
            return
        self._device = device
        self._stream = _stream(device, stream)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            self._result = work(*inputs)

    def join(self) -> T:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream = None
        self._inputs = ()
        return self._result


def _stream(device: torch.device, number: int) -> Any:
    index = torch.cuda.current_device() if device.index is None else device.index
    if (index, number) not in _streams:
        _streams[index, number] = torch.cuda.Stream(device)
    return _streams[index, number]
