"""Gymnasium's own checker on one environment of every suite, behind the lab's wrappers, as workers have it."""

import gc
import re

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from suite_cases import CASES, each_case, needs

from rl_lab.environments import make as make_module

# All that the checker may advise. Everything else that it says fails the test.
ADVICE = (
    r"A Box observation space m(in|ax)imum value is -?infinity",  # numbers without bounds: the lab's vectors have none
    r"Not able to test alternative render modes",  # there is one mode, and it is tested
)


class Whole(gymnasium.Env):
    """An environment with its wrappers as one: the checker looks through wrappers, and what counts is the outside."""

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
def test_gymnasiums_own_check(task, recwarn):
    needs(task)
    options = {"size": None, "action_repeat": None, **CASES[task]}
    env = Whole(make_module._factory(task, time_limit=None, **options)(render=True))
    assert env.render_mode == "rgb_array"
    gc.collect()  # what earlier tests left open is not said of this one
    recwarn.clear()  # what packages say when they are imported
    try:
        check_env(env)
    finally:
        env.close()
    env.close()  # again is allowed
    said = [str(warning.message) for warning in recwarn]
    assert [text for text in said if not re.search("|".join(ADVICE), text)] == []
