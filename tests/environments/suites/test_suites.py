"""One contract for every suite that is installed: spaces, seeds, ends, workers, resume, rendering."""

import importlib

import gymnasium
import numpy as np
import pytest

from rl_lab.environments import make_env, task_names
from rl_lab.tools.check_env import check_env
from tests.environments.suites.suite_cases import CASES, LIMIT, PACKAGES, each_case, needs, suite_of
from tests.environments.test_vector import assert_same, roll


def test_every_suite_has_cases():
    # `multitask` consists of the others and has separate tests.
    assert {suite_of(task) for task in CASES} == set(task_names.SUITES) - {"multitask"} == set(PACKAGES)


@pytest.mark.parametrize("task", each_case())
def test_contract(task):
    needs(task)
    options = CASES[task]
    limit = {} if suite_of(task) == "popgym" else {"time_limit": LIMIT}  # its episodes always end
    draws = not task.startswith(
        ("dmc/reacher", "dmc/manip", "dmc/rodent", "metaworld/reach")
    )  # need no GL, so that a case of the suite runs everywhere
    with (
        make_env(task, 2, workers=0, seed=5, render=draws, **options, **limit) as env,
        make_env(task, 2, workers=1, seed=0, **options, **limit) as other,
    ):
        rows = roll(env, steps=2 * LIMIT + 3)  # two episodes with their resets, and a step of the third
        for row in rows:
            for name, spec in env.spec.observations.items():
                assert row[name].shape == (2, *spec.shape) and row[name].dtype == spec.dtype
                assert env.observation_space[name].contains(row[name])
        # Observations change: constant ones would pass all other checks.
        names = env.spec.observations
        assert any((row[name] != rows[0][name]).any() for row in rows[1:LIMIT] for name in names)
        check_ends(rows[1:], limited=bool(limit))
        if draws:
            frame = env.frame()
            assert frame.ndim == 3 and frame.shape[2] == 3 and frame.dtype == np.uint8 and frame.std() > 0

        other.reset()  # an open episode of another run must not matter
        other.step(np.zeros_like(env.action_space.sample()))
        assert other.set_state(env.get_state()) == []
        assert_same(roll(env, steps=4, reset=False, seed=8), roll(other, steps=4, reset=False, seed=8))

        first, _ = other.reset(seed=5)
        for name in env.spec.observations:
            np.testing.assert_array_equal(first[name], rows[0][name])


@pytest.mark.parametrize("task", each_case())
def test_check_env_accepts_it(task):
    """What `rl-lab check` says of the suite: nothing bad, and the same seed gives the same episode."""
    needs(task)
    steps, limit = (200, {}) if suite_of(task) == "popgym" else (4 * LIMIT, {"time_limit": LIMIT})
    checked = check_env(task, steps=steps, **limit, **CASES[task])
    states = {finding.name: finding.state for finding in checked.findings}
    assert checked.ok, checked
    assert states["determinism"] == states["spaces"] == states["episodes"] == "ok", checked
    assert "workers" not in states, checked


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


def test_suites_list_tasks():
    for suite, module in task_names.SUITES.items():
        adapter = importlib.import_module(module)
        names = adapter.tasks()
        assert isinstance(adapter.EXTRA, str)
        if PACKAGES.get(suite) and importlib.util.find_spec(PACKAGES[suite]) is not None:
            assert names and all(isinstance(name, str) for name in names)
            assert all(adapter.resolve(name) for name in names[:5])


def test_registered_id_takes_precedence():
    assert "CarRacing-v3" in gymnasium.registry
    assert task_names.split("CarRacing-v3")[1] == task_names.SUITES["gym"]
