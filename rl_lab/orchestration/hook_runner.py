"""Runs one hook of a workflow: sample, set scalars, draw noise, step, write back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_lab.orchestration.capture import Capture
from rl_lab.records import Batch, Hook, UpdateResult
from rl_lab.utils.metrics import MetricMeter
from rl_lab.utils.tensor_float import tensor_float
from rl_lab.utils.timing import Stopwatch


class HookRunner:
    """Keeps the hook's static inputs and its captured step; one call is one update."""

    def __init__(
        self,
        name: str,
        hook: Hook,
        *,
        device: torch.device,
        generator: torch.Generator,  # on the device: the hook's noise
        capture: bool = True,
        tensor_float: bool = False,  # float32 products in TensorFloat-32
        stopwatch: Stopwatch | None = None,
    ) -> None:
        self.name = name
        self.hook = hook
        self.device = device
        self.generator = generator
        self.tensor_float = tensor_float
        self.stopwatch = stopwatch or Stopwatch()
        self.meter = MetricMeter()
        self.capture = Capture(hook.step, device=device, enabled=capture and not hook.plain)
        self._noise = {
            name: torch.empty(spec.shape, device=device, dtype=torch.float32)
            for name, spec in hook.noise.items()
        }
        self._scalars: dict[str, torch.Tensor] = {}
        self._scalar_values: torch.Tensor | None = None
        self._last_scalars: list[float] = []

    def run(
        self,
        stream: Any,  # BatchStream, or None for a hook without a batch
        phase: Mapping[str, Any],
        counters: Mapping[str, int],
        *,
        key: Any = None,
    ) -> None:
        """One update; its metrics stay on the device until `meter.drain()`."""
        batch: Batch | None = None
        if stream is not None:
            with self.stopwatch("sample"):
                batch = stream.next()
        with self.stopwatch("update"), tensor_float(self.tensor_float):
            if self.hook.plain:
                result = self.hook.step(batch, phase=phase)
            else:
                self._set_scalars(phase, counters)
                self._draw_noise()
                result = self.capture(batch, self._scalars, self._noise, key=key)
        if not isinstance(result, UpdateResult):
            result = UpdateResult(metrics=result or {})
        self.meter.add(result.metrics)
        if result.write_back and stream is not None and batch is not None and batch.index is not None:
            with self.stopwatch("write_back"):
                assert self.hook.batch is not None
                stream.write_back(batch.index, result.write_back, offset=self.hook.batch.context)
        if stream is not None:
            stream.ahead()  # the next batch is fetched while the device works on this one

    def _set_scalars(self, phase: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Copy this call's numbers into the device buffer that the step reads, if they changed."""
        if self.hook.scalars is None:
            return
        values = self.hook.scalars(phase, counters)
        numbers = [float(value) for value in values.values()]
        if self._scalar_values is None:
            self._scalar_values = torch.zeros(len(numbers), device=self.device)
            self._scalars.update(zip(values, self._scalar_values.unbind()))
        if numbers != self._last_scalars:
            self._scalar_values.copy_(torch.tensor(numbers), non_blocking=True)
            self._last_scalars = numbers

    def _draw_noise(self) -> None:
        for name, spec in self.hook.noise.items():
            if spec.kind == "normal":
                self._noise[name].normal_(generator=self.generator)
            else:
                self._noise[name].uniform_(generator=self.generator)
