"""Gymnasium's environment checker on one environment of every suite, with the lab's wrappers."""

import gc
import re

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from rl_lab.environments import make as make_module
from tests.environments.suites.suite_cases import CASES, each_case, needs

# Warnings of the checker that are allowed. All others fail the test.
ADVICE = (
    r"A Box observation space m(in|ax)imum value is -?infinity",  # the lab's vectors have no bounds
    r"Not able to test alternative render modes",  # there is one mode, and it is tested
)


class Whole(gymnasium.Env):
    """Hides the wrappers of an environment: the checker would otherwise inspect the unwrapped environment."""

    def __init__(self, env):
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.metadata, self.render_mode = env.metadata, env.render_mode

    @property
    def _np_random(self):  # the checker compares the states of generators
        return self.env.unwrapped._np_random

    def reset(self, *, seed=None, options=None):
        return self.env.reset(seed=seed, options=options)

    def step(self, action):
        return self.env.step(action)

    def render(self):
        return self.env.render()

    def close(self):
        self.env.close()


@pytest.mark.parametrize("task", each_case())
def test_gymnasium_checker(task, recwarn):
    needs(task)
    options = {"size": None, "action_repeat": None, **CASES[task]}
    env = Whole(make_module._factory(task, time_limit=None, **options)(render=True))
    assert env.render_mode == "rgb_array"
    gc.collect()  # no warnings about objects of earlier tests
    recwarn.clear()  # no warnings of package imports
    try:
        check_env(env)
    finally:
        env.close()
    env.close()  # a second close is allowed
    said = [str(warning.message) for warning in recwarn]
    assert [text for text in said if not re.search("|".join(ADVICE), text)] == []
