from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from rl_lab.tools.report.curves import Curve, Metrics, combine, smooth, smoothing_window


def metrics_of(*rows: dict) -> Metrics:
    return Metrics(list(rows))


def curve(x: list[float], y: list[float]) -> Curve:
    return Curve(np.array(x, float), np.array(y, float))


def test_incomplete_line_and_nonfinite_values(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [{"step": 1, "a": 1.0}, {"step": 2, "a": "NaN"}, {"step": 3, "a": "-Infinity", "note": "text"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "a": 9')
    metrics = Metrics.read(file)
    read = metrics.curve("a")
    assert metrics.names() == ["a"]
    assert read.x.tolist() == [1, 2, 3]
    assert read.finite().y.tolist() == [1.0]
    assert metrics.last("a") == 1.0
    assert Metrics.read(tmp_path / "absent.jsonl").rows == []


def test_curve_is_sorted_and_keeps_last_value() -> None:
    metrics = metrics_of({"step": 5, "a": 1.0}, {"step": 2, "a": 2.0}, {"step": 5, "a": 3.0}, {"step": 9})
    assert metrics.curve("a").x.tolist() == [2, 5]
    assert metrics.curve("a").y.tolist() == [2.0, 3.0]
    assert metrics.best("a") == (3.0, 5, 0)
    tied = [{"step": step, "a": value} for step, value in ((1, 5.0), (2, 3.0), (3, 5.0), (4, 1.0))]
    assert Metrics(tied).best("a") == (5.0, 3, 0)  # the last of equal ones, as best.pt has
    offline = [{"step": 0, "updates": n, "a": value} for n, value in ((3, 1.0), (6, 4.0), (9, 2.0))]
    assert Metrics(offline).best("a") == (4.0, 0, 6)  # a run on stored data has all its lines at step 0
    assert metrics.best("b") is None and metrics.last("b") is None


def test_wall_time_excludes_pauses() -> None:
    times = [0.0, 10.0, 20.0, 30.0, 90_000.0, 90_010.0]
    metrics = metrics_of(*({"step": i, "time": at} for i, at in enumerate(times)))
    assert metrics.seconds() == 40.0
    assert metrics_of({"step": 1, "time": 5.0}).seconds() is None


def test_smooth_equals_loop() -> None:
    rng = np.random.default_rng(0)
    raw = curve(list(range(50)), rng.standard_normal(50).tolist())
    raw.y[7] = np.nan
    kept = raw.finite()
    got = smooth(raw, window=7)
    slow = [kept.y[max(0, i - 3) : i + 4].mean() for i in range(len(kept))]
    np.testing.assert_allclose(got.y, slow)
    np.testing.assert_array_equal(got.x, kept.x)
    assert smooth(raw, window=1).y.tolist() == kept.y.tolist()
    assert smoothing_window(10) == 1 and smoothing_window(200) == 10


def test_combine_uses_common_steps() -> None:
    band = combine([curve([0, 10, 20], [0, 10, 20]), curve([10, 20, 30], [30, 40, 50])])
    assert band is not None
    assert band.x.tolist() == [10, 20]
    assert band.mean.tolist() == [20, 30]
    assert band.low.tolist() == [10, 20] and band.high.tolist() == [30, 40]
    assert band.count == 2


def test_combine_interpolates_and_resamples() -> None:
    band = combine([curve([0, 100], [0, 100]), curve([0, 50, 100], [0, 0, 0])])
    assert band is not None and band.x.tolist() == [0, 50, 100]
    assert band.mean.tolist() == [0, 25, 50]
    many = curve(list(range(1000)), [1.0] * 1000)
    resampled = combine([many, many, many], points=50, level=0.8)
    assert resampled is not None and len(resampled.x) == 50
    np.testing.assert_allclose(resampled.low, 1.0)


def test_disjoint_or_empty_curves_have_no_mean() -> None:
    assert combine([curve([0, 1], [0, 1]), curve([5, 6], [0, 1])]) is None
    assert combine([curve([], []), curve([1], [np.nan])]) is None
