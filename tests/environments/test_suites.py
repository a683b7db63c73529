"""One contract for every suite that is installed: spaces, seeds, ends, workers, resume, rendering."""

import ctypes.util
import importlib.util

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from test_vector import assert_same, roll

from rl_lab.environments import make as make_module
from rl_lab.environments import make_env, probe_spec
from rl_lab.errors import MissingPackageError

LIMIT = 5
PACKAGES = {
    "atari": "ale_py",
    "atari100k": "ale_py",
    "dmc": "dm_control",
    "crafter": "crafter",
    "minigrid": "minigrid",
    "carracing": "Box2D",
    "popgym": "popgym",
    "memory_maze": "memory_maze",
}
CASES = {
    "atari/breakout": {},
    "atari100k/assault": {},
    "atari100k/pong": {"variant": "iris", "life_loss": "off", "noops": 0},
    "dmc/reacher_easy": {"action_repeat": 2},
    "dmc/cartpole_swingup": {"observe": "both", "fast_render": True, "size": 32},
    "crafter/reward": {"area": 16},  # a whole world takes a second to make
    "minigrid/Dynamic-Obstacles-6x6": {},
    "minigrid/DoorKey-5x5": {"observe": "rgb", "size": 64},
    "carracing/discrete": {"size": 64, "crop": True},
    "popgym/RepeatPreviousEasy": {},
    "popgym/MineSweeperEasy": {"previous_action": True},
    "memory_maze/9x9": {},
}


def needs(task, options=None):
    suite = task.partition("/")[0]
    if importlib.util.find_spec(PACKAGES[suite]) is None:
        pytest.skip(f"suite {suite} is not installed")
    draws = suite == "memory_maze" or (options or {}).get("observe") == "both"
    if draws and not (ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa")):
        pytest.skip("neither EGL nor OSMesa to draw with")


@pytest.mark.parametrize(
    "task",
    [
        # A maze takes seconds to build in software rendering, and the contract builds many.
        pytest.param(task, marks=pytest.mark.learning) if task.startswith("memory_maze") else task
        for task in CASES
    ],
)
def test_contract(task):
    options = CASES[task]
    needs(task, options)
    limit = {} if task.startswith("popgym") else {"time_limit": LIMIT}
    draws = not task.startswith("dmc/reacher")  # needs no GL, so that one case of the suite runs everywhere
    with (
        make_env(task, 2, workers=0, seed=5, render=draws, **options, **limit) as env,
        make_env(task, 2, workers=1, seed=0, **options, **limit) as other,
    ):
        rows = roll(env, steps=2 * LIMIT + 2)
        for row in rows:
            for name, spec in env.spec.observations.items():
                assert row[name].shape == (2, *spec.shape) and row[name].dtype == spec.dtype
                assert env.observation_space[name].contains(row[name])
        check_ends(rows[1:], limited=bool(limit))
        if draws:
            frame = env.render()
            assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8 and frame.std() > 0

        other.reset()  # another run's episode lies open, and must not matter
        other.step(np.zeros_like(env.action_space.sample()))
        assert other.set_state(env.get_state()) == []
        assert_same(roll(env, steps=4, reset=False, seed=8), roll(other, steps=4, reset=False, seed=8))

        first, _ = other.reset(seed=5)
        for name in env.spec.observations:
            np.testing.assert_array_equal(first[name], rows[0][name])


def check_ends(rows, limited):
    ended, since = np.zeros(2, bool), np.zeros(2, int)
    for row in rows:
        np.testing.assert_array_equal(row["is_first"], ended)
        since = np.where(ended, 0, since + 1)
        assert not (row["terminated"] & row["truncated"]).any()
        assert (row["reward"][ended] == 0).all() and not (row["terminated"] | row["truncated"])[ended].any()
        if limited:
            assert (row["truncated"] == ((since == LIMIT) & ~row["terminated"])).all()
        assert row["reward"].dtype == np.float32 and np.isfinite(row["reward"]).all()
        ended = row["terminated"] | row["truncated"]


@pytest.mark.parametrize("task", [task for task in CASES if not task.startswith("memory_maze")])
@pytest.mark.filterwarnings("ignore::UserWarning")  # the checker's advice on wrappers and unbounded spaces
def test_gymnasiums_own_check(task):
    """On the single environment, behind the lab's wrappers, as workers have it."""
    needs(task, CASES[task])
    factory = make_module._factory(task, size=None, action_repeat=None, time_limit=None, **without_size(task))
    env = factory()
    try:
        check_env(env, skip_render_check=True, skip_close_check=True)
    finally:
        env.close()


def without_size(task):
    return {key: value for key, value in CASES[task].items() if key not in ("size", "action_repeat")}


@pytest.mark.parametrize("suite", PACKAGES)
def test_missing_package_is_one_line_with_its_cure(suite, monkeypatch):
    import sys

    gone = {
        "atari": "ale_py",
        "atari100k": "ale_py",
        "dmc": "dm_control",
        "memory_maze": "gym",
        "carracing": "Box2D",
    }.get(suite, suite)
    for module in [name for name in sys.modules if name == gone or name.startswith(gone + ".")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, gone, None)  # what importing then raises is ModuleNotFoundError
    for name in [name for name in sys.modules if name.startswith("gymnasium.envs.box2d")]:
        monkeypatch.delitem(sys.modules, name)
    task = next(task for task in CASES if task.startswith(suite + "/"))
    monkeypatch.setattr(make_module, "_probed", {})
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(MissingPackageError, match=r'pip install "rl-lab\[[\w-]+\]"') as caught:
        probe_spec(task)
    assert "\n" not in str(caught.value) and suite in str(caught.value)


def test_suites_tell_their_tasks():
    for suite, module in make_module.SUITES.items():
        adapter = importlib.import_module(module)
        names = adapter.tasks()
        assert isinstance(adapter.EXTRA, str)
        if suite in PACKAGES and importlib.util.find_spec(PACKAGES[suite]) is not None:
            assert names and all(isinstance(name, str) for name in names)
            assert all(adapter.resolve(name) for name in names[:5])


def test_registered_environments_are_not_swallowed():
    assert "CarRacing-v3" in gymnasium.registry
    assert make_module._split("CarRacing-v3")[1] == make_module.SUITES["gym"]
