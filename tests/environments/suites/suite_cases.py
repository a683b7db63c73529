"""One or two tasks of every suite, with fast settings, for the tests of all suites."""

from __future__ import annotations

import ctypes.util
import importlib.util
import sys
from pathlib import Path

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
    "pinpad": "",
    "tensor": "",
    "loconav": "dm_control",
    "bsuite": "bsuite",
    "vizdoom": "vizdoom",
    "metaworld": "metaworld",
    "procgen": "envpool",
    "minecraft": "minerl",
    "dmlab": "deepmind_lab",
}
# Packages that cannot be installed for the tests: a stand-in in `stand_ins/` has their interface.
STAND_INS = ("minecraft", "dmlab")
# These models take seconds to build, and a test builds many; two packages are in the extra `extras`.
MARKS = {
    "memory_maze": pytest.mark.learning,
    "dmc/manip_reach_site": pytest.mark.learning,
    "dmc/rodent_two_touch": pytest.mark.learning,
    "loconav": pytest.mark.learning,
    "bsuite": pytest.mark.extras,
    "vizdoom": pytest.mark.extras,
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
    "dmc/manip_reach_site": {},
    "dmc/rodent_two_touch": {},
    "pinpad/three": {},
    "tensor/cartpole": {},
    "tensor/catch": {"side": 32},
    "loconav/ant_maze_s": {"fast_render": True},
    "bsuite/catch": {},
    "bsuite/cartpole_noise/3": {},
    "vizdoom/take_cover": {"actions": "thirds", "action_repeat": 4},
    "vizdoom/basic": {},
    "metaworld/reach": {},
    "metaworld/door-open": {"observe": "both", "size": 32},
    "procgen/coinrun": {"levels": "easy"},
    "minecraft/diamond": {},
    "dmlab/explore_goal_locations_small": {},
    "dmlab/language_execute_random_task": {"actions": "impala"},
}


def suite_of(task):
    return task.partition("/")[0]


def each_case(*left_out):
    """Return pytest parameters for all tasks, except for these suites; slow ones run with `make test-learning`."""
    names = [task for task in CASES if suite_of(task) not in left_out]
    marks = [MARKS.get(task) or MARKS.get(suite_of(task)) for task in names]
    return [pytest.param(task, marks=mark) if mark else task for task, mark in zip(names, marks, strict=True)]


def use_stand_in(suite):
    """Make the stand-in of a suite importable, here and in worker processes, unless the package is installed."""
    folder = str(Path(__file__).with_name("stand_ins"))
    if suite in STAND_INS and folder not in sys.path:
        sys.path.append(folder)


def needs(task):
    """Skip a task if its package or a rendering backend is missing."""
    options, package = CASES[task], PACKAGES[suite_of(task)]
    use_stand_in(suite_of(task))
    if options.get("backend") == "envpool":
        package = "envpool"
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{task} needs {package}, which is not installed")
    draws = suite_of(task) in ("memory_maze", "loconav") or options.get("observe") == "both"
    if draws and not (ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa")):
        pytest.skip("neither EGL nor OSMesa to draw with")
