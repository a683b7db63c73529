"""Aggregates and intervals against values computed by hand from the definitions of Agarwal et al. 2021."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rl_lab.tools import statistics
from rl_lab.tools.statistics import AGGREGATES, NORMALISED, Interval, interquartile_mean, intervals

# Two tasks, four runs each; normalised scores.
TASKS = [np.array([0.0, 0.2, 0.4, 1.4]), np.array([0.5, 0.9, 1.1, 2.1])]


def test_aggregates_by_hand():
    # Task means 2.0 / 4 = 0.5 and 4.6 / 4 = 1.15.
    assert statistics.mean(TASKS) == pytest.approx((0.5 + 1.15) / 2)
    assert statistics.median(TASKS) == pytest.approx((0.5 + 1.15) / 2)  # of two tasks: between them
    # Sorted: 0 .2 | .4 .5 .9 1.1 | 1.4 2.1; a quarter of eight is two.
    assert statistics.iqm(TASKS) == pytest.approx((0.4 + 0.5 + 0.9 + 1.1) / 4)
    # Clipped at 1: 0 .2 .4 1 and .5 .9 1 1, sum 5.0; 1 - 5 / 8.
    assert statistics.optimality_gap(TASKS) == pytest.approx(1 - 5.0 / 8)


def test_median_is_over_task_means():
    scores = [np.array([0.0, 0.0, 9.0]), np.array([1.0, 1.0, 1.0]), np.array([2.0, 2.0, 2.0])]
    assert statistics.median(scores) == pytest.approx(2.0)  # means 3, 1, 2
    assert statistics.iqm(scores) == pytest.approx((1 + 1 + 1 + 2 + 2) / 5)  # 0 0 | 1 1 1 2 2 | 2 9


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([7.0], 7.0),
        ([3.0, 1.0, 8.0], 4.0),  # a quarter of three, rounded down, is none
        ([100.0, 1.0, 3.0, -50.0], 2.0),
        ([5.0, 1.0, 2.0, 3.0, 99.0], 10 / 3),
        (list(range(10)), 4.5),  # two off at either end
    ],
)
def test_interquartile_mean_by_hand(values, expected):
    assert interquartile_mean(np.array(values)) == pytest.approx(expected)


def test_interquartile_mean_equals_trimmed_mean():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    for size in range(1, 40):
        values = rng.standard_normal(size)
        assert interquartile_mean(values) == pytest.approx(stats.trim_mean(values, 0.25))


def test_probability_of_improvement_by_hand():
    # Task 1: (2 > 1), (2 = 2), (3 > 1), (3 > 2): 3.5 of 4. Task 2: none of 1.
    first, second = [np.array([2.0, 3.0]), np.array([0.0])], [np.array([1.0, 2.0]), np.array([5.0])]
    assert statistics.probability_of_improvement(first, second) == pytest.approx((3.5 / 4 + 0) / 2)
    assert statistics.probability_of_improvement(TASKS, TASKS) == pytest.approx(0.5)


def test_bootstrap_of_two_runs_by_hand():
    """Of runs 0 and 1 the mean of a resample is 0, 1/2 or 1 with chances 1/4, 1/2 and 1/4."""
    found = intervals([np.array([0.0, 1.0])], {"mean": statistics.mean}, level=0.95)["mean"]
    assert found == Interval(0.5, 0.0, 1.0)
    inner = intervals([np.array([0.0, 1.0])], {"mean": statistics.mean}, level=0.4)["mean"]
    assert (inner.low, inner.high) == (0.5, 0.5)  # percentiles 30 and 70


def test_bootstrap_is_stratified():
    """Drawn within tasks, tasks of equal runs always keep their mean; drawn from all, it would wander."""
    found = intervals([np.full(4, 0.0), np.full(4, 10.0)], AGGREGATES)
    assert found["mean"] == Interval(5.0, 5.0, 5.0)
    assert found["median"] == Interval(5.0, 5.0, 5.0)


def test_bootstrap_matches_all_resamples():
    """Three runs and two runs: 27 × 4 equally likely resamples, written out."""
    scores = [np.array([0.1, 0.7, 1.6]), np.array([0.3, 2.0])]
    every = [
        [np.array(first), np.array(second)]
        for first in itertools.product(scores[0], repeat=3)
        for second in itertools.product(scores[1], repeat=2)
    ]
    assert len(every) == 108
    for name, aggregate in NORMALISED.items():
        exact = np.array([float(aggregate(sample)) for sample in every])
        found = intervals(scores, {name: aggregate}, level=0.8, repetitions=50_000)[name]
        # Shares below and above the bounds are what the level promises, up to the atoms of 108 values.
        assert np.mean(exact < found.low) <= 0.11 and np.mean(exact <= found.low) >= 0.09
        assert np.mean(exact > found.high) <= 0.11 and np.mean(exact >= found.high) >= 0.09


def test_bootstrap_coverage():
    rng = np.random.default_rng(3)
    hits = 0
    for trial in range(200):
        sample = rng.standard_normal(40)
        found = intervals([sample], {"mean": statistics.mean}, repetitions=400, seed=trial)["mean"]
        hits += found.low <= 0.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_interval_is_deterministic_for_any_block_size(monkeypatch):
    once = intervals(TASKS, NORMALISED, repetitions=3000, seed=5)
    assert once == intervals(TASKS, NORMALISED, repetitions=3000, seed=5)
    assert once != intervals(TASKS, NORMALISED, repetitions=3000, seed=6)
    wide = once["mean"].high - once["mean"].low
    monkeypatch.setattr(statistics, "BLOCK", 1000)
    blocks = intervals(TASKS, NORMALISED, repetitions=3000, seed=5)
    assert blocks["mean"].high - blocks["mean"].low == pytest.approx(wide, rel=0.1)


def test_one_run_has_no_interval():
    found = intervals([np.array([2.0]), np.array([4.0])])
    assert found["mean"].value == 3.0 and not found["mean"].bounded
    with pytest.raises(ValueError, match="at least one run"):
        intervals([np.array([])])


def test_band_equals_pointwise_intervals():
    runs = np.array([[0.0, 5.0, 1.0], [1.0, 5.0, 3.0]])
    value, low, high = statistics.band([runs], repetitions=4000)
    np.testing.assert_allclose(value, [0.5, 5.0, 2.0])
    np.testing.assert_allclose(low, [0.0, 5.0, 1.0])
    np.testing.assert_allclose(high, [1.0, 5.0, 3.0])
    value, low, high = statistics.band([runs[:1]])
    assert value.tolist() == [0.0, 5.0, 1.0] and np.isnan(low).all() and np.isnan(high).all()


def test_performance_profile_by_hand():
    value, low, high = statistics.performance_profile(TASKS, np.array([-1.0, 0.4, 1.0, 3.0]))
    # More than 0.4 (not 0.4 itself): 1.4 and .5 .9 1.1 2.1; more than 1: 1.4 1.1 2.1.
    np.testing.assert_allclose(value, [1.0, 5 / 8, 3 / 8, 0.0])
    assert (low <= value).all() and (value <= high).all()
    assert low[1] < value[1] < high[1]


def test_episodes_of_one_run():
    found = statistics.describe([1.0, 2.0, 3.0, 10.0], repetitions=2000)
    assert found["mean"] == 4.0 and found["median"] == 2.5 and found["iqm"] == 2.5
    assert found["std"] == pytest.approx(np.std([1, 2, 3, 10])) and (found["min"], found["max"]) == (
        1.0,
        10.0,
    )
    assert found["intervals"]["mean"][0] < 4.0 < found["intervals"]["mean"][1]
    assert statistics.describe([5.0])["intervals"]["mean"] is None
    assert statistics.describe([0.1] * 3)["std"] == 0.0 != np.std([0.1] * 3)  # the mean is rounded
