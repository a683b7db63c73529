"""Metric curves of runs: reading `metrics.jsonl`, smoothing, and averaging over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.tools import statistics
from rl_lab.utils.files import read_jsonl

# Fields of a line that are not metrics; a curve can be plotted over any of them.
COUNTERS = ("step", "frames", "updates", "time")


@dataclass(frozen=True)
class Curve:
    """Values over a counter, sorted by it; infinities and NaN are stored as NaN."""

    x: np.ndarray  # (n,)
    y: np.ndarray  # (n,)

    def __len__(self) -> int:
        return len(self.x)

    def finite(self) -> Curve:
        """Return the curve without NaN points."""
        kept = np.isfinite(self.y)
        return Curve(self.x[kept], self.y[kept])


@dataclass(frozen=True)
class Band:
    """Mean of several curves and its interval, over the range that all of them cover."""

    x: np.ndarray  # (n,)
    mean: np.ndarray  # (n,)
    low: np.ndarray  # (n,), NaN for a single curve
    high: np.ndarray  # (n,)
    count: int


@dataclass
class Metrics:
    """All log lines of one run."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """Read the lines of the file; a missing file has none, and an incomplete last line is skipped."""
        return cls(read_jsonl(path) if path.is_file() else [])

    def names(self) -> list[str]:
        """Return the names of the logged metrics, without the counters, sorted."""
        found = {key for row in self.rows for key, value in row.items() if _is_number(value)}
        return sorted(found - set(COUNTERS))

    def curve(self, key: str, over: str = "step") -> Curve:
        """Return one metric over a counter. Of several values at the same count the last is kept."""
        points: dict[float, float] = {}
        for row in self.rows:
            if _is_number(row.get(key)) and _is_number(row.get(over)):
                value = float(row[key])
                points[float(row[over])] = value if np.isfinite(value) else np.nan
        x = np.array(sorted(points), dtype=np.float64)
        return Curve(x, np.array([points[at] for at in x], dtype=np.float64))

    def last(self, key: str) -> float | None:
        """Return the last finite value of a metric or counter; None if there is none."""
        for row in reversed(self.rows):
            if _is_number(row.get(key)) and np.isfinite(row[key]):
                return float(row[key])
        return None

    def best(self, key: str) -> tuple[float, int, int] | None:
        """Return (value, step, updates) of the largest value of a metric; of equal ones the last, as best.pt has.

        A run on stored data alone has all its values at step 0.
        """
        points: dict[tuple[int, int], float] = {}
        for row in self.rows:
            if _is_number(row.get(key)) and _is_number(row.get("step")):
                updates = int(row["updates"]) if _is_number(row.get("updates")) else 0
                at = int(row["step"]), updates
                points[at] = float(row[key])
        finite = [(value, *at) for at, value in points.items() if np.isfinite(value)]
        return max(finite, default=None)

    def seconds(self) -> float | None:
        """Return the wall time from the first line to the last, without pauses between a stop and a resume.

        A gap counts as a pause if it is longer than 20 median gaps and than 10 minutes.
        """
        elapsed = self.elapsed([row for row in self.rows if _is_number(row.get("time"))])
        return float(elapsed[-1]) if len(elapsed) > 1 else None

    @staticmethod
    def elapsed(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the wall time of each line since the first, in seconds, without pauses as in `seconds`; NaN if unknown."""
        times = np.array([float(row["time"]) if _is_number(row.get("time")) else np.nan for row in rows])
        known = np.flatnonzero(np.isfinite(times))
        gaps = np.maximum(np.diff(times[known]), 0.0)
        if len(gaps):
            gaps[gaps > max(20.0 * float(np.median(gaps)), 600.0)] = 0.0
        times[known] = np.concatenate([[0.0], np.cumsum(gaps)])[: len(known)]
        return times


def smooth(curve: Curve, window: int) -> Curve:
    """Return the centred running mean over `window` points; the window is truncated at the ends."""
    curve = curve.finite()
    if window <= 1 or len(curve) < 3:
        return curve
    half = min(window, len(curve)) // 2
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    at = np.arange(len(curve))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(curve))
    return Curve(curve.x, (sums[high] - sums[low]) / (high - low))


def smoothing_window(points: int) -> int:
    """Return the window for `smooth`: 5 % of the points, or 1 for a short curve."""
    return 1 if points < 30 else max(3, points // 20)


def combine(curves: Sequence[Curve], *, points: int = 300, level: float = statistics.LEVEL) -> Band | None:
    """Average the curves of several seeds, with a bootstrap interval at each point.

    Values are interpolated linearly, and only over the steps that *every* curve covers: a seed that stopped
    early does not change which seeds the mean contains. None if there are no such steps.
    """
    x = common_steps(curves, points)
    if x is None:
        return None
    mean, low, high = statistics.band([values_at(curves, x)], level=level)
    return Band(x, mean, low, high, sum(len(curve.finite()) > 0 for curve in curves))


def common_steps(curves: Sequence[Curve], points: int = 300) -> np.ndarray | None:
    """Return the steps, (n,), that every curve covers; None if there are none."""
    curves = [kept for kept in (curve.finite() for curve in curves) if len(kept)]
    if not curves:
        return None
    start = max(float(curve.x[0]) for curve in curves)
    end = min(float(curve.x[-1]) for curve in curves)
    if start > end:
        return None
    own = np.unique(np.concatenate([curve.x for curve in curves]))
    own = own[(own >= start) & (own <= end)]
    # For few points use the logged steps, so that nothing is plotted where nothing was measured.
    return own if len(own) <= points else np.linspace(start, end, points)


def values_at(curves: Sequence[Curve], x: np.ndarray) -> np.ndarray:
    """Return every curve that has values at the given steps: (runs, n)."""
    kept = [curve for curve in (curve.finite() for curve in curves) if len(curve)]
    return np.stack([np.interp(x, curve.x, curve.y) for curve in kept])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
