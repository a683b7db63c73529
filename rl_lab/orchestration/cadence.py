"""When something is due: every so many steps, or so many updates per environment step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_lab.errors import ConfigError, closest

# Counters that a cadence may follow, by the name of its key in YAML.
EVERY_KEYS = {"every_env_steps": "env_steps", "every_updates": "updates", "every_cycles": "cycles"}


class Every:
    """Fires once each time a counter passes a multiple of `every`, however far one step jumps."""

    def __init__(self, every: int, counter: str) -> None:
        if every < 1:
            raise ConfigError(f"a cadence must be at least 1, not {every}")
        self.every = every
        self.counter = counter
        self.passed = 0

    @classmethod
    def from_config(cls, name: str, node: Mapping[str, Any] | None) -> Every | None:
        """`{every_env_steps: 1000}` -> Every; None or an empty node never fires."""
        given = {key: value for key, value in (node or {}).items() if key in EVERY_KEYS and value is not None}
        if not given:
            return None
        if len(given) > 1:
            raise ConfigError(f"cadence '{name}' has {', '.join(given)}; give one of them")
        key, value = next(iter(given.items()))
        return cls(int(value), EVERY_KEYS[key])

    def due(self, counters: Mapping[str, int]) -> bool:
        """True when a multiple has been passed and `fired` was not called since."""
        return counters[self.counter] // self.every > self.passed

    def fired(self, counters: Mapping[str, int]) -> None:
        self.passed = counters[self.counter] // self.every


class Ratio:
    """Updates owed for environment steps: fractional credit, with a capped burst.

    The cap keeps a long evaluation, a pause or a resume from being paid back in one huge burst.
    """

    def __init__(self, updates_per_env_step: float, max_burst: int) -> None:
        if not updates_per_env_step > 0:
            raise ConfigError(f"a ratio must be positive, not {updates_per_env_step}")
        # One collect may earn more than the cap when it makes many steps; that much is always paid.
        self.updates_per_env_step = updates_per_env_step
        self.max_burst = max_burst
        self.credit = 0.0

    def earn(self, steps: int) -> None:
        earned = steps * self.updates_per_env_step
        self.credit = min(self.credit + earned, max(self.max_burst, earned))

    @property
    def owed(self) -> int:
        # The tiny margin keeps 0.1 * 10 from being 0.9999 updates.
        return int(self.credit + 1e-9)

    def pay(self) -> None:
        self.credit -= 1.0


def reject_unknown_keys(where: str, node: Mapping[str, Any], known: set[str]) -> None:
    for key in node:
        if key not in known:
            raise ConfigError(f"{where} has an unknown key '{key}'.{closest(str(key), known)}")
