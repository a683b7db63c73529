"""How far a tool has come that plays episodes or works through parts: one line that moves, or a few plain ones."""

from __future__ import annotations

import sys
from time import perf_counter
from types import TracebackType
from typing import TextIO

from rl_lab.tools.words import duration

QUIET_SECONDS = 2.0  # work that is done sooner says nothing
PLAIN_SECONDS = 20.0  # between two lines where nobody watches


class WorkProgress:
    """Counts towards a total.

        with WorkProgress("evaluating", 20) as progress:
            progress.step("return 31.0")

    Written to stderr, so that what is piped stays clean.
    """

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = self._said = perf_counter()
        self._width = 0

    def step(self, remark: str = "", count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        self.say(remark)

    def say(self, remark: str = "") -> None:
        """Show where it stands, if it is time to."""
        now = perf_counter()
        if now - self._start < QUIET_SECONDS or now - self._said < (0.2 if self._live else PLAIN_SECONDS):
            return
        self._said = now
        left = ""
        if 0 < self.done < self.total:
            left = f", {duration((now - self._start) / self.done * (self.total - self.done))} left"
        text = f"{self.title}: {self.done}/{self.total}{left}" + (f" · {remark}" if remark else "")
        if self._live:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
