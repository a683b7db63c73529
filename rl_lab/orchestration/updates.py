"""Updates: HookRunner runs one hook of a workflow (sample -> step -> write back).

Storage provides the batches, Capture replays the step as a CUDA graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.mix import BufferMix
from rl_lab.buffers.trajectory import TrajectoryAdapter
from rl_lab.errors import LabError
from rl_lab.launch.runtime import tensor_float
from rl_lab.orchestration.phases import PhaseDefinition
from rl_lab.records import Batch, Hook, Spec, UpdateResult
from rl_lab.utils.metrics import MetricMeter, Stopwatch
from rl_lab.utils.seeding import Generators


class HookRunner:
    """Runs one hook: holds its static inputs and its captured step. One call of `run` is one update."""

    def __init__(
        self,
        name: str,
        hook: Hook,
        *,
        device: torch.device,
        generator: torch.Generator,  # on the device: the hook's noise
        capture: bool = True,
        tensor_float: bool = False,  # float32 matrix products in TensorFloat-32
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
        """Sample a batch, run the step, write back; metrics stay on the device until `meter.drain()`."""
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
            stream.prefetch_next()  # while the device computes

    def _set_scalars(self, phase: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Copy the scalars of this call to the device tensor that the step reads, if they changed."""
        if self.hook.scalars is None:
            return
        values = self.hook.scalars(phase, counters)
        scalars = [float(value) for value in values.values()]
        if self._scalar_values is None:
            self._scalar_values = torch.zeros(len(scalars), device=self.device)
            self._scalars.update(zip(values, self._scalar_values.unbind()))
        if scalars != self._last_scalars:
            self._scalar_values.copy_(torch.tensor(scalars), non_blocking=True)
            self._last_scalars = scalars

    def _draw_noise(self) -> None:
        for name, spec in self.hook.noise.items():
            if spec.kind == "normal":
                self._noise[name].normal_(generator=self.generator)
            else:
                self._noise[name].uniform_(generator=self.generator)


# ---------------------------------------------------------------- where batches come from


class Storage:
    """The buffers of a run: stores collected rows, and provides one stream of batches per hook and mixture.

    Each buffer has a TrajectoryAdapter, which converts trajectories of transitions into rows.
    """

    def __init__(
        self,
        buffers: Mapping[str, Any],
        hooks: Mapping[str, Hook],
        *,
        spec: Spec,
        generators: Generators,
        device: torch.device,
        prefetch: int = 0,
    ) -> None:
        self.buffers = dict(buffers)
        self.hooks = hooks
        self.generators = generators
        self.device = device
        self.prefetch = prefetch
        self._adapters = {name: TrajectoryAdapter(spec) for name in self.buffers}
        self._streams: dict[str, BatchStream] = {}
        self._sources: dict[tuple[tuple[str, float], ...], Any] = {}

    def store(self, phase: PhaseDefinition, trajectory: Mapping[str, Any]) -> None:
        """Add rows, or a trajectory of transitions, to the first buffer of the phase."""
        if not phase.buffer:
            raise LabError(
                f"phase '{phase.name}' collects, but the config has no buffers: add one under buffers"
            )
        name = next(iter(phase.buffer))
        is_plain = "observations" in trajectory  # transitions, not rows
        rows = self._adapters[name].convert(trajectory) if is_plain else trajectory
        if rows:
            self.buffers[name].add(rows)

    def source(self, phase: PhaseDefinition) -> Any:
        """Return the buffer of the phase, or its mixture of buffers."""
        shares = tuple(phase.buffer.items())
        if shares not in self._sources:
            if len(shares) == 1:
                self._sources[shares] = self.buffers[shares[0][0]]
            else:
                self._sources[shares] = BufferMix(
                    {name: (self.buffers[name], share) for name, share in shares}
                )
        return self._sources[shares]

    def stream(self, hook_name: str, phase: PhaseDefinition) -> BatchStream | None:
        """Return the stream of batches for a hook in this phase, or None for a hook without a batch."""
        spec = self.hooks[hook_name].batch
        if spec is None:
            return None
        key = self._stream_key(hook_name, phase)
        if key not in self._streams:
            generator = self.generators.cpu(f"sample/{key}")
            self._streams[key] = BatchStream(
                self.source(phase), spec, generator, prefetch=self.prefetch, device=self.device
            )
        return self._streams[key]

    def ready(self, hook_name: str, phase: PhaseDefinition) -> bool:
        hook = self.hooks.get(hook_name)
        if hook is None or hook.batch is None or hook.kind == "transform":
            return True
        return bool(self.source(phase).ready(hook.batch))

    def shortage(self, hook_name: str, phase: PhaseDefinition) -> str:
        spec = self.hooks[hook_name].batch
        return "" if spec is None else str(self.source(phase).shortage(spec))

    def drop_prefetched(self) -> None:
        """Discard prefetched batches, so that a resumed run samples them again."""
        for stream in self._streams.values():
            stream.drop_prefetched()

    def restart_streams(self, environments: Sequence[int]) -> None:
        """Start new episodes in the adapters of these environments, whose episodes could not be continued."""
        for adapter in self._adapters.values():
            adapter.restart(environments)

    def get_state(self) -> dict[str, Any]:
        return {
            "buffers": {name: buffer.get_state() for name, buffer in self.buffers.items()},
            "doors": {name: adapter.get_state() for name, adapter in self._adapters.items()},
        }

    def set_state(self, state: Mapping[str, Any], skip: Sequence[str] = ()) -> None:
        """Restore all buffers except `skip`, whose rows are missing: their sampler state would be invalid."""
        for name, buffer_state in state["buffers"].items():
            if name not in skip:
                self.buffers[name].set_state(buffer_state)
        for name, adapter_state in state["doors"].items():
            self._adapters[name].set_state(adapter_state)

    @staticmethod
    def _stream_key(hook_name: str, phase: PhaseDefinition) -> str:
        return "+".join([hook_name, *phase.buffer])


# ---------------------------------------------------------------- CUDA graphs


EAGER_CALLS = 3  # before recording: they create cuBLAS handles, autotuning results and optimizer state


class Capture:
    """Calls a function of static tensors; on CUDA it is recorded once and then replayed as a CUDA graph.

    The function must be pure, with inputs at fixed addresses. Its first calls run eagerly (they are real
    updates, and create lazy state such as optimizer moments), the next call is recorded, and from then on one
    graph launch runs forward, backward, clipping, optimizer and target networks. Without CUDA, or if
    disabled, every call is eager: the eager path is the specification.

    All captures share one memory pool: their graphs never run at the same time, and the result of one is read
    before another runs.
    """

    _pool: ClassVar[Any] = None
    _pooled: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # graphs that use the pool

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
        """Run or replay the function once. A new `key` (frozen parts, stream) discards the recorded graph."""
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
        # Warm-up needs a side stream: work on the default stream would become part of the recording.
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            result = self.function(*arguments)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return result

    def _record(self, arguments: tuple[Any, ...]) -> None:
        if not Capture._pooled:  # the first graph, or the pool was freed with the last one
            Capture._pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_reserved(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=Capture._pool):
            self._result = self.function(*arguments)
        self._graph = graph
        Capture._pooled.add(graph)
        # Recording may first free unused blocks, so this is a lower bound.
        self.graph_bytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        self._arguments = tuple(id(argument) for argument in arguments)

    def _check_same(self, arguments: tuple[Any, ...]) -> None:
        if tuple(id(argument) for argument in arguments) != self._arguments:
            raise RuntimeError(
                "a captured step must be called with the same containers that it was recorded with"
            )
