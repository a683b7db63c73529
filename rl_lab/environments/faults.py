"""Restart policy for failing environments: count and report failures; stop the run after too many."""

from __future__ import annotations

import math
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_lab.errors import ConfigError, EnvironmentFaultError, LabError

KINDS = ("raised", "died", "hung")
MAX_CONSECUTIVE = 100  # failed resets of one environment in a row, if `limit` is None


@dataclass(frozen=True)
class RestartLimit:
    """Allows `limit` restarts within `minutes`; one more stops the run. None: no limit."""

    limit: int | None = 10
    minutes: float = 10.0

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | RestartLimit | None) -> RestartLimit:
        if isinstance(node, RestartLimit):
            return node
        values = dict(node or {})
        unknown = set(values) - {"limit", "minutes"}
        limit, minutes = values.get("limit", cls.limit), values.get("minutes", cls.minutes)
        valid = limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0)
        if unknown or not valid or not isinstance(minutes, (int, float)) or not minutes > 0:
            raise ConfigError(
                f"environment.restarts={values}: set limit (an integer of at least 0, null for no limit) and minutes "
                "(above 0)"
            )
        return cls(limit, float(minutes))


class FaultLog:
    """Counts and reports restarts, and sets `failure` when there are too many.

    counts: kind -> restarts since the start of the run, including those before a resume
    """

    def __init__(self, limit: RestartLimit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.counts = dict.fromkeys(KINDS, 0)
        self.failure: EnvironmentFaultError | None = None
        self.report: Callable[[str], None] = _warn
        self._clock = clock
        self._recent: deque[float] = deque()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def record(self, kind: str, who: str, what: str, *, detail: str = "", consecutive: int = 0) -> None:
        """Record one failure, for example who="environment 2", what="raised ValueError: …".

        consecutive: number of failed resets in a row, including this one; 0: an episode was open
        """
        now = self._clock()
        self._recent.append(now)
        while now - self._recent[0] > self.limit.minutes * 60:
            self._recent.popleft()
        recent = len(self._recent)
        max_restarts = math.inf if self.limit.limit is None else self.limit.limit
        window = f"{self.limit.minutes:g} min"
        if recent > max_restarts:
            self.stop(
                f"{who} {what}, after {max_restarts} restarts in {window}, the limit of environment.restarts",
                detail,
            )
        elif consecutive > MAX_CONSECUTIVE or consecutive > max_restarts:
            self.stop(f"{who} {what}, and could not start an episode in {consecutive} attempts", detail)
        else:
            self.counts[kind] += 1
            action = (
                "it tries a new seed"
                if consecutive
                else "restarted with a new seed, open episodes are truncated"
            )
            allowed = "" if self.limit.limit is None else f" of {max_restarts}"
            self.report(
                f"{who} {what}: {action} (restart {self.total}; {recent}{allowed} in the last {window})"
            )

    def give_up(self, kind: str, who: str, what: str, detail: str = "") -> None:
        """Record a failure without a restart: the run is about to end."""
        self.counts[kind] += 1
        self.report(f"{who} {what}: given up, its open episodes are truncated")
        self.stop(f"{who} {what}", detail)

    def stop(self, why: str, detail: str = "") -> None:
        """Stop the run: the next step raises this error."""
        self.failure = self.failure or EnvironmentFaultError(f"{why}{detail}")

    def get_state(self) -> dict[str, int]:
        return dict(self.counts)

    def set_state(self, state: Mapping[str, int]) -> None:
        self.counts = {kind: int(state.get(kind, 0)) for kind in KINDS}


class PeerLost(LabError):
    """A process with environments in another interpreter died, hangs or sends what it must not.

    kind:      "died" or "hung"
    who, what: subject and predicate of the message; advice: an additional sentence
    peer:      number of the process: it fails all its environments, which is one failure
    """

    def __init__(self, kind: str, who: str, what: str, advice: str = "", peer: int = 0) -> None:
        super().__init__(f"{who} {what}" + (f". {advice}" if advice else ""))
        self.kind = kind
        self.what = what
        self.advice = advice
        self.peer = peer


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(text: str) -> str:
    """Return the last line of a traceback, which names the exception."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "an exception without a message"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
