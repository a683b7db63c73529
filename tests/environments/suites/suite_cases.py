"""One or two tasks of every suite, with fast settings, for the tests of all suites."""

from __future__ import annotations

import ctypes.util
import importlib.util

import pytest

LIMIT = 5
# Suite -> the package that it needs; "" if there is none.
PACKAGES = {
    "gym": "pygame",
    "dummy": "",
    "atari": "ale_py",
    "atari100k": "ale_py",
    "dmc": "dm_control",
    "crafter": "crafter",
    "minigrid": "minigrid",
    "carracing": "Box2D",
    "pusht": "pymunk",
    "popgym": "popgym",
    "memory_maze": "memory_maze",
}
CASES = {
    "gym/CartPole-v1": {},
    "gym/Pendulum-v1": {"pixels": "both", "size": 32},
    "dummy/discrete": {},
    "dummy/continuous": {},
    "dummy/dict": {},
    "atari/breakout": {},
    "atari/space_invaders": {"backend": "envpool"},
    "atari100k/assault": {},
    "atari100k/pong": {"variant": "iris", "life_loss": "off", "noops": 0},
    "dmc/reacher_easy": {"action_repeat": 2},
    "dmc/cartpole_swingup": {"observe": "both", "fast_render": True, "size": 32},
    "crafter/reward": {"area": 16},  # a full world takes a second to generate
    "minigrid/Dynamic-Obstacles-6x6": {},
    "minigrid/DoorKey-5x5": {"observe": "rgb", "size": 64},
    "minigrid/BabyAI-GoToObj-v0": {"mission": 6},
    "carracing/discrete": {"size": 64, "crop": True},
    "carracing/continuous": {"backend": "envpool", "size": 64, "crop": True},
    "pusht/keypoints": {},
    "pusht/pixels": {},
    "popgym/RepeatPreviousEasy": {},
    "popgym/MineSweeperEasy": {"previous_action": True},
    "memory_maze/9x9": {},
}


def suite_of(task):
    return task.partition("/")[0]


def each_case(*left_out):
    """Return pytest parameters for all tasks, except for these suites; slow ones run with `make test-learning`."""
    return [
        # A maze takes seconds to build in software rendering, and a test builds many.
        pytest.param(task, marks=pytest.mark.learning) if suite_of(task) == "memory_maze" else task
        for task in CASES
        if suite_of(task) not in left_out
    ]


def needs(task):
    """Skip a task if its package or a rendering backend is missing."""
    options, package = CASES[task], PACKAGES[suite_of(task)]
    if options.get("backend") == "envpool":
        package = "envpool"
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{task} needs {package}, which is not installed")
    draws = suite_of(task) == "memory_maze" or options.get("observe") == "both"
    if draws and not (ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa")):
        pytest.skip("neither EGL nor OSMesa to draw with")
