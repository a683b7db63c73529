"""One-line messages for a missing package, a missing rendering backend and an unknown task."""

import ctypes.util
import sys

import pytest

from rl_lab.environments import make as make_module
from rl_lab.environments import probe_spec
from rl_lab.errors import ConfigError, LabError, MissingPackageError
from tests.environments.suites.suite_cases import CASES, PACKAGES, STAND_INS, needs, suite_of

# The first import that fails, if it is not the package of the suite.
IMPORTED = {"memory_maze/9x9": "gym", "carracing/continuous": "envpool"}
MISSING = {
    task: IMPORTED.get(task, PACKAGES[suite_of(task)])
    for task in CASES
    if PACKAGES[suite_of(task)] and suite_of(task) not in ("gym", *STAND_INS)
}
WRONG = {
    "gym/CartPol-v1": "CartPole-v1",
    "dummy/discret": "discrete",
    "atari/pongg": "pong",
    "atari100k/brekout": "breakout",
    "dmc/walker_wlak": "walker_walk",
    "crafter/rewards": "reward",
    "minigrid/DorKey-5x5": "MiniGrid-DoorKey-5x5-v0",
    "carracing/continous": "continuous",
    "popgym/CountRecal": "CountRecall",
    "memory_maze/9x99": "9x9",
    "pinpad/thre": "three",
    "loconav/ant_maze_x": "ant_maze_xl",
    "dmc/manip_reach_sit": "manip_reach_site",
    "dmc/rodent_run_gap": "rodent_run_gaps",
    "bsuite/cach": "catch",
    "vizdoom/take_over": "take_cover",
    "metaworld/mw-pusch": "push",
    "procgen/coin_run": "coinrun",
    "minecraft/diamonds": "diamond",
    "dmlab/explore_goal_location_small": "explore_goal_locations_small",
}
NAMES_ARE_LISTED = ("bsuite", "vizdoom", "metaworld", "procgen", *STAND_INS)  # they need no package


@pytest.fixture(autouse=True)
def _nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(make_module, "_probed", {})


@pytest.mark.parametrize("task", MISSING)
def test_missing_package_has_install_line(task, monkeypatch):
    gone = MISSING[task]
    known = (gone + ".", "gymnasium.envs.box2d")
    for module in [name for name in sys.modules if name == gone or name.startswith(known)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, gone, None)  # its import raises ModuleNotFoundError
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(MissingPackageError, match=r"pip install -e '[^']+\[[\w-]+\]'") as caught:
        probe_spec(task, **CASES[task])
    assert "\n" not in str(caught.value)
    assert suite_of(task) in str(caught.value) or gone in str(caught.value)


@pytest.mark.parametrize("suite", STAND_INS)
def test_package_without_extra_has_setup_page(suite, monkeypatch):
    for module in [name for name in sys.modules if name.split(".")[0] == PACKAGES[suite]]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, PACKAGES[suite], None)
    task = next(task for task in CASES if suite_of(task) == suite)
    with pytest.raises(MissingPackageError, match=r"docs/howto/minecraft_dmlab\.md") as caught:
        probe_spec(task)
    assert "\n" not in str(caught.value) and PACKAGES[suite] in str(caught.value)


@pytest.mark.parametrize("task", WRONG)
def test_unknown_task_has_closest_names(task):
    if PACKAGES[suite_of(task)] and suite_of(task) not in NAMES_ARE_LISTED:
        pytest.importorskip(PACKAGES[suite_of(task)])
    with pytest.raises(ConfigError, match=f"Did you mean .*'{WRONG[task]}") as caught:
        probe_spec(task)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("dmc/cartpole_swingup", {"observe": "vision"}),
        ("dmc/cartpole_swingup", {"pixels": True}),
        ("memory_maze/9x9", {}),
    ],
)
def test_no_rendering_backend(task, options, monkeypatch):
    needs("dmc/reacher_easy")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delitem(sys.modules, "dm_control._render", raising=False)
    with pytest.raises(LabError, match=r"apt install libegl1 .*or OSMesa.*observe=proprio") as caught:
        probe_spec(task, **options)
    assert "\n" not in str(caught.value)
