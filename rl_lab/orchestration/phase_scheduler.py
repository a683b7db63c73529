"""The PhaseScheduler: a state machine that runs through the phases and returns the next action.

It takes counts and returns names, and does not import torch. A *cycle* is one pass over the hooks of a phase.
A phase ends when its duration is reached: immediately for updates, after the current cycle for steps and
cycles. An evaluation that is due at the last update is made before the phase ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rl_lab.errors import CheckpointError, ConfigError
from rl_lab.orchestration.phases import Every, HookUse, PhaseDefinition, Ratio


class PhaseView(Mapping[str, Any]):
    """A read-only view of the running phase for workflows: `name`, `type`, `progress`, `iteration`, `set`…"""

    def __init__(self, phase: PhaseDefinition, scheduler: PhaseScheduler) -> None:
        self._scheduler = scheduler
        collect = next((use.options for use in phase.hooks if use.kind == "collect"), {})
        self._fields = {
            "name": phase.name,
            "type": phase.type,
            "iteration": phase.iteration,
            "set": phase.set,
            "freeze": phase.freeze,
            "collect": collect,
        }

    def __getitem__(self, key: str) -> Any:
        return self._scheduler.progress() if key == "progress" else self._fields[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._fields
        yield "progress"

    def __len__(self) -> int:
        return len(self._fields) + 1


class PhaseScheduler:
    """`next_action()` returns the name of the next action; `advance(action, …)` counts it as done."""

    def __init__(
        self,
        phases: list[PhaseDefinition],
        *,
        total_timesteps: int | None = None,
        is_ready: Callable[[str, PhaseDefinition], bool] = lambda hook, phase: True,
    ) -> None:
        for phase in phases:
            unbounded = not (phase.duration_steps or phase.duration_updates or phase.duration_cycles)
            if unbounded and not total_timesteps:
                raise ConfigError(
                    f"phase '{phase.name}' has no duration: set one, or set training.total_timesteps"
                )
            if unbounded and not phase.collects:
                raise ConfigError(
                    f"phase '{phase.name}' does not collect and would never end: set a duration"
                )
        self.phases = phases
        self.total_timesteps = total_timesteps
        self.is_ready = is_ready
        self.totals = {"env_steps": 0, "updates": 0, "cycles": 0, "episodes": 0}
        self.hook_calls: dict[str, int] = {}
        self.skipped: set[str] = set()  # updates that were skipped because the buffer was not ready
        self._out_of_steps = False  # total_timesteps ended training within a phase
        self._start_phase(0)

    # ---------------------------------------------------------------- actions

    def current_phase(self) -> PhaseDefinition | None:
        if self._out_of_steps or self._index >= len(self.phases):
            return None
        return self.phases[self._index]

    def phase_index(self) -> int:
        """Index of the running phase in `phases`; their number when training has ended."""
        return self._index

    def view(self) -> PhaseView:
        assert self._view is not None
        return self._view

    def next_action(self) -> str | None:
        """Return the name of the next action, or None when training has ended."""
        idle_cycles = 0
        while (phase := self.current_phase()) is not None:
            if self._updates_over(phase) and not self._evaluation_due(phase):
                self._start_phase(self._index + 1)
                continue
            while self._position < len(phase.hooks):
                if self._calls_due(phase, self._position) > 0:
                    return phase.hooks[self._position].name
                self._position += 1
                self._calls = self._steps_here = 0
            idle_cycles = 0 if self._active else idle_cycles + 1
            self._end_cycle(phase)
            if idle_cycles > 1 and not phase.duration_cycles:
                raise ConfigError(
                    f"phase '{phase.name}' has nothing to do, because none of its hooks "
                    f"({', '.join(use.name for use in phase.hooks)}) can run: collect data first"
                )
        return None

    def advance(self, action: str, *, steps: int = 0, episodes: int = 0, done: bool = True) -> None:
        """Count one finished action. `done=False`: a transform has not reached the end of the buffer."""
        phase = self.current_phase()
        if phase is None or phase.hooks[self._position].name != action:
            raise ValueError(f"'{action}' is not the action that next_action() returned")
        use = phase.hooks[self._position]
        self._active = True
        self._calls += 1
        self._steps_here += steps
        self.hook_calls[action] = self.hook_calls.get(action, 0) + 1
        self.totals["env_steps"] += steps
        self.totals["episodes"] += episodes
        self.counts["env_steps"] += steps
        if use.kind in ("update", "evolve"):
            self.totals["updates"] += 1
            self.counts["updates"] += 1
        if use.kind == "transform" and done:
            self._calls = use.repeat
        elif use.kind == "transform":
            self._calls = 0
        if self._position in self._ratios:
            self._ratios[self._position].spend()
        if self._position in self._cadences:
            self._cadences[self._position].fired(self.totals)
        if steps:
            for position, ratio in self._ratios.items():
                if self.is_ready(phase.hooks[position].name, phase):
                    ratio.earn(steps)
        if self._updates_over(phase) and not self._evaluation_due(phase):
            self._start_phase(self._index + 1)

    def progress(self) -> float:
        """Return the completed fraction of the running phase, 0 to 1."""
        phase = self.current_phase()
        if phase is None:
            return 1.0
        done = [
            self.counts[counter] / limit
            for counter, limit in (
                ("env_steps", phase.duration_steps),
                ("updates", phase.duration_updates),
                ("cycles", phase.duration_cycles),
            )
            if limit
        ]
        if not done and self.total_timesteps:
            done = [self.totals["env_steps"] / self.total_timesteps]
        return min(1.0, max(done, default=0.0))

    # ---------------------------------------------------------------- internals

    def _start_phase(self, index: int) -> None:
        self._index = index
        self._position = 0  # index of the current hook
        self._calls = 0  # of the current hook in this cycle
        self._steps_here = 0  # environment steps of the current hook in this cycle
        self._active = False  # whether any hook ran in this cycle
        self.counts = {"env_steps": 0, "updates": 0, "cycles": 0}  # of this phase
        self._ratios: dict[int, Ratio] = {}
        self._cadences: dict[int, Every] = {}
        self._view = None
        phase = self.current_phase()
        if phase is None:
            return
        self._view = PhaseView(phase, self)
        for position, use in enumerate(phase.hooks):
            if use.updates_per_env_step is not None:
                self._ratios[position] = Ratio(use.updates_per_env_step, use.max_burst)
            if use.every:
                every = Every(use.every)
                every.fired(self.totals)  # nothing is due when a phase starts
                self._cadences[position] = every

    def _calls_due(self, phase: PhaseDefinition, position: int) -> int:
        use = phase.hooks[position]
        if self._updates_over(phase) and use.kind != "evaluate":
            return 0
        if use.kind == "collect":
            return self._collects_due(phase, use)
        if (
            use.kind in ("update", "transform")
            and phase.type == "online"
            and not self.is_ready(use.name, phase)
        ):
            self.skipped.add(use.name)
            return 0
        if position in self._ratios:
            return self._ratios[position].updates_due
        if position in self._cadences:
            return int(self._cadences[position].due(self.totals))
        return use.repeat - self._calls

    def _collects_due(self, phase: PhaseDefinition, use: HookUse) -> int:
        if self._steps_over(phase):
            return 0
        if use.env_steps:
            return use.env_steps - self._steps_here
        return use.repeat - self._calls

    def _updates_over(self, phase: PhaseDefinition) -> bool:
        return bool(phase.duration_updates) and self.counts["updates"] >= (phase.duration_updates or 0)

    def _evaluation_due(self, phase: PhaseDefinition) -> bool:
        """Return whether the last update of a phase is one after which its hook `evaluate` runs."""
        return any(
            phase.hooks[position].kind == "evaluate" and every.due(self.totals)
            for position, every in self._cadences.items()
        )

    def _steps_over(self, phase: PhaseDefinition) -> bool:
        over = bool(phase.duration_steps) and self.counts["env_steps"] >= (phase.duration_steps or 0)
        return over or self._total_reached()

    def _total_reached(self) -> bool:
        return bool(self.total_timesteps) and self.totals["env_steps"] >= (self.total_timesteps or 0)

    def _end_cycle(self, phase: PhaseDefinition) -> None:
        self._position = self._calls = self._steps_here = 0
        self._active = False
        self.counts["cycles"] += 1
        self.totals["cycles"] += 1
        if self._total_reached() and self.counts["env_steps"]:
            # Ends training in the middle of the phases; resuming with a larger total continues here.
            self._out_of_steps = True
        elif self._steps_over(phase) or (
            phase.duration_cycles and self.counts["cycles"] >= phase.duration_cycles
        ):
            self._start_phase(self._index + 1)

    # ---------------------------------------------------------------- checkpoint

    def get_state(self) -> dict[str, Any]:
        return {
            "phases": [phase.name for phase in self.phases],
            "index": self._index,
            "out_of_steps": self._out_of_steps,
            "position": self._position,
            "calls": self._calls,
            "steps_here": self._steps_here,
            "active": self._active,
            "counts": dict(self.counts),
            "totals": dict(self.totals),
            "hook_calls": dict(self.hook_calls),
            "skipped": sorted(self.skipped),
            "ratio_credits": {position: ratio.credit for position, ratio in self._ratios.items()},
            "every_passed": {position: dict(every.passed) for position, every in self._cadences.items()},
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        names = [phase.name for phase in self.phases]
        if list(state["phases"]) != names:
            raise CheckpointError(
                f"training.phases is {names}, but the checkpoint was saved with {list(state['phases'])}: "
                "resume with the saved phases, or start a new run with load.path"
            )
        self._out_of_steps = False
        self._start_phase(int(state["index"]))
        self._position = int(state["position"])
        self._calls = int(state["calls"])
        self._steps_here = int(state["steps_here"])
        self._active = bool(state["active"])
        self.counts = {key: int(value) for key, value in state["counts"].items()}
        self.totals = {key: int(value) for key, value in state["totals"].items()}
        self.hook_calls = {key: int(value) for key, value in state["hook_calls"].items()}
        self.skipped = set(state["skipped"])
        for position, credit in state["ratio_credits"].items():
            self._ratios[int(position)].credit = float(credit)
        for position, passed in state["every_passed"].items():
            self._cadences[int(position)].passed = {key: int(count) for key, count in passed.items()}
        self._out_of_steps = bool(state["out_of_steps"]) and self._total_reached()


class TimeLeft:
    """Measures what phases with the same name take, and extrapolates to the phases to come.

    A phase that was never seen counts as much as the average of those that were.
    """

    def __init__(self, scheduler: PhaseScheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self._seconds: dict[str, list[float]] = {}  # name -> seconds of all its phases, their sizes
        self._phase = scheduler.current_phase()
        self._begun = clock()
        self._from = scheduler.progress()  # a resumed run begins within a phase

    def estimate(self) -> tuple[float | None, float | None]:
        """Return the share of the run that is done (0 to 1) and the seconds left; None while unknown."""
        phase, now, progress = self.scheduler.current_phase(), self.clock(), self.scheduler.progress()
        if phase is not self._phase:
            if self._phase is not None:
                self._add(self._phase.name, now - self._begun, 1.0 - self._from)
            self._phase, self._begun, self._from = phase, now, progress
        if phase is None:
            return 1.0, 0.0
        known = {name: seconds / size for name, (seconds, size) in self._seconds.items() if size > 0}
        elapsed, part = now - self._begun, progress - self._from
        if phase.name not in known and part > 0.01:
            known[phase.name] = elapsed / part
        if not known:
            return None, None
        usual = sum(known.values()) / len(known)
        index = self.scheduler.phase_index()
        costs = [known.get(item.name, usual) for item in self.scheduler.phases]
        left = sum(costs[index + 1 :]) + costs[index] * (1.0 - progress)
        total = sum(costs)
        return (1.0 - left / total if total > 0 else 1.0), left

    def _add(self, name: str, seconds: float, size: float) -> None:
        before = self._seconds.setdefault(name, [0.0, 0.0])
        before[0] += seconds
        before[1] += size
