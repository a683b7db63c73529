"""Curves of runs: read from `metrics.jsonl`, smoothed, and combined over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.tools import statistics
from rl_lab.utils.files import read_jsonl

# Fields of a line that are not metrics: what a curve can be drawn over.
COUNTERS = ("step", "frames", "updates", "time")


@dataclass(frozen=True)
class Curve:
    """Values over a counter, in ascending order of it; infinities and NaN are kept as NaN."""

    x: np.ndarray  # (n,)
    y: np.ndarray  # (n,)

    def __len__(self) -> int:
        return len(self.x)

    def finite(self) -> Curve:
        """Without the points that have no value."""
        kept = np.isfinite(self.y)
        return Curve(self.x[kept], self.y[kept])


@dataclass(frozen=True)
class Band:
    """Several curves as one: their mean and its interval, where all of them have values."""

    x: np.ndarray  # (n,)
    mean: np.ndarray  # (n,)
    low: np.ndarray  # (n,), NaN for a single curve
    high: np.ndarray  # (n,)
    count: int


@dataclass
class Metrics:
    """All lines of one run."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """Lines of the file; a missing file has none, and a torn last line is left out."""
        return cls(read_jsonl(path) if path.is_file() else [])

    def names(self) -> list[str]:
        """Names of numbers that were logged, without the counters, sorted."""
        found = {key for row in self.rows for key, value in row.items() if _is_number(value)}
        return sorted(found - set(COUNTERS))

    def curve(self, key: str, over: str = "step") -> Curve:
        """One metric over a counter. Of several values at the same count the last one stays."""
        points: dict[float, float] = {}
        for row in self.rows:
            if _is_number(row.get(key)) and _is_number(row.get(over)):
                value = float(row[key])
                points[float(row[over])] = value if np.isfinite(value) else np.nan
        x = np.array(sorted(points), dtype=np.float64)
        return Curve(x, np.array([points[at] for at in x], dtype=np.float64))

    def last(self, key: str) -> float | None:
        """The last finite value of a metric or counter; None when there is none."""
        for row in reversed(self.rows):
            if _is_number(row.get(key)) and np.isfinite(row[key]):
                return float(row[key])
        return None

    def best(self, key: str) -> tuple[float, float] | None:
        """(value, step) of the greatest value of a metric."""
        curve = self.curve(key).finite()
        if not len(curve):
            return None
        at = int(curve.y.argmax())
        return float(curve.y[at]), float(curve.x[at])

    def seconds(self) -> float | None:
        """Wall time from the first line to the last, without pauses between a stop and a resume.

        A gap counts as a pause when it is far longer than the lines around it usually are apart.
        """
        times = [float(row["time"]) for row in self.rows if _is_number(row.get("time"))]
        gaps = np.maximum(np.diff(times), 0.0)
        if not len(gaps):
            return None
        usual = max(20.0 * float(np.median(gaps)), 600.0)
        return float(gaps[gaps <= usual].sum())


def smooth(curve: Curve, window: int) -> Curve:
    """A centred running mean over `window` points; at the ends over those that there are."""
    curve = curve.finite()
    if window <= 1 or len(curve) < 3:
        return curve
    half = min(window, len(curve)) // 2
    sums = np.concatenate([[0.0], np.cumsum(curve.y)])
    at = np.arange(len(curve))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(curve))
    return Curve(curve.x, (sums[high] - sums[low]) / (high - low))


def smoothing_window(points: int) -> int:
    """How many points a smoothed line looks at: 5 % of the curve, none for a short one."""
    return 1 if points < 30 else max(3, points // 20)


def combine(curves: Sequence[Curve], *, points: int = 300, level: float = statistics.LEVEL) -> Band | None:
    """Seeds as one curve: their mean, and its bootstrap interval at each point.

    Values are interpolated linearly, and only between the first and the last step that *every* curve has: a
    seed that stopped early does not change what the mean is a mean of. None when there is no such stretch.
    """
    x = common_steps(curves, points)
    if x is None:
        return None
    mean, low, high = statistics.band([values_at(curves, x)], level=level)
    return Band(x, mean, low, high, sum(len(curve.finite()) > 0 for curve in curves))


def common_steps(curves: Sequence[Curve], points: int = 300) -> np.ndarray | None:
    """Steps, (n,), that lie within every curve; None where there are none."""
    curves = [kept for kept in (curve.finite() for curve in curves) if len(kept)]
    if not curves:
        return None
    start = max(float(curve.x[0]) for curve in curves)
    end = min(float(curve.x[-1]) for curve in curves)
    if start > end:
        return None
    own = np.unique(np.concatenate([curve.x for curve in curves]))
    own = own[(own >= start) & (own <= end)]
    # Few points: the runs' own ones, so that nothing is drawn where nothing was measured.
    return own if len(own) <= points else np.linspace(start, end, points)


def values_at(curves: Sequence[Curve], x: np.ndarray) -> np.ndarray:
    """Every curve that has values, at the given steps: (runs, n)."""
    kept = [curve for curve in (curve.finite() for curve in curves) if len(curve)]
    return np.stack([np.interp(x, curve.x, curve.y) for curve in kept])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
