"""Keys of the suites that have customs of their own: Atari, Crafter, MiniGrid, CarRacing, and some classic tasks.

Atari's and Crafter's are those of IRIS and Δ-IRIS; Atari also takes chords (W+D+Space), as DIAMOND does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_lab.records import Spec
from rl_lab.tools.play.keys import AxisKeys, DiscreteKeys, Keymap, generic_keys

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
