"""Where the time goes: named sections, at the cost of two clock reads each."""

from __future__ import annotations

from time import perf_counter
from types import TracebackType


class Section:
    """One named stretch of code. Entered and left like a context manager; not re-entrant."""

    __slots__ = ("_begin", "calls", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._begin = 0.0

    def __enter__(self) -> None:
        self._begin = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds += perf_counter() - self._begin
        self.calls += 1


class Stopwatch:
    """Adds up seconds by section.

        with watch("env_wait"):
            ...
        watch.drain()  # {"time/env_wait_ms": 1.3, "time/env_wait_share": 0.2}

    On a GPU a section measures what the host did: work that was only queued shows where the host waits for it.
    """

    def __init__(self) -> None:
        self._sections: dict[str, Section] = {}
        self._since = perf_counter()

    def __call__(self, name: str) -> Section:
        section = self._sections.get(name)
        if section is None:
            section = self._sections[name] = Section()
        return section

    def drain(self) -> dict[str, float]:
        """Mean milliseconds per call, and share of the wall time since the last drain, by section."""
        now = perf_counter()
        wall = max(now - self._since, 1e-9)
        metrics: dict[str, float] = {}
        for name, section in self._sections.items():
            if section.calls:
                metrics[f"time/{name}_ms"] = 1000.0 * section.seconds / section.calls
                metrics[f"time/{name}_share"] = section.seconds / wall
            section.seconds, section.calls = 0.0, 0
        self._since = now
        return metrics
