"""Which key does what: from held keys to an action, for any action space.

Key names are the browser's `KeyboardEvent.key`, letters in lower case: "a", " ", "ArrowLeft", "Tab". The desktop
window uses the same names. Suites with customs of their own are in keys_suites.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_lab.records import ActionSpec, Spec

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


# --------------------
# Keys of the suites that have customs of their own: Atari, Crafter, MiniGrid, CarRacing, and some classic tasks.
#
# Atari's and Crafter's are those of IRIS and Δ-IRIS; Atari also takes chords (W+D+Space), as DIAMOND does.


# key -> (right, up, fire)
STICK: dict[str, tuple[int, int, bool]] = {
    "w": (0, 1, False),
    "s": (0, -1, False),
    "a": (-1, 0, False),
    "d": (1, 0, False),
    " ": (0, 0, True),
    "t": (1, 1, False),
    "r": (-1, 1, False),
    "g": (1, -1, False),
    "f": (-1, -1, False),
    "ArrowUp": (0, 1, True),
    "ArrowDown": (0, -1, True),
    "ArrowLeft": (-1, 0, True),
    "ArrowRight": (1, 0, True),
    "u": (1, 1, True),
    "y": (-1, 1, True),
    "j": (1, -1, True),
    "h": (-1, -1, True),
}
CRAFTER: dict[str, str] = {
    "a": "move_left",
    "d": "move_right",
    "w": "move_up",
    "s": "move_down",
    " ": "do",
    "Tab": "sleep",
    "r": "place_stone",
    "t": "place_table",
    "f": "place_furnace",
    "p": "place_plant",
    "1": "make_wood_pickaxe",
    "2": "make_stone_pickaxe",
    "3": "make_iron_pickaxe",
    "4": "make_wood_sword",
    "5": "make_stone_sword",
    "6": "make_iron_sword",
    "ArrowLeft": "move_left",
    "ArrowRight": "move_right",
    "ArrowUp": "move_up",
    "ArrowDown": "move_down",
}
# Crafter's actions in its own order (crafter/data.yaml).
CRAFTER_ACTIONS = [
    "noop",
    "move_left",
    "move_right",
    "move_up",
    "move_down",
    "do",
    "sleep",
    "place_stone",
    "place_table",
    "place_furnace",
    "place_plant",
    "make_wood_pickaxe",
    "make_stone_pickaxe",
    "make_iron_pickaxe",
    "make_wood_sword",
    "make_stone_sword",
    "make_iron_sword",
]
# MiniGrid's actions in their own order (minigrid/core/actions.py), and keys for them.
MINIGRID_ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
MINIGRID = {
    **{"ArrowLeft": 0, "ArrowRight": 1, "ArrowUp": 2, "a": 0, "d": 1, "w": 2},
    **{"p": 3, "l": 4, " ": 5, "x": 6},
}
CAR_ACTIONS = ("nothing", "left", "right", "gas", "brake")  # gymnasium/envs/box2d/car_racing.py
CAR = {
    **{"ArrowLeft": 1, "ArrowRight": 2, "ArrowUp": 3, "ArrowDown": 4},
    **{"a": 1, "d": 2, "w": 3, "s": 4, " ": 4},
}
# Registered ids that begin with …: names of their actions, keys by index, and the one that does nothing.
CLASSIC: dict[str, tuple[Sequence[str], dict[str, int], int | None]] = {
    "CartPole": (("left", "right"), {"ArrowLeft": 0, "a": 0, "ArrowRight": 1, "d": 1}, None),
    "MountainCar-": (
        ("left", "nothing", "right"),
        {"ArrowLeft": 0, "a": 0, "ArrowDown": 1, "ArrowRight": 2, "d": 2},
        1,
    ),
    "Acrobot": (
        ("left", "nothing", "right"),
        {"ArrowLeft": 0, "a": 0, "ArrowDown": 1, "ArrowRight": 2, "d": 2},
        1,
    ),
    "LunarLander-": (
        ("nothing", "left engine", "main engine", "right engine"),
        {"ArrowLeft": 1, "a": 1, "ArrowUp": 2, "w": 2, "ArrowRight": 3, "d": 3},
        0,
    ),
}


@dataclass
class StickKeys:
    """A joystick with one button: held keys add up; what the game does not know falls back to its nearest."""

    names: Sequence[str]  # of the game's actions, as the Arcade Learning Environment writes them
    rest: np.ndarray | None = None
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._index = {name: index for index, name in enumerate(self.names)}
        self.rest = np.asarray(self._index.get("NOOP", 0))
        self.legend = [
            ("W A S D", "up left down right"),
            ("Space", "fire"),
            ("↑ ← ↓ →", "the same with fire"),
            ("R T F G", "diagonals"),
            ("Y U H J", "diagonals with fire"),
        ]

    def known(self) -> frozenset[str]:
        return frozenset(STICK)

    def action(self, held: Collection[str]) -> np.ndarray | None:
        pushed = [STICK[key] for key in held if key in STICK]
        if not pushed:
            return self.rest
        right = int(np.clip(sum(push[0] for push in pushed), -1, 1))
        up = int(np.clip(sum(push[1] for push in pushed), -1, 1))
        fire = any(push[2] for push in pushed)
        for x, y, button in (
            (right, up, fire),
            (right, up, False),
            (right, 0, fire),
            (0, up, fire),
            (0, 0, fire),
        ):
            name = stick_name(x, y, button)
            if name in self._index and (name != "NOOP" or not fire):
                return np.asarray(self._index[name])
        return self.rest

    def name(self, action: np.ndarray) -> str:
        return self.names[int(action)].lower()


def stick_name(right: int, up: int, fire: bool) -> str:
    """The emulator's name of a joystick position: UPRIGHTFIRE, LEFT, NOOP."""
    name = (
        {1: "UP", -1: "DOWN", 0: ""}[up] + {1: "RIGHT", -1: "LEFT", 0: ""}[right] + ("FIRE" if fire else "")
    )
    return name or "NOOP"


def keymap_for(spec: Spec) -> Keymap:
    """The keys of an environment, by its name; the generic ones where it is not known."""
    suite, _, task = spec.name.partition("/")
    action = spec.action
    if action.kind == "discrete":
        count = action.choices[0]
        if suite in ("atari", "atari100k"):
            names = _atari_names(task, count)
            if names:
                return StickKeys(names)
        if suite == "crafter" and count == len(CRAFTER_ACTIONS):
            table = {key: CRAFTER_ACTIONS.index(name) for key, name in CRAFTER.items()}
            return DiscreteKeys(
                table, [name.replace("_", " ") for name in CRAFTER_ACTIONS], rest=np.asarray(0)
            )
        if suite == "minigrid" and count == len(MINIGRID_ACTIONS):
            return DiscreteKeys(MINIGRID, MINIGRID_ACTIONS)
        if spec.name.startswith(("carracing", "CarRacing")) and count == len(CAR_ACTIONS):
            return DiscreteKeys(CAR, CAR_ACTIONS, rest=np.asarray(0))
        for prefix, (labels, table, nothing) in CLASSIC.items():
            if spec.name.startswith(prefix) and count == len(labels):
                return DiscreteKeys(table, labels, rest=None if nothing is None else np.asarray(nothing))
    if (
        action.kind == "continuous"
        and spec.name.startswith(("carracing", "CarRacing"))
        and action.shape == (3,)
    ):
        pairs = (
            (("ArrowLeft", "a"), ("ArrowRight", "d")),
            ((), ("ArrowUp", "w")),
            ((), ("ArrowDown", "s", " ")),
        )
        return AxisKeys(action, pairs, ("steer", "gas", "brake"))
    return generic_keys(action)


def _atari_names(game: str, count: int) -> list[str]:
    """Names of a game's actions; none where the emulator is not installed or says otherwise."""
    try:
        import ale_py
    except ModuleNotFoundError:
        return []
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    rom = ale_py.roms.get_rom_path(game)
    if rom is None:
        return []
    emulator.loadROM(rom)
    legal, least = emulator.getLegalActionSet(), emulator.getMinimalActionSet()
    actions = least if len(least) == count else legal
    return [action.name for action in actions] if len(actions) == count else []


# --------------------
# Held and tapped keys: a tap between two steps is not lost, and a held key repeats.


REPEAT_AFTER = 0.3  # seconds that a key is held before it repeats, where play waits for keys


class Keyboard:
    """Keys that mean actions, in the order they were pressed."""

    def __init__(self) -> None:
        self._held: dict[str, float] = {}  # key -> since when
        self._tapped: dict[str, None] = {}  # pressed since the last step, held or not

    @property
    def tapped(self) -> bool:
        return bool(self._tapped)

    def press(self, key: str, now: float) -> None:
        if key not in self._held:  # a browser sends a held key again and again
            self._held[key] = now
            self._tapped[key] = None

    def lift(self, key: str) -> None:
        self._held.pop(key, None)

    def clear(self) -> None:
        self._held.clear()
        self._tapped.clear()

    def stepped(self) -> None:
        """A step has answered what was tapped."""
        self._tapped.clear()

    def down(self) -> list[str]:
        """Keys for a step by the clock: all that are held or were tapped, the newest last."""
        return [*self._held, *(key for key in self._tapped if key not in self._held)]

    def struck(self, now: float) -> list[str]:
        """Keys for a step by the key: those tapped, and those held long enough to repeat."""
        repeating = [key for key, begun in self._held.items() if now - begun >= REPEAT_AFTER]
        return [*repeating, *(key for key in self._tapped if key not in repeating)]

    def seconds_to_strike(self, now: float) -> float | None:
        """Until `struck` gives something; None when nothing is pressed."""
        if self._tapped:
            return 0.0
        oldest = min(self._held.values(), default=None)
        return None if oldest is None else max(0.0, REPEAT_AFTER - (now - oldest))
