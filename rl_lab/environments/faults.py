"""What is done about environments that fail: counted, said, and after too many in too short a time, the end."""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl_lab.errors import ConfigError, EnvironmentFaultError

KINDS = ("raised", "died", "hung")
MOST_IN_A_ROW = 100  # failed beginnings of one environment, where no limit is set


@dataclass(frozen=True)
class RestartLimit:
    """As many as `limit` restarts within `minutes` are borne; one more stops the run. None: any number."""

    limit: int | None = 10
    minutes: float = 10.0

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | RestartLimit | None) -> RestartLimit:
        if isinstance(node, RestartLimit):
            return node
        values = dict(node or {})
        unknown = set(values) - {"limit", "minutes"}
        limit, minutes = values.get("limit", cls.limit), values.get("minutes", cls.minutes)
        whole = limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0)
        if unknown or not whole or not isinstance(minutes, (int, float)) or not minutes > 0:
            raise ConfigError(
                f"environment.restarts={values}: give limit (restarts; 0 or more, null for any number) and minutes "
                "(above 0)"
            )
        return cls(limit, float(minutes))


class FaultLog:
    """Counts restarts; `failure` is set when there were too many.

    counts: kind -> restarts since the run began, those before a resume included
    """

    def __init__(self, limit: RestartLimit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.counts = dict.fromkeys(KINDS, 0)
        self.failure: EnvironmentFaultError | None = None
        self.say: Callable[[str], None] = _warn
        self._clock = clock
        self._recent: deque[float] = deque()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def note(self, kind: str, who: str, what: str, *, detail: str = "", in_a_row: int = 0) -> None:
        """One failure: "environment 2" "raised ValueError: …".

        in_a_row: how often it has now failed to begin an episode; 0: an episode was open
        """
        now = self._clock()
        self._recent.append(now)
        while now - self._recent[0] > self.limit.minutes * 60:
            self._recent.popleft()
        recent = len(self._recent)
        most = math.inf if self.limit.limit is None else self.limit.limit
        window = f"{self.limit.minutes:g} min"
        if recent > most:
            self.stop(
                f"{who} {what}, after {most} restarts in {window}, which environment.restarts allows", detail
            )
        elif in_a_row > MOST_IN_A_ROW or in_a_row > most:
            self.stop(f"{who} {what}, and began no episode in {in_a_row} attempts", detail)
        else:
            self.counts[kind] += 1
            done = (
                "it tries a new seed"
                if in_a_row
                else "restarted with a new seed, open episodes are truncated"
            )
            allowed = "" if self.limit.limit is None else f" of {most}"
            self.say(f"{who} {what}: {done} (restart {self.total}; {recent}{allowed} in the last {window})")

    def stop(self, why: str, detail: str = "") -> None:
        """No more: whoever asks for the next step is told this."""
        self.failure = self.failure or EnvironmentFaultError(f"{why}{detail}")

    def get_state(self) -> dict[str, int]:
        return dict(self.counts)

    def set_state(self, state: Mapping[str, int]) -> None:
        self.counts = {kind: int(state.get(kind, 0)) for kind in KINDS}


def last_line(text: str) -> str:
    """Of a traceback: the exception."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "an exception without a message"


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)
