"""Keymaps: from held keys to an action, for any action space, and the state of the keyboard.

Key names are the browser's `KeyboardEvent.key`, letters in lower case: "a", " ", "ArrowLeft", "Tab". The
desktop window uses the same names.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, Spec

# Keys that control the session: key -> (command, value, description). The first three are those of IRIS.
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
        return " ".join(f"{float(value):+.2f}" for value in action)


def generic_keys(action: ActionSpec) -> Keymap:
    """Return the default keymap: digits and letters for choices, arrows and letter pairs for axes."""
    if action.kind == "continuous":
        pairs = [
            (("ArrowLeft", "a"), ("ArrowRight", "d")),
            (("ArrowDown", "s"), ("ArrowUp", "w")),
            *[((down,), (up,)) for down, up in ("qe", "zc", "fr", "gt", "hy", "ju", "ki", "lo")],
        ][: action.shape[0]]
        return AxisKeys(action, pairs, [f"axis {index}" for index in range(len(pairs))])
    if action.kind == "multi_discrete":
        return MultiDiscreteKeys(action.choices)
    count = action.choices[0]
    table = {key: index for index, key in enumerate(("0123456789" + LETTERS)[:count])}
    # The usual order of toy tasks: left, right; left, nothing, right; left, down, right, up.
    arrows = {2: (0, None, 1, None), 3: (0, 1, 2, None), 4: (0, 1, 2, 3)}.get(count, ())
    table |= {key: index for key, index in zip(ARROWS, arrows) if index is not None}
    return DiscreteKeys(table, [str(index) for index in range(count)])


def control_legend(mode: str = "") -> list[tuple[str, str]]:
    """Return (keys, description) of the session's controls; paired keys share a line."""
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
    """Return the display name of a key."""
    arrows = {"ArrowLeft": "←", "ArrowRight": "→", "ArrowUp": "↑", "ArrowDown": "↓"}
    return (
        arrows.get(key)
        or {" ": "Space", "PageUp": "PgUp", "PageDown": "PgDn"}.get(key)
        or (key.upper() if len(key) == 1 else key)
    )


def normalise(key: str) -> str:
    """Return the canonical name of a key: lower-case letters, and shifted signs as unshifted ones."""
    plain = {"+": "=", "_": "-", "{": "[", "}": "]", ">": ".", "<": ",", '"': "'", ":": ";", "Spacebar": " "}
    return plain.get(key, key.lower() if len(key) == 1 else key)


# --- Keymaps of suites: Atari, Crafter, MiniGrid, CarRacing, classic control ---

# The keys of Atari and Crafter are those of IRIS and Δ-IRIS; Atari also accepts combinations (W+D+Space), as
# DIAMOND.

# key -> (right, up, fire)
JOYSTICK: dict[str, tuple[int, int, bool]] = {
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
# Prefix of the registered id -> names of the actions, key -> action, and the idle action.
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
class JoystickKeys:
    """A joystick with one button: held keys are summed.

    An unsupported position falls back to the nearest one.
    """

    names: Sequence[str]  # of the game's actions in the Arcade Learning Environment
    idle: np.ndarray | None = None
    legend: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._index = {name: index for index, name in enumerate(self.names)}
        self.idle = np.asarray(self._index.get("NOOP", 0))
        self.legend = [
            ("W A S D", "up left down right"),
            ("Space", "fire"),
            ("↑ ← ↓ →", "the same with fire"),
            ("R T F G", "diagonals"),
            ("Y U H J", "diagonals with fire"),
        ]

    def known_keys(self) -> frozenset[str]:
        return frozenset(JOYSTICK)

    def action(self, held: Collection[str]) -> np.ndarray | None:
        pushed = [JOYSTICK[key] for key in held if key in JOYSTICK]
        if not pushed:
            return self.idle
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
            name = joystick_name(x, y, button)
            if name in self._index and (name != "NOOP" or not fire):
                return np.asarray(self._index[name])
        return self.idle

    def name(self, action: np.ndarray) -> str:
        return self.names[int(action)].lower()


def joystick_name(right: int, up: int, fire: bool) -> str:
    """Return the emulator's name of a joystick position: UPRIGHTFIRE, LEFT, NOOP."""
    name = (
        {1: "UP", -1: "DOWN", 0: ""}[up] + {1: "RIGHT", -1: "LEFT", 0: ""}[right] + ("FIRE" if fire else "")
    )
    return name or "NOOP"


def keymap_for(spec: Spec) -> Keymap:
    """Return the keymap of an environment by its name, or the generic one."""
    suite, _, task = spec.name.partition("/")
    action = spec.action
    if action.kind == "discrete":
        count = action.choices[0]
        if suite in ("atari", "atari100k"):
            names = _atari_names(task, count)
            if names:
                return JoystickKeys(names)
        if suite == "crafter" and count == len(CRAFTER_ACTIONS):
            table = {key: CRAFTER_ACTIONS.index(name) for key, name in CRAFTER.items()}
            return DiscreteKeys(
                table, [name.replace("_", " ") for name in CRAFTER_ACTIONS], idle=np.asarray(0)
            )
        if suite == "minigrid" and count == len(MINIGRID_ACTIONS):
            return DiscreteKeys(MINIGRID, MINIGRID_ACTIONS)
        if spec.name.startswith(("carracing", "CarRacing")) and count == len(CAR_ACTIONS):
            return DiscreteKeys(CAR, CAR_ACTIONS, idle=np.asarray(0))
        for prefix, (labels, table, nothing) in CLASSIC.items():
            if spec.name.startswith(prefix) and count == len(labels):
                return DiscreteKeys(table, labels, idle=None if nothing is None else np.asarray(nothing))
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
    """Return the names of a game's actions; empty if the emulator is missing or its action count differs."""
    from rl_lab.environments.suites.atari import resolve

    try:
        import ale_py

        rom = ale_py.roms.get_rom_path(resolve(game))
    except (ModuleNotFoundError, ConfigError):
        return []
    if rom is None:
        return []
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.loadROM(rom)
    legal, minimal = emulator.getLegalActionSet(), emulator.getMinimalActionSet()
    actions = minimal if len(minimal) == count else legal
    return [action.name for action in actions] if len(actions) == count else []


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
