"""Commands of a session, and the validation of the messages that contain them.

Every WebSocket message passes through `parse_command`, which returns None for an invalid one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rl_lab.tools.play.episodes import SPLITS
from rl_lab.tools.play.keyboard import normalise
from rl_lab.tools.play.starts import LABELS

MODES = ("real", "dream", "both", "episodes")
SLOWEST, FASTEST = 1.0, 60.0  # steps per second
SHORTEST, LONGEST = 1, 10_000  # steps of a dream
COLDEST, HOTTEST = 0.0, 3.0  # temperature of the agent's actions, or of a model's sampling
LONGEST_CLIP = 30.0  # seconds


@dataclass(frozen=True)
class Command:
    """A command with its value; None means toggle or next."""

    name: str
    value: Any = None
    id: int | None = None  # set by the sender, to recognize its effect


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _optional_flag(value: Any) -> bool | None:
    return None if value is None else _flag(value)


def _number(low: float, high: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError
        return float(min(max(value, low), high))

    return read


def _integer(low: int, high: int) -> Callable[[Any], int]:
    read = _number(low, high)
    return lambda value: int(read(value))


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise ValueError
        return value

    return read


def _optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _nothing(value: Any) -> None:
    if value is not None:
        raise ValueError


def _key(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 16:
        raise ValueError
    return normalise(value)


COMMANDS: dict[str, Callable[[Any], Any]] = {
    "key_down": _key,
    "key_up": _key,
    "release": _nothing,  # all keys
    "control": _optional(_one_of("human", "agent")),
    "mode": _optional(_one_of(*MODES)),
    "pause": _optional_flag,
    "step_once": _nothing,
    "reset": _nothing,
    "speed": _number(SLOWEST, FASTEST),
    "faster": _integer(-1, 1),
    "horizon": _integer(SHORTEST, LONGEST),
    "longer": _integer(-1, 1),
    "parts": _optional_flag,
    "header": _optional_flag,
    "wait": _optional_flag,
    "record": _optional_flag,
    "answer": _flag,
    "seek": _integer(-(10**9), 10**9),
    "episode": _integer(-1, 1),
    "split": _one_of(*SPLITS),
    "rewind": _integer(-LONGEST, LONGEST),
    "again": _nothing,
    "starts": _optional(_one_of(*LABELS)),
    "choose": _optional(_integer(0, 99)),
    "dream_here": _nothing,
    "temperature": _number(COLDEST, HOTTEST),
    "warmer": _integer(-1, 1),
    "dream_temperature": _number(0.05, HOTTEST),
    "weights": _optional(_integer(0, 10**6)),
    "run": _nothing,
    "clip": _optional(_number(1.0, LONGEST_CLIP)),
}


def parse_command(message: Any) -> Command | None:
    """{"do": name, "value": …, "id": n} -> Command; None for anything else."""
    if not isinstance(message, dict):
        return None
    name, number = message.get("do"), message.get("id")
    if not isinstance(name, str) or name not in COMMANDS:
        return None
    if number is not None and (
        isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**53
    ):
        return None
    try:
        return Command(name, COMMANDS[name](message.get("value")), number)
    except (ValueError, OverflowError):
        return None
