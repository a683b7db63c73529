"""Finds lines of captured steps, on a CPU, that read tensors on the host or make them from its numbers.

A recorded CUDA graph can do neither, so that such a step fails on a GPU, in its fourth call.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from rl_lab.orchestration.updates import EAGER_CALLS, Capture

FROM_HOST = {torch.tensor: "torch.tensor", torch.from_numpy: "torch.from_numpy"}
TO_HOST = {
    getattr(torch.Tensor, name): f"Tensor.{name}"
    for name in ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
} | {torch.nonzero: "torch.nonzero", torch.masked_select: "torch.masked_select"}
# PyTorch's Adam counts on the host on a CPU, on the device (`capturable`) where it is captured.
ALLOWED = "optimizer.step()"


class HostReads(TorchFunctionMode):
    """Collects lines of rl_lab that read from the device or copy to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.calls = 0  # that were checked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = FROM_HOST.get(func) or TO_HOST.get(func)
        if func is torch.as_tensor and not isinstance(args[0], torch.Tensor):
            name = "torch.as_tensor"
        if func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) == torch.bool:
            name = "an index of bools"
        if name:
            lines = [line for line in traceback.extract_stack() if "/rl_lab/" in line.filename]
            if lines and lines[-1].line != ALLOWED:
                place = lines[-1]
                self.found.add(f"{place.filename}:{place.lineno} {name}: {place.line}")
        return func(*args, **(kwargs or {}))

    def checked(self, function: Callable[..., Any], eager_calls: int = EAGER_CALLS) -> Callable[..., Any]:
        """The function; its calls after the eager ones are checked."""
        before = 0

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal before
            before += 1
            if before <= eager_calls:
                return function(*arguments, **named)
            self.calls += 1
            with self:
                return function(*arguments, **named)

        return call


@contextmanager
def host_reads(monkeypatch: pytest.MonkeyPatch, eager_calls: int = EAGER_CALLS) -> Iterator[HostReads]:
    """Check what `Capture` would record: each call after the eager ones."""
    reads = HostReads()
    steps: dict[Capture, Callable[..., Any]] = {}

    def call(self: Capture, *arguments: Any, key: Any = None) -> Any:
        step = steps.setdefault(self, reads.checked(self.function, eager_calls))
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Capture, "__call__", call)
        yield reads
