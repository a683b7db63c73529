"""Aggregate scores of several runs with confidence intervals, as defined by Agarwal et al. 2021.

"Deep Reinforcement Learning at the Edge of the Statistical Precipice" (arXiv 2108.13264) and its package
`rliable`:

    mean             mean over tasks of the mean over runs
    median           median over tasks of the mean over runs
    iqm              mean of the middle half of all runs of all tasks: a quarter of them, rounded down, is
                     dropped at each end
    optimality_gap   mean shortfall of runs from `GOAL`; scores above it count as `GOAL`
    interval         percentiles of the stratified bootstrap: runs are drawn with replacement within each task

Scores are a list with one array per task. The last axis is the runs, whose number may differ between tasks;
leading axes are batch axes, which makes the bootstrap fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_lab.records import standard_deviation

Scores = Sequence[np.ndarray]  # per task (…, runs)
Aggregate = Callable[[Scores], np.ndarray]

GOAL = 1.0  # the normalised score that the optimality gap measures against
LEVEL = 0.95
REPETITIONS = 50_000  # the package's own default for aggregates
BAND_REPETITIONS = 2_000  # and for curves
BLOCK = 2_000_000  # values drawn at a time
MOST_DRAWN = 20_000_000  # for many episodes of one run, where fewer repetitions are enough


@dataclass(frozen=True)
class Interval:
    """A value with its interval. The bounds are NaN if no task has a second run."""

    value: float
    low: float
    high: float

    @property
    def bounded(self) -> bool:
        return bool(np.isfinite(self.low) and np.isfinite(self.high))


# --- Aggregates ---


def interquartile_mean(values: np.ndarray) -> np.ndarray:
    """(…, n) -> (…): the mean without the lowest and the highest quarter, each rounded down."""
    values = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    cut = values.shape[-1] // 4
    return values[..., cut : values.shape[-1] - cut].mean(axis=-1)


def mean(scores: Scores) -> np.ndarray:
    return _task_means(scores).mean(axis=-1)


def median(scores: Scores) -> np.ndarray:
    return np.median(_task_means(scores), axis=-1)


def iqm(scores: Scores) -> np.ndarray:
    return interquartile_mean(_pooled(scores))


def optimality_gap(scores: Scores) -> np.ndarray:
    return GOAL - np.minimum(_pooled(scores), GOAL).mean(axis=-1)


def probability_of_improvement(first: Scores, second: Scores) -> float:
    """Return the probability that a run of `first` beats one of `second` (ties count half), mean over tasks."""
    wins = []
    for ours, theirs in zip(first, second, strict=True):
        difference = (
            np.asarray(ours, dtype=np.float64)[:, None] - np.asarray(theirs, dtype=np.float64)[None, :]
        )
        wins.append(np.mean(difference > 0) + 0.5 * np.mean(difference == 0))
    return float(np.mean(wins))


AGGREGATES: dict[str, Aggregate] = {"mean": mean, "median": median, "iqm": iqm}
NORMALISED: dict[str, Aggregate] = {**AGGREGATES, "optimality_gap": optimality_gap}


def _task_means(scores: Scores) -> np.ndarray:
    return np.stack([np.asarray(task, dtype=np.float64).mean(axis=-1) for task in scores], axis=-1)


def _pooled(scores: Scores) -> np.ndarray:
    return np.concatenate([np.asarray(task, dtype=np.float64) for task in scores], axis=-1)


# --- Bootstrap ---


def intervals(
    scores: Scores,
    aggregates: Mapping[str, Aggregate] = AGGREGATES,
    *,
    level: float = LEVEL,
    repetitions: int = REPETITIONS,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return each aggregate of the scores, (runs,) per task, with its stratified bootstrap interval."""
    scores = [np.asarray(task, dtype=np.float64) for task in scores]
    if not scores or not all(task.ndim == 1 and len(task) for task in scores):
        raise ValueError("scores must be one array per task with at least one run each")
    values = {name: float(aggregate(scores)) for name, aggregate in aggregates.items()}
    if all(len(task) == 1 for task in scores):
        return {name: Interval(value, np.nan, np.nan) for name, value in values.items()}
    drawn: dict[str, list[np.ndarray]] = {name: [] for name in aggregates}
    for sample in resamples(scores, repetitions, seed):
        for name, aggregate in aggregates.items():
            drawn[name].append(aggregate(sample))
    tails = _tails(level)
    bounds = {name: np.percentile(np.concatenate(parts), tails) for name, parts in drawn.items()}
    return {name: Interval(values[name], float(low), float(high)) for name, (low, high) in bounds.items()}


def resamples(scores: Scores, repetitions: int, seed: int) -> Iterator[list[np.ndarray]]:
    """Yield bootstrap samples in blocks: per task (block, runs), drawn with replacement within the task."""
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK // sum(len(task) for task in scores))
    for start in range(0, repetitions, block):
        count = min(block, repetitions - start)
        yield [task[generator.integers(0, len(task), (count, len(task)))] for task in scores]


def band(
    curves: Sequence[np.ndarray],  # per task (runs, points)
    aggregate: Aggregate = mean,
    *,
    level: float = LEVEL,
    repetitions: int = BAND_REPETITIONS,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Aggregate curves pointwise with bootstrap intervals: value, low, high, (points,) each.

    The bootstrap draws complete runs, so one draw is used for all points.
    """
    curves = [np.asarray(task, dtype=np.float64) for task in curves]
    value = aggregate([task.T for task in curves])
    if all(len(task) == 1 for task in curves):
        unknown = np.full_like(value, np.nan)
        return value, unknown, unknown
    generator = np.random.default_rng(seed)
    block = max(1, BLOCK // sum(task.size for task in curves))
    drawn = []
    for start in range(0, repetitions, block):
        count = min(block, repetitions - start)
        picks = [generator.integers(0, len(task), (count, len(task))) for task in curves]
        # (count, runs, points) -> (count, points, runs)
        drawn.append(aggregate([np.swapaxes(task[pick], 1, 2) for task, pick in zip(curves, picks)]))
    low, high = np.percentile(np.concatenate(drawn), _tails(level), axis=0)
    return value, low, high


def ratio_band(
    sums: np.ndarray,  # (clusters, points)
    counts: np.ndarray,  # (clusters, points)
    *,
    level: float = LEVEL,
    repetitions: int = BAND_REPETITIONS,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return means of clustered values and their bootstrap intervals over clusters: value, low, high, (points,).

    A point without values is NaN.
    """
    sums, counts = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    unknown = np.full(sums.shape[1], np.nan)
    value = np.divide(sums.sum(0), counts.sum(0), out=unknown.copy(), where=counts.sum(0) > 0)
    if len(sums) == 1:
        return value, unknown, unknown
    generator = np.random.default_rng(seed)
    # A resample is the count of each cluster: (repetitions, clusters) @ (clusters, points).
    times = generator.multinomial(len(sums), np.full(len(sums), 1.0 / len(sums)), size=repetitions).astype(
        np.float64
    )
    drawn_sums, drawn_counts = times @ sums, times @ counts
    ratios = np.divide(drawn_sums, drawn_counts, out=np.full_like(drawn_sums, np.nan), where=drawn_counts > 0)
    low, high = unknown.copy(), unknown.copy()
    known = np.isfinite(value)
    if known.any():
        low[known], high[known] = np.nanpercentile(ratios[:, known], _tails(level), axis=0)
    return value, low, high


def performance_profile(
    scores: Scores,
    thresholds: np.ndarray,  # (points,)
    *,
    level: float = LEVEL,
    repetitions: int = BAND_REPETITIONS,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the share of runs, over all tasks, above each threshold: value, low, high, (points,) each."""
    above = [np.asarray(task)[:, None] > thresholds[None, :] for task in scores]
    return band(above, _pooled_mean, level=level, repetitions=repetitions, seed=seed)


def _pooled_mean(scores: Scores) -> np.ndarray:
    return _pooled(scores).mean(axis=-1)


def _pooled_median(scores: Scores) -> np.ndarray:
    return np.median(_pooled(scores), axis=-1)


# For a single task the median over tasks would equal the mean, so here the median is over runs.
OF_ONE_TASK: dict[str, Aggregate] = {"mean": _pooled_mean, "median": _pooled_median, "iqm": iqm}


def _tails(level: float) -> tuple[float, float]:
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be between 0 and 1, not {level}")
    return 50.0 * (1.0 - level), 50.0 * (1.0 + level)


def describe(
    values: Any, *, level: float = LEVEL, repetitions: int = REPETITIONS, seed: int = 0
) -> dict[str, Any]:
    """Return mean, std, median, IQM, min, max and intervals of the episodes of one run, for JSON."""
    array = np.asarray(values, dtype=np.float64)
    repetitions = min(repetitions, max(BAND_REPETITIONS, MOST_DRAWN // len(array)))
    found = intervals([array], OF_ONE_TASK, level=level, repetitions=repetitions, seed=seed)
    return {
        **{name: interval.value for name, interval in found.items()},
        "std": standard_deviation(array),
        "min": float(array.min()),
        "max": float(array.max()),
        "intervals": {
            name: [interval.low, interval.high] if interval.bounded else None
            for name, interval in found.items()
        },
        "level": level,
    }
