"""Updates: sample -> step -> write back, in `HookRunner.run`.

Storage provides the batches, Capture replays the step as a CUDA graph. TransformRunner runs transform hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from rl_lab.buffers.batches import BatchStream
from rl_lab.buffers.trajectory import TrajectoryAdapter
from rl_lab.errors import LabError
from rl_lab.orchestration.phase_scheduler import PhaseScheduler
from rl_lab.orchestration.phases import PhaseDefinition
from rl_lab.protocols import BatchSource, Buffer
from rl_lab.records import AnyHook, Batch, Hook, PlainHook, Spec, TransformHook, UpdateResult
from rl_lab.utils import ranks
from rl_lab.utils.device import tensor_float
from rl_lab.utils.metrics import MetricMeter, Stopwatch
from rl_lab.utils.seeding import Generators


class Done(NamedTuple):
    """What one call of a runner did, for `PhaseScheduler.advance`."""

    steps: int = 0  # environment steps
    finished: bool = True  # False: a transform has not reached the end of the buffer


class Runner(Protocol):
    """Runs the calls of one hook: a HookRunner, a TransformRunner or an EvolveRunner."""

    @property
    def hook(self) -> AnyHook: ...
    @property
    def meter(self) -> MetricMeter: ...
    @property
    def captures(self) -> bool:
        """Whether the hook's step becomes a CUDA graph."""

    @property
    def graph_bytes(self) -> int:
        """Device memory of its CUDA graph."""

    def perform(
        self, phase: PhaseDefinition, scheduler: PhaseScheduler, should_stop: Callable[[], bool]
    ) -> Done | None:
        """Run the hook once; return None if `should_stop` ended it before it was complete."""

    def close(self) -> None: ...


class HookRunner:
    """Runs an update hook: holds its static inputs and its captured step. One call of `run` is one update."""

    def __init__(
        self,
        name: str,
        hook: Hook | PlainHook,
        *,
        device: torch.device,
        generator: torch.Generator,  # on the device: the hook's noise
        storage: Storage | None = None,  # provides the batches of `perform`
        capture: bool = True,
        tensor_float: bool = False,  # float32 matrix products in TensorFloat-32
        stopwatch: Stopwatch | None = None,
        say: Callable[[str], None] | None = None,  # told when the step is captured
    ) -> None:
        self.name = name
        self.hook = hook
        self.device = device
        self.generator = generator
        self.storage = storage
        self.tensor_float = tensor_float
        self.stopwatch = stopwatch or Stopwatch()
        self.say = say
        self.meter = MetricMeter()
        self.capture = Capture(
            hook.step,
            device=device,
            enabled=capture and not isinstance(hook, PlainHook),
            on_captured=self._tell,
        )
        noise = {} if isinstance(hook, PlainHook) else hook.noise
        self._noise = {
            name: torch.empty(spec.shape, device=device, dtype=torch.float32) for name, spec in noise.items()
        }
        self._scalars: dict[str, torch.Tensor] = {}
        self._scalar_values: torch.Tensor | None = None
        self._last_scalars: list[float] = []

    def perform(
        self, phase: PhaseDefinition, scheduler: PhaseScheduler, should_stop: Callable[[], bool]
    ) -> Done:
        """Run one update in this phase, with the stream of batches of its buffer."""
        stream = self.storage.stream(self.name, phase) if self.storage is not None else None
        self.run(stream, scheduler.view(), scheduler.totals, key=(phase.freeze, id(stream)))
        return DONE

    def run(
        self,
        stream: BatchStream | None,  # None for a hook without a batch
        phase: Mapping[str, Any],
        counters: Mapping[str, int],
        *,
        key: Hashable = None,  # a new one discards the captured graph
    ) -> None:
        """Sample a batch, run the step, write back; metrics stay on the device until `meter.drain()`."""
        batch: Batch | None = None
        if stream is not None:
            with self.stopwatch("sample"):
                batch = stream.next()  # the same tensors every time
        with self.stopwatch("update"), tensor_float(self.tensor_float), ranks.joint():
            if isinstance(self.hook, PlainHook):
                result = self.hook.step(None if batch is None else batch.transitions(), phase=phase)
            else:
                self._set_scalars(self.hook, phase, counters)
                self._draw_noise(self.hook)
                result = self.capture(batch, self._scalars, self._noise, key=key)
        if not isinstance(result, UpdateResult):
            result = UpdateResult(metrics=result or {})
        self.meter.add(result.metrics)
        if stream is None or batch is None:
            return
        if result.write_back and batch.index is not None:
            with self.stopwatch("write_back"):
                stream.write_back(batch.index, result.write_back, offset=stream.spec.context)
        stream.prefetch_next()  # while the device computes

    @property
    def captures(self) -> bool:
        return self.capture.enabled

    @property
    def graph_bytes(self) -> int:
        return self.capture.graph_bytes

    def close(self) -> None:
        """Nothing to close."""

    def _set_scalars(self, hook: Hook, phase: Mapping[str, Any], counters: Mapping[str, int]) -> None:
        """Copy the scalars of this call to the device tensor that the step reads, if they changed."""
        if hook.scalars is None:
            return
        values = hook.scalars(phase, counters)
        scalars = [float(value) for value in values.values()]
        if self._scalar_values is None:
            self._scalar_values = torch.zeros(len(scalars), device=self.device)
            self._scalars.update(zip(values, self._scalar_values.unbind()))
        if scalars != self._last_scalars:
            self._scalar_values.copy_(torch.tensor(scalars), non_blocking=True)
            self._last_scalars = scalars

    def _draw_noise(self, hook: Hook) -> None:
        for name, spec in hook.noise.items():
            if spec.kind == "normal":
                self._noise[name].normal_(generator=self.generator)
            else:
                self._noise[name].uniform_(generator=self.generator)

    def _tell(self, graph_bytes: int) -> None:
        if self.say is not None:
            self.say(f"{self.name} is captured: its CUDA graph uses {graph_bytes / 2**20:,.0f} MiB")


DONE = Done()
TRANSFORM_ROWS = 256  # time steps per call of a transform hook


class TransformRunner:
    """Runs a transform hook over the first buffer of its phase, a part at a time; resumable."""

    captures, graph_bytes = False, 0

    def __init__(self, name: str, hook: TransformHook, *, storage: Storage) -> None:
        self.name = name
        self.hook = hook
        self.storage = storage
        self.meter = MetricMeter()
        self.position = 0  # of the next row

    def perform(
        self, phase: PhaseDefinition, scheduler: PhaseScheduler, should_stop: Callable[[], bool]
    ) -> Done:
        """Add columns to the next rows of the phase's buffer."""
        buffer = self.storage.buffers[next(iter(phase.buffer))]
        position = max(self.position, buffer.oldest_position)
        count = min(TRANSFORM_ROWS, buffer.total_rows - position)
        if count > 0:
            with torch.no_grad():
                columns = self.hook.step(buffer.read(position, count))
            buffer.write(position, columns)
        position += max(count, 0)
        # Ranks may have different numbers of rows: the first to finish has nothing to do in the calls that follow.
        finished = ranks.all_ranks(position >= buffer.total_rows)
        self.position = 0 if finished else position
        return Done(finished=finished)

    def close(self) -> None:
        """Nothing to close."""


# ---------------------------------------------------------------- where batches come from


class Storage:
    """The buffers of a run: stores collected rows, and provides one stream of batches per hook and mixture.

    Each buffer has a TrajectoryAdapter, which converts trajectories of transitions into rows.
    """

    def __init__(
        self,
        buffers: Mapping[str, Buffer],
        hooks: Mapping[str, AnyHook],
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
        self._sources: dict[tuple[tuple[str, float], ...], BatchSource] = {}
        self._ready: dict[tuple[str, str], bool] = {}  # of all ranks, until something is collected

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

    def source(self, phase: PhaseDefinition) -> BatchSource:
        """Return the buffer of the phase, or its mixture of buffers."""
        shares = tuple(phase.buffer.items())
        if len(shares) == 1:
            return self.buffers[shares[0][0]]
        if shares not in self._sources:
            from rl_lab.buffers.mix import BufferMix

            self._sources[shares] = BufferMix({name: (self.buffers[name], share) for name, share in shares})
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
        if hook is None or hook.batch is None or isinstance(hook, TransformHook):
            return True
        if ranks.size() == 1:
            return self.source(phase).ready(hook.batch)
        key = (hook_name, phase.name)
        if key not in self._ready:
            self._ready[key] = ranks.all_ranks(self.source(phase).ready(hook.batch))
        return self._ready[key]

    def forget_ready(self) -> None:
        """Ask all ranks again whether their buffers have enough data; called on all of them together."""
        self._ready.clear()

    def shortage(self, hook_name: str, phase: PhaseDefinition) -> str:
        spec = self.hooks[hook_name].batch
        return "" if spec is None else self.source(phase).shortage(spec)

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
        on_captured: Callable[[int], None] | None = None,  # called with the graph's bytes
    ) -> None:
        self.function = function
        self.device = device
        self.enabled = enabled and device.type == "cuda"
        self.eager_calls = eager_calls
        self.on_captured = on_captured
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
        # The thread that watches NCCL's exchanges may query events while this thread records.
        mode = "thread_local" if ranks.joined() else "global"
        with torch.cuda.graph(graph, pool=Capture._pool, capture_error_mode=mode):
            self._result = self.function(*arguments)
        self._graph = graph
        Capture._pooled.add(graph)
        # Recording may first free unused blocks, so this is a lower bound.
        self.graph_bytes = max(0, torch.cuda.memory_reserved(self.device) - before)
        self._arguments = tuple(id(argument) for argument in arguments)
        if self.on_captured is not None:
            self.on_captured(self.graph_bytes)

    def _check_same(self, arguments: tuple[Any, ...]) -> None:
        if tuple(id(argument) for argument in arguments) != self._arguments:
            raise RuntimeError(
                "a captured step must be called with the same containers that it was recorded with"
            )
