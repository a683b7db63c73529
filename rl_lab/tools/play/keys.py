"""Which key does what: from held keys to an action, for any action space.

Key names are the browser's `KeyboardEvent.key`, letters in lower case: "a", " ", "ArrowLeft", "Tab". The desktop
window uses the same names. Suites with customs of their own are in keys_suites.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_lab.records import ActionSpec

# Keys that steer the session, whatever is played: key -> (command, value, what it does). The first three are IRIS'.
CONTROLS: dict[str, tuple[str, object, str]] = {
    "Enter": ("reset", None, "new episode"),
    ".": ("pause", None, "pause"),
    ",": ("record", None, "record"),
    "n": ("step_once", None, "one step"),
    "m": ("control", None, "you / agent"),
    "v": ("mode", None, "real / dream / side by side"),
    "b": ("wait", None, "wait for keys"),
    "-": ("faster", -1, "slower"),
    "=": ("faster", 1, "faster"),
    "[": ("longer", -1, "shorter dreams"),
    "]": ("longer", 1, "longer dreams"),
    "'": ("parts", None, "panels"),
    ";": ("header", None, "header"),
}
# While episodes are replayed; IRIS' keys, and one more for recordings.
REPLAY_CONTROLS: dict[str, tuple[str, object, str]] = {
    "ArrowLeft": ("seek", -1, "a step back"),
    "ArrowRight": ("seek", 1, "a step on"),
    "PageDown": ("seek", -10, "ten back"),
    "PageUp": ("seek", 10, "ten on"),
    " ": ("seek", -(10**9), "to the start"),
    "ArrowUp": ("episode", 1, "next episode"),
    "ArrowDown": ("episode", -1, "previous episode"),
    "t": ("split", "train", "train"),
    "y": ("split", "test", "test"),
    "i": ("split", "imagination", "imagination"),
    "o": ("split", "recordings", "recordings"),
}
LETTERS = "qwertyuiopasdfghjklzxc"  # for actions beyond ten; none of them is in CONTROLS
ARROWS = ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowUp")
ROWS = ("1234567890", "qwertyuiop", "asdfghjkl", "zxc")  # one row of the keyboard for each part of an action


class Keymap(Protocol):
    """From held keys to an action as it is stored."""

    legend: list[tuple[str, str]]  # (keys, what they do), for people

    @property
    def rest(self) -> np.ndarray | None:
        """What is done while nothing is held; None: nothing, play waits for a key."""

    def known(self) -> frozenset[str]: ...

    def action(self, held: Collection[str]) -> np.ndarray | None: ...

    def name(self, action: np.ndarray) -> str: ...


@dataclass
class DiscreteKeys:
    """One key, one action; of several held keys the newest counts."""

    table: dict[str, int]
    names: Sequence[str]
    rest: np.ndarray | None = None
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.legend:
            by_action: dict[int, list[str]] = {}
            for key, index in self.table.items():
                by_action.setdefault(index, []).append(key)
            self.legend = [
                (" ".join(map(show, keys)), self.names[i]) for i, keys in sorted(by_action.items())
            ]

    def known(self) -> frozenset[str]:
        return frozenset(self.table)

    def action(self, held: Collection[str]) -> np.ndarray | None:
        pressed = [key for key in held if key in self.table]
        return np.asarray(self.table[pressed[-1]]) if pressed else self.rest

    def name(self, action: np.ndarray) -> str:
        return self.names[int(action)]


@dataclass
class PartKeys:
    """Several choices at once: a row of the keyboard for each; what is not held is 0."""

    choices: tuple[int, ...]
    rest: np.ndarray | None = None
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._table = {
            key: (part, choice)
            for part, (row, count) in enumerate(zip(ROWS, self.choices))
            for choice, key in enumerate(row[:count])
        }
        self.legend = [
            (
                " … ".join(dict.fromkeys((row[0], row[min(count, len(row)) - 1]))),
                f"part {part}: 0 to {count - 1}",
            )
            for part, (row, count) in enumerate(zip(ROWS, self.choices))
        ]

    def known(self) -> frozenset[str]:
        return frozenset(self._table)

    def action(self, held: Collection[str]) -> np.ndarray | None:
        action = np.zeros(len(self.choices), np.int64)
        pressed = [self._table[key] for key in held if key in self._table]
        for part, choice in pressed:
            action[part] = choice
        return action if pressed else self.rest

    def name(self, action: np.ndarray) -> str:
        return " ".join(str(int(part)) for part in action)


@dataclass
class AxisKeys:
    """Continuous actions: a pair of keys for each dimension, ±1 while held, else at rest (0 in the environment's units)."""

    spec: ActionSpec
    pairs: Sequence[tuple[Collection[str], Collection[str]]]  # for each dimension: keys down, keys up
    labels: Sequence[str]
    rest: np.ndarray = field(init=False)
    legend: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        low, high = np.asarray(self.spec.low), np.asarray(self.spec.high)
        self.rest = np.clip(-(high + low) / np.maximum(high - low, 1e-9), -1.0, 1.0).astype(np.float32)
        self.legend = [
            (" ".join(show(key) for key in (*down, *up)), label)
            for (down, up), label in zip(self.pairs, self.labels)
        ]

    def known(self) -> frozenset[str]:
        return frozenset(key for down, up in self.pairs for key in (*down, *up))

    def action(self, held: Collection[str]) -> np.ndarray:
        action = self.rest.copy()
        for dimension, (down, up) in enumerate(self.pairs):
            pushed = any(key in held for key in up) - any(key in held for key in down)
            if pushed:
                action[dimension] = pushed
        return action

    def name(self, action: np.ndarray) -> str:
        return " ".join(f"{float(value):+.2f}" for value in action)


def generic_keys(action: ActionSpec) -> Keymap:
    """Digits and letters for choices, arrows and letter pairs for axes."""
    if action.kind == "continuous":
        pairs = [
            (("ArrowLeft", "a"), ("ArrowRight", "d")),
            (("ArrowDown", "s"), ("ArrowUp", "w")),
            *[((down,), (up,)) for down, up in ("qe", "zc", "fr", "gt", "hy", "ju", "ki", "lo")],
        ][: action.shape[0]]
        return AxisKeys(action, pairs, [f"axis {index}" for index in range(len(pairs))])
    if action.kind == "multi_discrete":
        return PartKeys(action.choices)
    count = action.choices[0]
    table = {key: index for index, key in enumerate(("0123456789" + LETTERS)[:count])}
    # The usual order of the toy tasks: left, right; left, nothing, right; left, down, right, up.
    arrows = {2: (0, None, 1, None), 3: (0, 1, 2, None), 4: (0, 1, 2, 3)}.get(count, ())
    table |= {key: index for key, index in zip(ARROWS, arrows) if index is not None}
    return DiscreteKeys(table, [str(index) for index in range(count)])


def control_legend(mode: str = "") -> list[tuple[str, str]]:
    """Keys that steer the session, for people; those of a pair in one line."""
    pairs = {"-": ("=", "slower, faster"), "[": ("]", "shorter, longer dreams")}
    seconds = {key for key, _ in pairs.values()}
    rows = [(show(key), text) for key, (_, _, text) in REPLAY_CONTROLS.items()] if mode == "episodes" else []
    for key, (_, _, text) in CONTROLS.items():
        if key in pairs:
            rows.append((f"{show(key)} {show(pairs[key][0])}", pairs[key][1]))
        elif key not in seconds:
            rows.append((show(key), text))
    return rows


def show(key: str) -> str:
    """A key as people write it."""
    arrows = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
    return (
        arrows.get(key)
        or {" ": "Space", "PageUp": "PgUp", "PageDown": "PgDn"}.get(key)
        or (key.upper() if len(key) == 1 else key)
    )


def normalise(key: str) -> str:
    """The one name of a key: letters in lower case, shifted signs as their plain ones."""
    plain = {"+": "=", "_": "-", "{": "[", "}": "]", ">": ".", "<": ",", '"': "'", ":": ";", "Spacebar": " "}
    return plain.get(key, key.lower() if len(key) == 1 else key)
