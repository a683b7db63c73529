"""Terminal output: tables (coloured on a terminal, plain in a pipe), number formats and a progress line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from time import perf_counter
from types import TracebackType
from typing import TextIO

from rl_lab.tools.statistics import Interval

# Text of a cell -> style on a terminal.
STYLES = {
    "ok": "green",
    "ready": "green",
    "warn": "yellow",
    "missing": "yellow",
    "bad": "bold red",
    "-": "dim",
}


def print_table(
    rows: Sequence[Sequence[str]],
    *,
    header: Sequence[str] = (),
    title: str = "",
    right: Sequence[int] = (),  # right-aligned columns
    file: TextIO | None = None,
) -> None:
    """Print rows of equal length. In a pipe nothing is wrapped or truncated: one line per row."""
    file = file or sys.stdout
    if getattr(file, "isatty", lambda: False)():
        _print_rich(rows, header, title, right, file)
    else:
        print(plain_table(rows, header=header, title=title, right=right), file=file)


def plain_table(
    rows: Sequence[Sequence[str]],
    *,
    header: Sequence[str] = (),
    title: str = "",
    right: Sequence[int] = (),
) -> str:
    """Format the table as aligned text."""
    lines = [*([header] if header else []), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    texts = [title] if title else []
    for line in lines:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ]
        texts.append(("  " if title else "") + "  ".join(cells).rstrip())
    return "\n".join(texts)


def _print_rich(
    rows: Sequence[Sequence[str]],
    header: Sequence[str],
    title: str,
    right: Sequence[int],
    file: TextIO,
) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file)
    if title:
        console.print(Text(title, style="bold"))
    if not rows:
        return
    table = Table(
        box=None, show_header=bool(header), pad_edge=False, padding=(0, 2, 0, 0), header_style="dim"
    )
    numbers = set(right)
    for column in range(len(rows[0])):
        # Names that have to be typed, and numbers, are never cut; texts wrap.
        whole = column == 0 or column in numbers
        table.add_column(
            header[column] if header else "",
            justify="right" if column in numbers else "left",
            no_wrap=whole,
            min_width=max(len(row[column]) for row in rows) if whole else None,
            overflow="fold",
        )
    for row in rows:
        # Text, not markup: '[atari]' in a cell is literal.
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    console.print(Padding(table, (0, 0, 0, 2 if title else 0)))


# --- Number formats ---

NONE = "–"


def number(value: float | None) -> str:
    """Format with about three digits and thousands separators."""
    if value is None or value != value:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def short(value: float) -> str:
    """Format as 400k or 1M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def bounds(low: float | None, high: float | None) -> str:
    """Format the two ends of an interval."""
    if low is None or high is None or low != low or high != high:
        return NONE
    return f"{number(low)} to {number(high)}"


def interval(found: Interval) -> str:
    """Format a value with its interval, if it has one."""
    return number(found.value) + (f" ({bounds(found.low, found.high)})" if found.bounded else "")


# --- Progress ---

QUIET_SECONDS = 2.0  # shorter work prints nothing
PLAIN_SECONDS = 20.0  # between two lines if the stream is not a terminal


class WorkProgress:
    """Prints progress towards a total: one updated line on a terminal, plain lines elsewhere.

        with WorkProgress("evaluating", 20) as progress:
            progress.step("return 31.0")

    It writes to stderr, so that piped output stays clean.
    """

    def __init__(self, title: str, total: int, stream: TextIO | None = None) -> None:
        self.title = title
        self.total = total
        self.done = 0
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._start = self._shown = perf_counter()
        self._width = 0

    def step(self, remark: str = "", count: int = 1) -> None:
        """Add `count` finished items."""
        self.done += count
        self.show(remark)

    def show(self, remark: str = "") -> None:
        """Print the progress if enough time has passed."""
        now = perf_counter()
        if now - self._start < QUIET_SECONDS or now - self._shown < (0.2 if self._live else PLAIN_SECONDS):
            return
        self._shown = now
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
