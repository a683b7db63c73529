"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1: a request to stop.

It is answered at once in words, and obeyed when the action under way is done.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

# A terminal that closes sends SIGHUP; SLURM warns by SIGUSR1 where it is asked to. Not every system has them.
IF_DEFAULT = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name))


@contextmanager
def stop_on_signals(request: Callable[[], None]) -> Iterator[None]:
    """Inside, SIGTERM, SIGINT, SIGHUP and SIGUSR1 call `request`; a second SIGINT stops at once.

    SIGHUP and SIGUSR1 only where they would end the process: one that is ignored (`nohup`), or that the program around
    us handles, stays as it is.

    It is said at once, since the action may be an evaluation of minutes, and since a run that dies of something else
    meanwhile must not look as if nobody had asked it to stop.
    """
    asked = False

    def stop(number: int, frame: Any) -> None:
        nonlocal asked
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked:
            _say(number)
        asked = True
        request()

    free = [number for number in IF_DEFAULT if signal.getsignal(number) is signal.SIG_DFL]
    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, *free)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(number: int) -> None:
    again = "; once more stops at once, unsaved" if number == signal.SIGINT else ""
    text = f"{signal.Signals(number).name}: finishing what is under way, then saving{again}\n"
    with suppress(OSError):  # nobody listens any more
        os.write(2, text.encode())  # not print: the code that was interrupted may be in the middle of one
