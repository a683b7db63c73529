"""When something is due: every so many steps, or so many updates per environment step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_lab.errors import ConfigError

# Counters that a cadence may follow, by the name of its key in YAML.
EVERY_KEYS = {"every_env_steps": "env_steps", "every_updates": "updates", "every_cycles": "cycles"}


class Every:
    """Fires once each time a counter passes a multiple of its limit, however far one step jumps.

    With several counters (`{every_env_steps: 1000, every_updates: 500}`) the first named leads. Another fires at its
    multiples, too, but only a whole limit of its own after the last firing: an offline phase, in which no environment
    steps, is logged, and a joint one not twice in a row.
    """

    def __init__(self, limits: Mapping[str, int]) -> None:
        for counter, limit in limits.items():
            if limit < 1:
                raise ConfigError(f"a cadence must be at least 1, not {limit} {counter}")
        self.limits = dict(limits)
        self.passed = dict.fromkeys(limits, 0)

    @classmethod
    def from_config(cls, node: Mapping[str, Any] | None) -> Every | None:
        """`{every_env_steps: 1000}` -> Every; None or a node without limits never fires."""
        node = node or {}
        limits = {EVERY_KEYS[key]: int(node[key]) for key in EVERY_KEYS if node.get(key) is not None}
        return cls(limits) if limits else None

    def due(self, counters: Mapping[str, int]) -> bool:
        """True when a multiple has been passed and `fired` was not called since."""
        return any(counters[name] // limit > self.passed[name] for name, limit in self.limits.items())

    def fired(self, counters: Mapping[str, int]) -> None:
        leads = next(iter(self.limits))
        # Rounded up, the next multiple that counts is at least a whole limit away.
        self.passed = {
            name: counters[name] // limit if name == leads else -(-counters[name] // limit)
            for name, limit in self.limits.items()
        }


@dataclass
class Cadences:
    """The things that happen by the clock of the counters. None: never."""

    log: Every | None = None
    evaluate: Every | None = None
    report: Every | None = None
    checkpoint: Every | None = None
    epoch_weights: Every | None = None

    def items(self) -> list[tuple[str, Every]]:
        return [(name, every) for name, every in vars(self).items() if every is not None]

    def get_state(self) -> dict[str, dict[str, int]]:
        return {name: dict(every.passed) for name, every in self.items()}

    def set_state(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """A cadence that was changed on resume (a counter that the state does not know) starts from 0."""
        for name, every in self.items():
            every.passed |= {key: int(n) for key, n in state.get(name, {}).items() if key in every.passed}


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
