"""Numbers as people read them, in tables and on pages."""

from __future__ import annotations

from rl_lab.tools.statistics import Interval

NONE = "–"


def number(value: float | None) -> str:
    """About three digits, thousands set apart."""
    if value is None or value != value:
        return NONE
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def short(value: float) -> str:
    """400k, 1M"""
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
    """An interval's two ends."""
    if low is None or high is None or low != low or high != high:
        return NONE
    return f"{number(low)} to {number(high)}"


def interval(found: Interval) -> str:
    """A value with its interval, where it has one."""
    return number(found.value) + (f" ({bounds(found.low, found.high)})" if found.bounded else "")
