from __future__ import annotations

import pytest

from rl_lab.errors import ConfigError
from rl_lab.orchestration.phases import Every, Ratio


def test_every_fires_once_per_multiple_passed():
    every = Every({"env_steps": 10})
    fired = []
    for steps in (0, 7, 14, 16, 39, 40, 41):
        if every.due({"env_steps": steps}):
            every.fired({"env_steps": steps})
            fired.append(steps)
    assert fired == [14, 39, 40]  # 20 and 30 were passed in one jump: one firing


def firings(every: Every, places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    fired = []
    for steps, updates in places:
        counters = {"env_steps": steps, "updates": updates}
        if every.due(counters):
            every.fired(counters)
            fired.append((steps, updates))
    return fired


def test_other_counter_fires_without_main_counter():
    every = Every({"env_steps": 10, "updates": 4})
    offline = [(9, updates) for updates in range(13)]
    assert firings(every, offline) == [(9, 4), (9, 8), (9, 12)]


def test_other_counter_does_not_repeat_main_counter():
    every = Every({"env_steps": 10, "updates": 6})
    # An update every 2 steps, from the third on; its multiples of 6 come between those of 10 steps.
    joint = [(steps, max(0, steps - 3) // 2) for steps in range(41)]
    assert firings(every, joint) == [(10, 3), (20, 8), (30, 13), (40, 18)]
    # It continues at its own multiples when the main counter stops.
    assert firings(every, [(40, updates) for updates in range(18, 33)]) == [(40, 24), (40, 30)]


def test_every_from_config():
    assert Every.from_config(None) is None
    assert Every.from_config({"every_env_steps": None, "episodes": 5}) is None
    every = Every.from_config({"every_updates": 3})
    assert every is not None and every.limits == {"updates": 3}
    with pytest.raises(ConfigError, match="at least 1"):
        Every.from_config({"every_updates": 0})


def test_ratio_caps_credit():
    ratio = Ratio(1.0, max_burst=5)
    for _ in range(100):
        ratio.earn(1)
    assert ratio.updates_due == 5
    ratio.spend()
    assert ratio.updates_due == 4
    ratio = Ratio(0.5, max_burst=5)
    ratio.earn(1)
    assert ratio.updates_due == 0
    ratio.earn(1)
    assert ratio.updates_due == 1
