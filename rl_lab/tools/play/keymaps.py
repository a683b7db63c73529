"""Keymaps of suites (Atari, Crafter, MiniGrid, CarRacing, classic control, toy text), names of actions, and gamepads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_lab.errors import ConfigError
from rl_lab.records import Spec
from rl_lab.tools.play.keyboard import AxisKeys, DiscreteKeys, Keymap, generic_keys

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
    "FrozenLake": (
        ("left", "down", "right", "up"),
        {"ArrowLeft": 0, "ArrowDown": 1, "ArrowRight": 2, "ArrowUp": 3, "a": 0, "s": 1, "d": 2, "w": 3},
        None,
    ),
    "CliffWalking": (
        ("up", "right", "down", "left"),
        {"ArrowUp": 0, "ArrowRight": 1, "ArrowDown": 2, "ArrowLeft": 3, "w": 0, "d": 1, "s": 2, "a": 3},
        None,
    ),
    "Taxi": (
        ("down", "up", "right", "left", "pick up", "drop off"),
        {"ArrowDown": 0, "ArrowUp": 1, "ArrowRight": 2, "ArrowLeft": 3, "p": 4, "l": 5},
        None,
    ),
    "LunarLander-": (
        ("nothing", "left engine", "main engine", "right engine"),
        {"ArrowLeft": 1, "a": 1, "ArrowUp": 2, "w": 2, "ArrowRight": 3, "d": 3},
        0,
    ),
}

# Prefix of the task -> names of the choices or of the axes, for the generic keys.
ACTION_NAMES: dict[str, Sequence[str]] = {
    "dummy/catch": ("left", "stay", "right"),
    "dummy/bounce": ("left", "stay", "right"),
    "dummy/lock": ("digit 0", "digit 1", "digit 2", "digit 3"),
    "Pendulum": ("torque",),
    "MountainCarContinuous": ("push",),
    "LunarLanderContinuous": ("main engine", "side engines"),
    "BipedalWalker": ("hip 1", "knee 1", "hip 2", "knee 2"),
    "Blackjack": ("stick", "hit"),
    "pusht/": ("x", "y"),
    "memory_maze/": ("nothing", "forward", "left", "right", "forward left", "forward right"),
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

    def main_keys(self) -> list[str]:
        return ["w", "a", "s", "d", " "]


def joystick_name(right: int, up: int, fire: bool) -> str:
    """Return the emulator's name of a joystick position: UPRIGHTFIRE, LEFT, NOOP."""
    name = (
        {1: "UP", -1: "DOWN", 0: ""}[up] + {1: "RIGHT", -1: "LEFT", 0: ""}[right] + ("FIRE" if fire else "")
    )
    return name or "NOOP"


# All actions in the emulator's order (ale-py, ALEInterface.getLegalActionSet).
FULL_JOYSTICK = [
    *("NOOP", "FIRE", "UP", "RIGHT", "LEFT", "DOWN", "UPRIGHT", "UPLEFT", "DOWNRIGHT", "DOWNLEFT", "UPFIRE"),
    *("RIGHTFIRE", "LEFTFIRE", "DOWNFIRE", "UPRIGHTFIRE", "UPLEFTFIRE", "DOWNRIGHTFIRE", "DOWNLEFTFIRE"),
]


def keymap_for(spec: Spec, names: Sequence[str] = ()) -> Keymap:
    """Return the keymap of an environment by its name, or the generic one.

    names: of the actions, as the environment itself gives them
    """
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
        # Dynamic-Obstacles has only the first three.
        if suite == "minigrid" and 3 <= count <= len(MINIGRID_ACTIONS):
            table = {key: index for key, index in MINIGRID.items() if index < count}
            return DiscreteKeys(table, MINIGRID_ACTIONS[:count])
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
    return generic_keys(action, names or action_names(spec))


def action_names(spec: Spec) -> Sequence[str]:
    """Return names of the actions of known environments, or () for others."""
    return next((names for prefix, names in ACTION_NAMES.items() if spec.name.startswith(prefix)), ())


def _atari_names(game: str, count: int) -> list[str]:
    """Return the names of a game's actions; empty if its action count differs.

    Without the emulator, as in the dream of an agent that was taken away, only those of the full set are known.
    """
    from rl_lab.environments.suites.atari import resolve

    try:
        import ale_py

        rom = ale_py.roms.get_rom_path(resolve(game))
    except ImportError:
        return FULL_JOYSTICK if count == len(FULL_JOYSTICK) else []
    except ConfigError:
        return []
    if rom is None:
        return []
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.loadROM(rom)
    legal, minimal = emulator.getLegalActionSet(), emulator.getMinimalActionSet()
    actions = minimal if len(minimal) == count else legal
    return [action.name for action in actions] if len(actions) == count else []


# --- Gamepads ---

# Buttons of the standard gamepad (https://www.w3.org/TR/gamepad/#remapping) that control the session.
PAD_CONTROLS = {"start": "Enter", "select": ".", "lb": "Backspace", "rb": "Delete"}
PAD_BUTTONS = ("a", "b", "x", "y")


def pad_keys(keymap: Keymap) -> dict[str, str]:
    """Return the key that a gamepad's direction or button presses: {"left": "ArrowLeft", "a": " ", …}.

    The stick and the cross press arrows, or W A S D where the arrows mean something else. The four buttons press the
    keys that are left, Space first.
    """
    known = keymap.known_keys()
    arrows = {"left": "ArrowLeft", "right": "ArrowRight", "up": "ArrowUp", "down": "ArrowDown"}
    letters = {"left": "a", "right": "d", "up": "w", "down": "s"}
    moves = (
        letters
        if isinstance(keymap, JoystickKeys)
        else {n: arrows[n] if arrows[n] in known else letters[n] for n in arrows}
    )
    moves = {name: key for name, key in moves.items() if key in known}
    taken = {*arrows.values(), *letters.values()}
    if not moves:  # numbered actions without arrows
        taken = set()
    rest = sorted(
        (key for key in known if key not in taken),
        key=lambda key: (key != " ", len(key) > 1, not key.isalpha(), key),
    )
    return {**moves, **dict(zip(PAD_BUTTONS, rest)), **PAD_CONTROLS}
