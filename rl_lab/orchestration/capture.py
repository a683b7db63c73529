"""The one place that knows CUDA graphs.

A hook's step is a pure function of tensors at fixed addresses. On CUDA its first calls run eagerly (they are
real updates, and they let lazily made state such as optimizer moments come to be), the next is recorded, and
from then on one graph launch replays forward, backward, clipping, optimizer and targets. Without CUDA, or with
capture off, every call is a plain call: the eager path is the specification.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import torch

EAGER_CALLS = 3  # before recording: cuBLAS handles, autotuning, optimizer state


class Capture:
    """Wraps a function of static tensors; `__call__` runs or replays it and returns its static result.

    All captures share one memory pool: their graphs never run at the same time, and what one returns is read
    before another runs.
    """

    _pool: ClassVar[Any] = None
    _pooled: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # graphs that live in the pool

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        device: torch.device,
        enabled: bool = True,
        eager_calls: int = EAGER_CALLS,
    ) -> None:
        self.function = function
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        self.eager_calls = eager_calls
        self._key: Hashable = None
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._arguments: tuple[int, ...] = ()
        self._result: Any = None
        self.graph_bytes = 0  # device memory that recording added

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self, *arguments: Any, key: Hashable = None) -> Any:
        """Run once. A new `key` (phase, freezing, shapes) throws the old recording away."""
        if not self.enabled:
            return self.function(*arguments)
        if key != self._key:
            self.reset()
            self._key = key
        if self._graph is None and self._calls < self.eager_calls:
            self._calls += 1
            return self._on_side_stream(arguments)
        if self._graph is None:
            self._record(arguments)
        self._check_same(arguments)
        assert self._graph is not None
        self._graph.replay()
        return self._result

    def reset(self) -> None:
        self._graph = None
        self._result = None
        self._calls = 0

    def _on_side_stream(self, arguments: tuple[Any, ...]) -> Any:
        # Warm-up belongs on a side stream: work on the default stream would be dragged into the recording.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            result = self.function(*arguments)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return result

    def _record(self, arguments: tuple[Any, ...]) -> None:
        if not Capture._pooled:  # the first graph, or the pool went with the last one
            Capture._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=Capture._pool):
            self._result = self.function(*arguments)
        self._graph = graph
        Capture._pooled.add(graph)
        # Recording may first give unused blocks back, so this can only be a lower bound.
        self.graph_bytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        self._arguments = tuple(id(argument) for argument in arguments)

    def _check_same(self, arguments: tuple[Any, ...]) -> None:
        if tuple(id(argument) for argument in arguments) != self._arguments:
            raise RuntimeError("a captured step was called with other containers than it was recorded with")
