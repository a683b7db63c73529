"""The request to stop this process: a signal makes it, and code that waits for others gives up after a grace time.

A training run saves before it ends. It cannot while it waits for an environment that hangs, so an environment
that has not answered for `GRACE_S` after the request is given up, whatever its own timeout is.
"""

from __future__ import annotations

import threading
import time

GRACE_S = 5.0

_MAIN_THREAD = threading.main_thread().ident


class StopRequested(Exception):
    """Raised inside a call of an environment in this process that goes on `GRACE_S` after a request to stop."""


class StopRequest:
    """Whether, and since when, this process is asked to stop. A signal handler writes it."""

    def __init__(self) -> None:
        self.since: float | None = None  # time.monotonic()
        self._in_call = False

    def make(self) -> None:
        if self.since is None:
            self.since = time.monotonic()

    def clear(self) -> None:
        self.since = None

    def overdue(self) -> bool:
        """Return whether the grace time is over."""
        return self.since is not None and time.monotonic() - self.since >= GRACE_S

    def begin_call(self) -> None:
        """A call that may hang begins; `end_call` must follow. Signals reach the main thread only."""
        self._in_call = threading.get_ident() == _MAIN_THREAD

    def end_call(self) -> None:
        self._in_call = False

    def end_overdue_call(self) -> None:
        """Raise StopRequested if a call that may hang is still going on; for a signal handler."""
        if self._in_call and self.overdue():
            self._in_call = False
            raise StopRequested(f"the call did not end within {GRACE_S:g} s of a request to stop")


STOP = StopRequest()  # of this process
