"""The buffers of a run: where collected rows go, and where each hook's batches come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rl_lab.buffers.mix import BufferMix
from rl_lab.buffers.plain import PlainDoor
from rl_lab.buffers.stream import BatchStream
from rl_lab.errors import LabError
from rl_lab.orchestration.phases import PhaseDefinition
from rl_lab.records import Hook, Spec
from rl_lab.utils.seeding import Generators


class Storage:
    """Named buffers, one plain-trajectory door each, and one stream of batches per hook and mixture."""

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
        self._doors = {name: PlainDoor(spec) for name in self.buffers}
        self._streams: dict[str, BatchStream] = {}
        self._sources: dict[tuple[tuple[str, float], ...], Any] = {}

    def store(self, phase: PhaseDefinition, trajectory: Mapping[str, Any]) -> None:
        """Put rows into the phase's (first) buffer; a plain trajectory is converted at the door."""
        if not phase.buffer:
            raise LabError(f"phase '{phase.name}' collects, but the config has no buffers")
        name = next(iter(phase.buffer))
        plain = "observations" in trajectory
        rows = self._doors[name].convert(trajectory) if plain else trajectory
        if rows:
            self.buffers[name].add(rows)

    def source(self, phase: PhaseDefinition) -> Any:
        """The phase's buffer, or its mixture."""
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
        """Batches for a hook in this phase; None for a hook without a batch."""
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

    def settle(self) -> None:
        """Give back batches that were fetched ahead, so that a resumed run draws them again."""
        for stream in self._streams.values():
            stream.settle()

    def restart_streams(self, environments: Sequence[int]) -> None:
        """These environments began a new episode out of turn: their plain rows begin anew too."""
        for door in self._doors.values():
            door.restart(environments)

    def get_state(self) -> dict[str, Any]:
        return {
            "buffers": {name: buffer.get_state() for name, buffer in self.buffers.items()},
            "doors": {name: door.get_state() for name, door in self._doors.items()},
        }

    def set_state(self, state: Mapping[str, Any], skip: Sequence[str] = ()) -> None:
        """`skip`: buffers without their rows; what their samplers remember would point at nothing."""
        for name, buffer_state in state["buffers"].items():
            if name not in skip:
                self.buffers[name].set_state(buffer_state)
        for name, door_state in state["doors"].items():
            self._doors[name].set_state(door_state)

    @staticmethod
    def _stream_key(hook_name: str, phase: PhaseDefinition) -> str:
        return "+".join([hook_name, *phase.buffer])
