from __future__ import annotations

import io

import pytest

from rl_lab.tools import terminal
from rl_lab.tools.statistics import Interval
from rl_lab.tools.terminal import (
    WorkProgress,
    bounds,
    count,
    duration,
    interval,
    number,
    plain_table,
    print_table,
    short,
)

ROWS = [("a", "1.5", "x" * 200), ("long name", "22", "[atari]")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_piped_table_is_aligned() -> None:
    file = io.StringIO()
    print_table(ROWS, header=("name", "value", "text"), right=(1,), file=file)
    lines = file.getvalue().splitlines()
    assert lines[0] == "name       value  text"
    assert lines[1] == "a            1.5  " + "x" * 200
    assert lines[2] == "long name     22  [atari]"


def test_titles_and_empty_tables() -> None:
    assert plain_table([("a", "b")], title="things") == "things\n  a  b"
    assert plain_table([], title="things") == "things"


def test_terminal_table_folds_long_cells() -> None:
    file = Terminal()
    print_table(ROWS, title="things", file=file)
    assert "[atari]" in file.getvalue() and file.getvalue().count("x") == 200


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.8, "1,234,568"), (12.345, "12.3"), (0.012345, "0.0123"), (0.0, "0"), (None, "–")],
)
def test_numbers(value, text: str):
    assert number(value) == text


def test_other_formats():
    assert number(float("nan")) == "–" and count(12345) == "12,345" and count(None) == "–"
    assert duration(59.6) == "1 min 00 s" and duration(3_725) == "1 h 02 min" and duration(5) == "5 s"
    assert short(400_000) == "400k" and short(1_500_000) == "1.5M" and short(7) == "7"
    assert (
        interval(Interval(1.0, 0.5, 2.0)) == "1 (0.5 to 2)"
        and interval(Interval(1.0, *[float("nan")] * 2)) == "1"
    )
    assert bounds(None, 1.0) == "–"


def test_progress_prints_only_for_long_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(terminal, "perf_counter", lambda: now[0])
    plain, live = io.StringIO(), Terminal()
    with WorkProgress("working", 4, plain) as first, WorkProgress("working", 4, live) as second:
        for progress in (first, second):
            progress.step("soon")
        assert plain.getvalue() == live.getvalue() == ""
        now[0] = 30.0
        for progress in (first, second):
            progress.step("return 3.0")
        assert plain.getvalue() == "working: 2/4, 30 s left · return 3.0\n"
        assert "2/4, 30 s left" in live.getvalue()
        first.step()  # nothing more until it is time again
        assert plain.getvalue().count("\n") == 1
    assert live.getvalue().endswith("\r") and live.getvalue().split("\r")[-2].strip() == ""
