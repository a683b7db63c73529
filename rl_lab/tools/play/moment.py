"""What play shows: moments, panels, and the sources that make them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np


class Panel(NamedTuple):
    """One picture with its title."""

    title: str
    image: np.ndarray  # (H, W, 3) uint8


@dataclass
class Moment:
    """What arrived together, and the action that led to it."""

    obs: dict[str, np.ndarray]  # name -> (…) as stored; empty where a recording holds pictures only
    action: np.ndarray | None = None  # None: nothing led here, an episode begins
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    extra: dict[str, float] = field(default_factory=dict)  # more numbers for the header

    @property
    def is_first(self) -> bool:
        return self.action is None

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Source(Protocol):
    """A place where steps happen: the real environment, a dream, both, or recorded episodes."""

    def reset(self) -> Moment:
        """Begin a new episode."""

    def step(self, action: np.ndarray) -> Moment:
        """Take an action."""

    def agent_action(self) -> np.ndarray:
        """What the agent does here."""

    def think(self) -> dict[str, float]:
        """What the policy thinks here (value, entropy), where it tells; its memory follows what it sees."""

    def panels(self, parts: bool) -> list[Panel]:
        """What there is to see now; `parts` adds what the model sees and makes of it."""
