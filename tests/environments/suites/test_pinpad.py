"""Pin Pad: layouts, the order of the pads, the reward and what follows it, the image."""

import numpy as np
import pytest

from rl_lab.environments.make import env_factory
from rl_lab.environments.suites import pinpad

STAY, DOWN, UP, RIGHT, LEFT = range(5)
# The layout of `five`, as drawn in the authors' file: danijar/director @ a6a649e, embodied/envs/pinpad.py
FIVE = """
################
#          4444#
#111       4444#
#111       4444#
#111           #
#111        555#
#           555#
#           555#
#333        555#
#333           #
#333       2222#
#333       2222#
#          2222#
################
"""


def new(task="three"):
    env = pinpad.PinPad(task)
    env.reset(seed=0)
    return env


def place(env, number):
    """Put the player beside a pad of this number, in the floor; return the action that enters it."""
    for x, y in np.argwhere(env.grid == number):
        for action, (right, down) in enumerate(pinpad.MOVES[1:], start=1):
            before = (int(x) - right, int(y) - down)
            if env.grid[before] == 0:
                env.player = before
                return action
    raise AssertionError


def test_layouts():
    symbols = {" ": 0, "#": -1}
    expected = [[int(symbols.get(cell, cell)) for cell in row] for row in FIVE.strip("\n").split("\n")]
    assert (np.array(expected, dtype=np.int64) == new("five").grid.T).all()
    for count, task in enumerate(pinpad.tasks(), start=3):
        env = new(task)
        assert env.goal == tuple(range(1, count + 1)) and set(env.grid.ravel()) == {-1, 0, *env.goal}
        for number in env.goal:
            place(env, number)  # every pad can be entered from the floor


def test_reward_for_the_order():
    env = new()
    for number, expected in ((1, 0), (3, 0), (1, 0), (2, 0), (3, 10)):
        action = place(env, number)
        assert env.step(action)[1] == expected
        assert env.step(STAY)[1] == 0 and env.entered[-1] == number  # standing on it does not count again
    assert list(env.entered) == [1, 2, 3]


def test_pause_after_the_reward():
    env = new()
    for number in (1, 2, 3):
        reward = env.step(place(env, number))[1]
    assert reward == 10 and env.render()[64 + 32, 128].tolist() == [223, 255, 223]
    for _ in range(pinpad.PAUSE - 1):
        obs, reward, *_ = env.step(STAY)
        assert reward == 0 and len(env.entered) == 3
    where = env.player
    obs, reward, *_ = env.step(STAY)
    on_pad = env.grid[env.player] > 0
    assert reward == 0 and len(env.entered) == int(on_pad) and env.player != where
    assert (obs == 223).sum() == 0  # white again


def test_image():
    env = new()
    action = place(env, 2)
    obs = env.step(action)[0]
    assert obs.shape == (64, 64, 3)
    x, y = env.player
    assert (obs[4 * y : 4 * y + 4, 4 * x : 4 * x + 4] == 0).all()
    history = obs[56:60, 4:8]  # the first pad that was entered
    assert (history == [0, 255, 0]).all() and (obs[60:] == 192).all()
    assert (obs[4:8, 4:8] == [255, 229, 229]).all()  # pad 1 is pale: a tenth of its colour
    bright = (obs == [0, 255, 0]).all(-1).sum()
    assert bright == 16 * (16 - 1) + 16  # the 4×4 cells of pad 2 without the player, and the history
    assert env.render().shape == (256, 256, 3)


def test_limit_and_walls():
    env = env_factory("pinpad/six")()
    env.reset(seed=1)
    steps = 0
    truncated = False
    while not truncated:
        _, _, terminated, truncated, info = env.step(LEFT)
        assert not terminated
        steps += 1
    assert steps == pinpad.LENGTH and env.unwrapped.player[0] == 1
    assert info["log/solved"] == 0


@pytest.mark.parametrize("task", pinpad.tasks())
def test_starts_are_anywhere_but_in_walls(task):
    env = pinpad.PinPad(task)
    starts = set()
    for seed in range(400):
        env.reset(seed=seed)
        starts.add(env.player)
    assert all(env.grid[start] >= 0 for start in starts) and len(starts) > 100
