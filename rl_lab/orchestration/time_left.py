"""Share of the run that is done, and the time left, when phases differ in what their work costs."""

from __future__ import annotations

import time
from collections.abc import Callable

from rl_lab.orchestration.phase_scheduler import PhaseScheduler


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
