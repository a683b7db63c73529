from __future__ import annotations

import io

import pytest

from rl_lab.tools import terminal as work_progress
from rl_lab.tools.statistics import Interval
from rl_lab.tools.terminal import WorkProgress, bounds, count, duration, interval, number, short


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.8, "1,234,568"), (12.345, "12.3"), (0.012345, "0.0123"), (0.0, "0"), (None, "–")],
)
def test_numbers(value, text: str):
    assert number(value) == text


def test_other_words():
    assert number(float("nan")) == "–" and count(12345) == "12,345" and count(None) == "–"
    assert duration(59.6) == "1 min 00 s" and duration(3_725) == "1 h 02 min" and duration(5) == "5 s"
    assert short(400_000) == "400k" and short(1_500_000) == "1.5M" and short(7) == "7"
    assert (
        interval(Interval(1.0, 0.5, 2.0)) == "1 (0.5 to 2)"
        and interval(Interval(1.0, *[float("nan")] * 2)) == "1"
    )
    assert bounds(None, 1.0) == "–"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_short_work_says_nothing_and_long_work_how_long_it_will_take(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(work_progress, "perf_counter", lambda: now[0])
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
