from __future__ import annotations

import pytest

from rl_lab.errors import ConfigError
from rl_lab.orchestration.cadence import Every, Ratio


def test_every_fires_once_per_multiple_passed():
    every = Every({"env_steps": 10})
    fired = []
    for steps in (0, 7, 14, 16, 39, 40, 41):
        if every.due({"env_steps": steps}):
            every.fired({"env_steps": steps})
            fired.append(steps)
    assert fired == [14, 39, 40]  # 20 and 30 were passed in one jump: one firing


def test_the_first_of_several_counters_fires():
    every = Every({"env_steps": 10, "updates": 4})
    fired = []
    for steps, updates in ((9, 0), (9, 4), (9, 7), (10, 7), (11, 8), (12, 8)):
        counters = {"env_steps": steps, "updates": updates}
        if every.due(counters):
            every.fired(counters)
            fired.append((steps, updates))
    assert fired == [(9, 4), (10, 7), (11, 8)]


def test_every_from_config():
    assert Every.from_config(None) is None
    assert Every.from_config({"every_env_steps": None, "episodes": 5}) is None
    every = Every.from_config({"every_updates": 3})
    assert every is not None and every.limits == {"updates": 3}
    with pytest.raises(ConfigError, match="at least 1"):
        Every.from_config({"every_updates": 0})


def test_ratio_caps_its_burst():
    ratio = Ratio(1.0, max_burst=5)
    for _ in range(100):
        ratio.earn(1)
    assert ratio.owed == 5
    ratio.pay()
    assert ratio.owed == 4
    ratio = Ratio(0.5, max_burst=5)
    ratio.earn(1)
    assert ratio.owed == 0
    ratio.earn(1)
    assert ratio.owed == 1
