"""Work that the GPU may do beside other work: a stream that leaves the current one and comes back to it.

It can be recorded into a CUDA graph. Memory is safe without more ado, because each lane's work is asked for and joined by
one and the same stream: what the work reads is held until it is joined, and the lane reuses what it allocated only after
the next start, which waits for all that was asked of the current stream until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from rl_lab.components.nn.fast_path import fast

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
