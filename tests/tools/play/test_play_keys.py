from __future__ import annotations

import sys

import numpy as np
import pytest

from rl_lab.records import ActionSpec, ArraySpec, Spec
from rl_lab.tools.play.keyboard import (
    CONTROLS,
    REPEAT_AFTER,
    REPLAY_CONTROLS,
    Keyboard,
    control_legend,
    generic_keys,
    normalise,
)
from rl_lab.tools.play.keymaps import (
    CRAFTER_ACTIONS,
    FULL_JOYSTICK,
    MINIGRID_ACTIONS,
    JoystickKeys,
    joystick_name,
    keymap_for,
    pad_keys,
)


def spec(name: str, action: ActionSpec) -> Spec:
    return Spec(name, {"image": ArraySpec((3, 64, 64), "uint8")}, action)


def discrete(count: int) -> ActionSpec:
    return ActionSpec("discrete", (), (count,))


def continuous(*bounds: tuple[float, float]) -> ActionSpec:
    low, high = zip(*bounds)
    return ActionSpec("continuous", (len(bounds),), low=low, high=high)


BREAKOUT = ("NOOP", "FIRE", "RIGHT", "LEFT")
FULL = tuple(joystick_name(x, y, f) for f in (False, True) for y in (0, 1, -1) for x in (0, 1, -1))


@pytest.mark.parametrize(
    ("held", "name"),
    [
        ("", "NOOP"),
        ("w", "UP"),
        ("wd", "UPRIGHT"),
        ("wd ", "UPRIGHTFIRE"),
        (" ", "FIRE"),
        ("t", "UPRIGHT"),
        ("r", "UPLEFT"),
        ("g", "DOWNRIGHT"),
        ("f", "DOWNLEFT"),
        ("u", "UPRIGHTFIRE"),
        ("y", "UPLEFTFIRE"),
        ("j", "DOWNRIGHTFIRE"),
        ("h", "DOWNLEFTFIRE"),
        ("ad", "NOOP"),
    ],
)
def test_atari_single_keys_and_chords(held: str, name: str):
    keys = JoystickKeys(FULL)
    assert FULL[int(keys.action(list(held)))] == name


def test_atari_arrows_and_fallbacks():
    assert FULL[int(JoystickKeys(FULL).action(["ArrowLeft"]))] == "LEFTFIRE"
    small = JoystickKeys(BREAKOUT)
    names = {held: BREAKOUT[int(small.action(list(held)))] for held in ("w", "wd", "d ", "a", " ", "s")}
    assert names == {"w": "NOOP", "wd": "RIGHT", "d ": "RIGHT", "a": "LEFT", " ": "FIRE", "s": "NOOP"}
    assert small.name(np.asarray(2)) == "right"


def test_atari_action_names():
    pytest.importorskip("ale_py")
    keys = keymap_for(spec("atari100k/breakout", discrete(4)))
    assert isinstance(keys, JoystickKeys) and tuple(keys.names) == BREAKOUT
    assert len(keymap_for(spec("atari/pong", discrete(18))).names) == 18
    # Breakout is the name in BreakoutNoFrameskip-v4.
    assert keymap_for(spec("atari100k/Breakout", discrete(4))).names == keys.names
    assert not isinstance(keymap_for(spec("atari/no_such_game", discrete(18))), JoystickKeys)
    assert not isinstance(keymap_for(spec("atari/pong", discrete(5))), JoystickKeys)  # no such set: digits


def test_atari_keys_without_the_emulator(monkeypatch: pytest.MonkeyPatch):
    """In a dream the emulator may be missing: names of the full set are known, as the emulator gives them."""
    pytest.importorskip("ale_py")
    assert list(keymap_for(spec("atari/pong", discrete(18))).names) == FULL_JOYSTICK  # read from the emulator
    monkeypatch.setitem(sys.modules, "ale_py", None)
    keys = keymap_for(spec("atari100k/boxing", discrete(18)))
    assert isinstance(keys, JoystickKeys) and keys.name(keys.action(["d", " "])) == "rightfire"
    assert not isinstance(keymap_for(spec("atari100k/breakout", discrete(4))), JoystickKeys)


def test_crafter_keys():
    crafter = pytest.importorskip("crafter")
    assert list(crafter.constants.actions) == CRAFTER_ACTIONS
    keys = keymap_for(spec("crafter/reward", discrete(17)))
    for key, name in {
        " ": "do",
        "Tab": "sleep",
        "r": "place stone",
        "6": "make iron sword",
        "w": "move up",
    }.items():
        assert keys.name(keys.action([key])) == name
    assert keys.name(keys.idle) == "noop"


def test_minigrid_keys_of_fewer_actions():
    keys = keymap_for(spec("minigrid/Dynamic-Obstacles-6x6", discrete(3)))
    assert [keys.name(keys.action([key])) for key in ("a", "ArrowRight", "w")] == ["left", "right", "forward"]
    assert keys.main_keys() and "p" not in keys.main_keys()


def test_minigrid_keys():
    actions = pytest.importorskip("minigrid.core.actions")
    assert [action.name for action in actions.Actions] == list(MINIGRID_ACTIONS)
    keys = keymap_for(spec("minigrid/DoorKey-5x5", discrete(7)))
    assert keys.idle is None  # turning, moving and picking up all change something: it waits
    assert [keys.name(keys.action([key])) for key in ("ArrowLeft", "w", " ", "p")] == [
        "left",
        "forward",
        "toggle",
        "pickup",
    ]


def test_car_keys():
    keys = keymap_for(spec("carracing/continuous", continuous((-1, 1), (0, 1), (0, 1))))
    assert keys.idle.tolist() == [0.0, -1.0, -1.0]  # straight, no gas, no brake, in the lab's [-1, 1]
    assert keys.action(["ArrowLeft", "ArrowUp"]).tolist() == [-1.0, 1.0, -1.0]
    assert keys.action([" "]).tolist() == [0.0, -1.0, 1.0]
    wheel = keymap_for(spec("carracing/discrete", discrete(5)))
    assert wheel.name(wheel.action(["ArrowDown"])) == "brake" and wheel.name(wheel.idle) == "nothing"


def test_classic_and_generic_keys():
    cart = keymap_for(spec("CartPole-v1", discrete(2)))
    assert cart.idle is None and cart.name(cart.action(["ArrowRight"])) == "right"
    digits = generic_keys(discrete(12))
    assert [int(digits.action([key])) for key in ("0", "9", "q", "w")] == [0, 9, 10, 11]
    assert int(generic_keys(discrete(3)).action(["ArrowRight"])) == 2
    assert digits.action([]) is None and digits.action(["F5"]) is None
    assert int(digits.action(["1", "3"])) == 3  # the newest
    parts = generic_keys(ActionSpec("multi_discrete", (2,), (4, 3)))
    assert parts.action(["2", "e"]).tolist() == [1, 2] and parts.action([]) is None
    axes = generic_keys(continuous((-2, 2), (-1, 1), (0, 4)))
    assert axes.action(["d", "s", "e"]).tolist() == [1.0, -1.0, 1.0]
    assert axes.action([]).tolist() == [0.0, 0.0, -1.0]
    assert axes.action(["ArrowLeft", "ArrowRight"]).tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    "name_action",
    [
        ("crafter/reward", discrete(17)),
        ("minigrid/Empty-5x5", discrete(7)),
        ("CartPole-v1", discrete(2)),
        ("LunarLander-v3", discrete(4)),
        ("carracing/discrete", discrete(5)),
        ("carracing/continuous", continuous((-1, 1), (0, 1), (0, 1))),
        ("some", discrete(25)),
        ("some", ActionSpec("multi_discrete", (4,), (10, 10, 9, 3))),
        ("some", continuous(*[(-1, 1)] * 10)),
    ],
    ids=lambda pair: f"{pair[0]} {pair[1].kind}",
)
def test_action_keys_are_no_controls(name_action: tuple[str, ActionSpec]):
    keys = keymap_for(spec(*name_action))
    assert not keys.known_keys() & set(CONTROLS)
    assert keys.legend and all(
        isinstance(keys.name(np.asarray(keys.action([key]))), str) for key in keys.known_keys()
    )


def test_control_legend_has_every_key_once():
    shown = " ".join(keys for keys, _ in control_legend()).split()
    assert len(shown) == len(set(shown)) == len(CONTROLS)
    assert len(control_legend("episodes")) == len(control_legend()) + len(REPLAY_CONTROLS)
    assert [normalise(key) for key in ("W", "+", ">", "ArrowUp", "Tab")] == ["w", "=", ".", "ArrowUp", "Tab"]


def test_taps_and_held_keys():
    board = Keyboard()
    board.press("a", 0.0)
    board.release("a")  # before any step
    assert board.held() == ["a"] and board.due(0.0) == ["a"]
    board.clear_taps()
    assert board.held() == [] and board.seconds_until_due(0.0) is None
    board.press("b", 1.0)
    board.clear_taps()
    assert board.held() == ["b"] and board.due(1.1) == []
    assert board.seconds_until_due(1.1) == pytest.approx(REPEAT_AFTER - 0.1)
    assert board.due(1.0 + REPEAT_AFTER) == ["b"]
    board.clear()
    assert board.held() == []


@pytest.mark.parametrize(
    ("name", "action", "held", "shown"),
    [
        ("dummy/catch", discrete(3), "ArrowLeft", "left"),
        ("dummy/bounce", discrete(3), "ArrowRight", "right"),
        ("FrozenLake-v1", discrete(4), "ArrowUp", "up"),
        ("CliffWalking-v1", discrete(4), "ArrowUp", "up"),
        ("Taxi-v3", discrete(6), "p", "pick up"),
        ("Pendulum-v1", continuous((-2, 2)), "ArrowRight", "torque +1.00"),
        ("my_env:Mine", discrete(3), "1", "action 1"),
    ],
)
def test_actions_have_names(name: str, action: ActionSpec, held: str, shown: str):
    keys = keymap_for(spec(name, action))
    assert keys.name(keys.action([held])) == shown


def test_own_environment_names_its_actions():
    """`metadata["action_names"]`, or DMC's actuators, reach the keymap through the environment."""
    import rl_lab
    from tests.environments.sample_envs import NamedActions

    with rl_lab.make_env(NamedActions) as env:
        names = env.action_names()
    assert names == ["jump", "duck"]
    keys = keymap_for(spec("sample_envs:NamedActions", discrete(2)), names)
    assert keys.name(np.asarray(1)) == "duck"
    assert keymap_for(spec("x", discrete(3)), names).name(np.asarray(1)) == "action 1"  # of another number
    with rl_lab.make_env("CartPole-v1", num_envs=2, workers=1) as env:
        assert env.action_names() == []


def test_dmc_actuators_are_named():
    pytest.importorskip("dm_control")
    import rl_lab

    with rl_lab.make_env("dmc/cartpole_swingup") as env:
        assert env.action_names() == ["slide"]


@pytest.mark.parametrize(
    ("name", "action", "expected"),
    [
        ("CartPole-v1", discrete(2), {"left": "ArrowLeft", "right": "ArrowRight"}),
        ("minigrid/Empty-5x5", discrete(7), {"left": "ArrowLeft", "up": "ArrowUp", "a": " "}),
        ("crafter/reward", discrete(17), {"down": "ArrowDown", "a": " ", "b": "f"}),
        ("carracing/continuous", continuous((-1, 1), (0, 1), (0, 1)), {"left": "ArrowLeft", "a": " "}),
        ("x", discrete(6), {"a": "0", "b": "1"}),
    ],
)
def test_gamepad_presses_keys(name: str, action: ActionSpec, expected: dict[str, str]):
    keys = keymap_for(spec(name, action))
    pad = pad_keys(keys)
    assert expected.items() <= pad.items()
    known = {*keys.known_keys(), *CONTROLS}
    assert set(pad.values()) <= known and pad["start"] == "Enter"
    assert len(set(pad.values())) == len(pad)


def test_gamepad_of_an_atari_game_moves_without_fire():
    pad = pad_keys(JoystickKeys(FULL))
    assert (pad["left"], pad["up"], pad["a"]) == ("a", "w", " ")


def test_hint_names_arrows_first():
    assert keymap_for(spec("CartPole-v1", discrete(2))).main_keys() == ["ArrowLeft", "ArrowRight"]
    assert JoystickKeys(FULL).main_keys()[0] == "w"
    assert generic_keys(ActionSpec("multi_discrete", (2,), (4, 3))).main_keys() == ["1", "q"]
