from __future__ import annotations

import pytest

from rl_lab.errors import ConfigError
from rl_lab.orchestration.cadence import Every, Ratio


def test_every_fires_once_per_multiple_passed():
    every = Every(10, "env_steps")
    fired = []
    for steps in (0, 7, 14, 16, 39, 40, 41):
        if every.due({"env_steps": steps}):
            every.fired({"env_steps": steps})
            fired.append(steps)
    assert fired == [14, 39, 40]  # 20 and 30 were passed in one jump: one firing


def test_every_from_config():
    assert Every.from_config("log", None) is None
    assert Every.from_config("log", {"every_env_steps": None, "episodes": 5}) is None
    every = Every.from_config("log", {"every_updates": 3})
    assert every is not None and (every.every, every.counter) == (3, "updates")
    with pytest.raises(ConfigError, match="one of them"):
        Every.from_config("log", {"every_updates": 3, "every_env_steps": 4})
    with pytest.raises(ConfigError, match="at least 1"):
        Every.from_config("log", {"every_updates": 0})


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
