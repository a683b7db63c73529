"""Keys: from held keys to an action, for any action space; the keys of a session; the state of the keyboard.

Key names are the browser's `KeyboardEvent.key`, letters in lower case: "a", " ", "ArrowLeft", "Tab". The
desktop window uses the same names. Keymaps of suites are in `keymaps.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_lab.records import ActionSpec

# Keys that control the session: key -> (command, value, description). The first three are those of IRIS.
CONTROLS: dict[str, tuple[str, object, str]] = {
    "Enter": ("reset", None, "new episode"),
    ".": ("pause", None, "pause"),
    ",": ("record", None, "record"),
    "n": ("step_once", None, "one step"),
    "m": ("control", None, "you / agent"),
    "v": ("mode", None, "real / dream / side by side"),
    "b": ("wait", None, "step by key"),
    "-": ("faster", -1, "slower"),
    "=": ("faster", 1, "faster"),
    "[": ("longer", -1, "shorter dreams"),
    "]": ("longer", 1, "longer dreams"),
    "'": ("parts", None, "more pictures"),
    ";": ("header", None, "numbers"),
    "Backspace": ("rewind", -1, "dream: back a step"),
    "Delete": ("rewind", 1, "dream: forward again"),
    "\\": ("again", None, "dream: same start"),
    "/": ("starts", None, "dream: choose a start"),
    "`": ("clip", None, "GIF of the last 10 s"),
    "F7": ("warmer", -1, "temperature down"),
    "F8": ("warmer", 1, "temperature up"),
    "F9": ("weights", None, "next checkpoint"),
    "F10": ("run", None, "next run"),
}
CHOICE_KEYS = "12345678"  # of the start states that are shown
# Keys during replay of episodes: those of IRIS, and one more for recordings.
REPLAY_CONTROLS: dict[str, tuple[str, object, str]] = {
    "ArrowLeft": ("seek", -1, "one step back"),
    "ArrowRight": ("seek", 1, "one step forward"),
    "PageDown": ("seek", -10, "ten steps back"),
    "PageUp": ("seek", 10, "ten steps forward"),
    " ": ("seek", -(10**9), "to the start"),
    "ArrowUp": ("episode", 1, "next episode"),
    "ArrowDown": ("episode", -1, "previous episode"),
    "t": ("split", "train", "train"),
    "y": ("split", "test", "test"),
    "i": ("split", "imagination", "imagination"),
    "o": ("split", "recordings", "recordings"),
    "d": ("dream_here", None, "dream from this step"),
}
LETTERS = "qwertyuiopasdfghjklzxc"  # for actions after the tenth; none of them is in CONTROLS
ARROWS = ("ArrowLeft", "ArrowDown", "ArrowRight", "ArrowUp")
ROWS = (
    "1234567890",
    "qwertyuiop",
    "asdfghjkl",
    "zxc",
)  # one keyboard row per part of a multi-discrete action


class Keymap(Protocol):
    """Maps held keys to an action in the stored format."""

    legend: list[tuple[str, str]]  # (keys, description)

    @property
    def idle(self) -> np.ndarray | None:
        """Action while no key is held; None: play waits for a key."""

    def known_keys(self) -> frozenset[str]: ...

    def action(self, held: Collection[str]) -> np.ndarray | None: ...

    def name(self, action: np.ndarray) -> str: ...

    def main_keys(self) -> list[str]:
        """Return the keys to name in a hint, arrows first."""


def arrows_first(keys: Collection[str]) -> list[str]:
    """Return the arrows among the keys, or else all of them in order."""
    return [key for key in ("ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown") if key in keys] or sorted(keys)


@dataclass
class DiscreteKeys:
    """One action per key; of several held keys the newest counts."""

    table: dict[str, int]
    names: Sequence[str]
    idle: np.ndarray | None = None
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.legend:
            by_action: dict[int, list[str]] = {}
            for key, index in self.table.items():
                by_action.setdefault(index, []).append(key)
            self.legend = [
                (" ".join(map(show, keys)), self.names[i]) for i, keys in sorted(by_action.items())
            ]

    def known_keys(self) -> frozenset[str]:
        return frozenset(self.table)

    def action(self, held: Collection[str]) -> np.ndarray | None:
        pressed = [key for key in held if key in self.table]
        return np.asarray(self.table[pressed[-1]]) if pressed else self.idle

    def name(self, action: np.ndarray) -> str:
        return self.names[int(action)]

    def main_keys(self) -> list[str]:
        return arrows_first(self.table)


@dataclass
class MultiDiscreteKeys:
    """Multi-discrete actions: one keyboard row per part; a part without a held key is 0."""

    choices: tuple[int, ...]
    idle: np.ndarray | None = None
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

    def known_keys(self) -> frozenset[str]:
        return frozenset(self._table)

    def action(self, held: Collection[str]) -> np.ndarray | None:
        action = np.zeros(len(self.choices), np.int64)
        pressed = [self._table[key] for key in held if key in self._table]
        for part, choice in pressed:
            action[part] = choice
        return action if pressed else self.idle

    def name(self, action: np.ndarray) -> str:
        return " ".join(str(int(part)) for part in action)

    def main_keys(self) -> list[str]:
        return [row[0] for row, _ in zip(ROWS, self.choices)]


@dataclass
class AxisKeys:
    """Continuous actions: a pair of keys per dimension, ±1 while held, else 0 in the environment's units."""

    spec: ActionSpec
    pairs: Sequence[tuple[Collection[str], Collection[str]]]  # per dimension: keys for -1, keys for +1
    labels: Sequence[str]
    idle: np.ndarray = field(init=False)
    legend: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        low, high = np.asarray(self.spec.low), np.asarray(self.spec.high)
        self.idle = np.clip(-(high + low) / np.maximum(high - low, 1e-9), -1.0, 1.0).astype(np.float32)
        self.legend = [
            (" ".join(show(key) for key in (*down, *up)), label)
            for (down, up), label in zip(self.pairs, self.labels)
        ]

    def known_keys(self) -> frozenset[str]:
        return frozenset(key for down, up in self.pairs for key in (*down, *up))

    def action(self, held: Collection[str]) -> np.ndarray:
        action = self.idle.copy()
        for dimension, (down, up) in enumerate(self.pairs):
            pushed = any(key in held for key in up) - any(key in held for key in down)
            if pushed:
                action[dimension] = pushed
        return action

    def name(self, action: np.ndarray) -> str:
        if len(self.labels) > 3:
            return " ".join(f"{float(value):+.2f}" for value in action)
        return " ".join(f"{label} {float(value):+.2f}" for label, value in zip(self.labels, action))

    def main_keys(self) -> list[str]:
        return arrows_first(self.known_keys())


def generic_keys(action: ActionSpec, names: Sequence[str] = ()) -> Keymap:
    """Return the default keymap: digits and letters for choices, arrows and letter pairs for axes.

    names: of the actions, or of the axes; numbers if there are none
    """
    if action.kind == "continuous":
        pairs = [
            (("ArrowLeft", "a"), ("ArrowRight", "d")),
            (("ArrowDown", "s"), ("ArrowUp", "w")),
            *[((down,), (up,)) for down, up in ("qe", "zc", "fr", "gt", "hy", "ju", "ki", "lo")],
        ][: action.shape[0]]
        named = len(names) == action.shape[0]
        return AxisKeys(
            action, pairs, names if named else [f"axis {index}" for index in range(action.shape[0])]
        )
    if action.kind == "multi_discrete":
        return MultiDiscreteKeys(action.choices)
    count = action.choices[0]
    table = {key: index for index, key in enumerate(("0123456789" + LETTERS)[:count])}
    # The usual order of toy tasks: left, right; left, nothing, right; left, down, right, up.
    arrows = {2: (0, None, 1, None), 3: (0, 1, 2, None), 4: (0, 1, 2, 3)}.get(count, ())
    table |= {key: index for key, index in zip(ARROWS, arrows) if index is not None}
    return DiscreteKeys(
        table, names if len(names) == count else [f"action {index}" for index in range(count)]
    )


def control_legend(mode: str = "") -> list[tuple[str, str]]:
    """Return (keys, description) of the session's controls; paired keys share a line."""
    pairs = {
        "-": ("=", "slower, faster"),
        "[": ("]", "shorter, longer dreams"),
        "F7": ("F8", "temperature down, up"),
        "F9": ("F10", "next checkpoint, run"),
        "Backspace": ("Delete", "dream: back, forward"),
    }
    seconds = {key for key, _ in pairs.values()}
    rows = [(show(key), text) for key, (_, _, text) in REPLAY_CONTROLS.items()] if mode == "episodes" else []
    for key, (_, _, text) in CONTROLS.items():
        if key in pairs:
            rows.append((f"{show(key)} {show(pairs[key][0])}", pairs[key][1]))
        elif key not in seconds:
            rows.append((show(key), text))
    return rows


def show(key: str) -> str:
    """Return the display name of a key."""
    arrows = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
    return (
        arrows.get(key)
        or {" ": "Space", "PageUp": "PgUp", "PageDown": "PgDn", "Backspace": "⌫", "Delete": "Del"}.get(key)
        or (key.upper() if len(key) == 1 else key)
    )


def normalise(key: str) -> str:
    """Return the canonical name of a key: lower-case letters, and shifted signs as unshifted ones."""
    plain = {"+": "=", "_": "-", "{": "[", "}": "]", ">": ".", "<": ",", '"': "'", ":": ";", "Spacebar": " "}
    plain |= {"?": "/", "|": "\\", "~": "`"}
    return plain.get(key, key.lower() if len(key) == 1 else key)


# --- Keyboard state ---

REPEAT_AFTER = 0.3  # seconds until a held key repeats, if play waits for keys


class Keyboard:
    """Held and tapped action keys by time: a tap between two steps is not lost, and a held key repeats."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}  # key -> time of the press
        self._tapped: dict[str, None] = {}  # pressed since the last step, held or not

    @property
    def tapped(self) -> bool:
        return bool(self._tapped)

    def press(self, key: str, now: float) -> None:
        if key not in self._held:  # a browser repeats a held key
            self._held[key] = now
            self._tapped[key] = None

    def release(self, key: str) -> None:
        self._held.pop(key, None)

    def clear(self) -> None:
        self._held.clear()
        self._tapped.clear()

    def clear_taps(self) -> None:
        """Forget the taps after a step."""
        self._tapped.clear()

    def held(self) -> list[str]:
        """Return the keys for a timed step: held or tapped, the newest last."""
        return [*self._held, *(key for key in self._tapped if key not in self._held)]

    def due(self, now: float) -> list[str]:
        """Return the keys for a step on key press: tapped, or held long enough to repeat."""
        repeating = [key for key, pressed in self._held.items() if now - pressed >= REPEAT_AFTER]
        return [*repeating, *(key for key in self._tapped if key not in repeating)]

    def seconds_until_due(self, now: float) -> float | None:
        """Return the seconds until `due` returns a key; None if no key is pressed."""
        if self._tapped:
            return 0.0
        oldest = min(self._held.values(), default=None)
        return None if oldest is None else max(0.0, REPEAT_AFTER - (now - oldest))
