"""The request to stop this process: a signal makes it, and code that waits for others gives up after a grace time.

A training run saves before it ends. It cannot while it waits for an environment that hangs, so an environment
that has not answered for `GRACE_S` after the request is given up, whatever its own timeout is.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

GRACE_S = 5.0

# Exit status of a process whose run was stopped and saved; EX_TEMPFAIL of sysexits.h: try again later.
STOPPED = 75
# The variable of the exit status of `rl-lab train` for such a run; without it, 0.
STOPPED_VARIABLE = "RL_LAB_STOPPED_STATUS"

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
        if threading.get_ident() == _MAIN_THREAD:
            self._in_call = True

    def end_call(self) -> None:
        if threading.get_ident() == _MAIN_THREAD:
            self._in_call = False

    def end_overdue_call(self) -> None:
        """Raise StopRequested if a call that may hang is still going on; for a signal handler."""
        if self._in_call and self.overdue():
            self._in_call = False
            raise StopRequested(f"the call did not end within {GRACE_S:g} s of a request to stop")


STOP = StopRequest()  # of this process


# A terminal that closes sends SIGHUP; SLURM sends SIGUSR1 on request. Not every system has them.
OPTIONAL_SIGNALS = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name))


@contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[None]:
    """Call `request` on SIGINT, SIGTERM, SIGHUP and SIGUSR1; a second SIGINT raises KeyboardInterrupt.

    SIGHUP and SIGUSR1 are handled only if their handler is the default one, which ends the process: a signal
    that is ignored (`nohup`) or handled by the calling program keeps its handler.

    The first signal is acknowledged immediately: the current action may be an evaluation of several minutes,
    and if the run then fails for another reason, its output must still show that a stop was requested.
    An environment that hangs is given up after `GRACE_S`.
    """
    requested = False
    finished, reminding = threading.Event(), threading.Lock()

    def stop(number: int, frame: Any) -> None:
        nonlocal requested
        if requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not requested:
            requested = True
            _acknowledge(number)
            STOP.make()
            threading.Thread(target=remind, daemon=True).start()
        request()
        STOP.end_overdue_call()

    def remind() -> None:
        # A signal interrupts a call that hangs, even a sleep; `stop` then ends it if the grace time is over.
        while not finished.wait(GRACE_S + 0.1):
            with reminding:
                if not finished.is_set():  # afterwards the signal would end the process
                    signal.pthread_kill(main_thread, signal.SIGTERM)

    main_thread = threading.main_thread().ident or 0
    unhandled = [number for number in OPTIONAL_SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    try:
        before = {
            number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, *unhandled)
        }
    except ValueError:  # not the main thread: the calling program handles signals
        yield
        return
    try:
        yield
    finally:
        with reminding:
            finished.set()
        STOP.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _acknowledge(number: int) -> None:
    again = "; a second Ctrl-C stops immediately without saving" if number == signal.SIGINT else ""
    text = f"{signal.Signals(number).name}: finishing the current action, then saving{again}\n"
    with suppress(OSError):  # stderr is closed
        os.write(2, text.encode())  # not print: the signal may have interrupted a print
