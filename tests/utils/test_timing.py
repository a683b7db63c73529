from __future__ import annotations

from time import perf_counter

import pytest

from rl_lab.utils import metrics as timing
from rl_lab.utils.metrics import Stopwatch


@pytest.fixture
def clock(monkeypatch):
    times = {"now": 0.0}
    monkeypatch.setattr(timing, "perf_counter", lambda: times["now"])
    return times


def test_mean_and_share(clock):
    watch = Stopwatch()
    for seconds in (0.1, 0.3):
        with watch("env_wait"):
            clock["now"] += seconds
    with watch("act"):
        clock["now"] += 0.2
    clock["now"] += 0.4
    assert watch.drain() == pytest.approx(
        {
            "time/env_wait_ms": 200.0,
            "time/env_wait_share": 0.4,
            "time/act_ms": 200.0,
            "time/act_share": 0.2,
        }
    )
    clock["now"] += 1.0
    assert watch.drain() == {}
    with watch("act"):
        clock["now"] += 0.5
    assert watch.drain() == pytest.approx({"time/act_ms": 500.0, "time/act_share": 1.0})


def test_nested_sections_and_errors(clock):
    watch = Stopwatch()
    with pytest.raises(ValueError), watch("outer"), watch("inner"):
        clock["now"] += 1.0
        raise ValueError
    drained = watch.drain()
    assert drained["time/outer_ms"] == drained["time/inner_ms"] == 1000.0


def test_overhead_is_small():
    watch = Stopwatch()
    begin = perf_counter()
    for _ in range(10_000):
        with watch("x"):
            pass
    assert (perf_counter() - begin) / 10_000 < 20e-6  # about 0.3 µs; the bound leaves room for a busy machine
    assert watch.drain()["time/x_ms"] < 0.02
