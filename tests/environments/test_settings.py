"""size, num_envs, workers, action_repeat, time_limit and eval.* mean the same in every suite's file."""

from pathlib import Path

import numpy as np
import pytest

import rl_lab.configs
from rl_lab.config.compose import compose_config
from rl_lab.environments import env_config_options, make_env
from tests.environments.suites.suite_cases import MARKS, PACKAGES, use_stand_in

FOLDER = Path(rl_lab.configs.__file__).parent / "environment"
FILES = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "multitask")  # made of the others
DUMMIES = ("continuous", "dict", "discrete")
# Additional settings for speed or for image observations.
BESIDES = {
    "gym": ["environment.task=CartPole-v1", "environment.pixels=true"],
    "crafter": ["environment.area=16"],
    "dmc_vision": ["environment.task=cartpole_swingup", "environment.fast_render=true"],
    "dmc": ["environment.task=reacher_easy"],
    "tensor_cartpole": ["environment.batched=false"],
    "tensor_catch": ["environment.batched=false"],
    # The other dummies end with the third mistake.
    **{f"dummy_{kind}": ["environment.task=dummy/count", "+environment.length=20"] for kind in DUMMIES},
}
SETTINGS = {"num_envs": 2, "workers": 1, "action_repeat": 2, "time_limit": 3}
WITHOUT_PICTURES = (
    *(
        "cartpole",
        "pendulum",
        "lock",
        "lunarlander",
        "pusht",
        "dmc",
        "popgym",
        "bsuite",
        "metaworld",
        "tensor_cartpole",
    ),
    *(f"dummy_{kind}" for kind in DUMMIES),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS[name]) if name in MARKS else name for name in FILES],
)
def test_five_settings_and_evaluation(name):
    words = [f"environment={name}", *BESIDES.get(name, [])]
    words += [f"++environment.{key}={value}" for key, value in SETTINGS.items()]
    if name not in WITHOUT_PICTURES:
        words += ["environment.size=40", "+environment.eval.size=24"]
    words += ["environment.eval.num_envs=1", "+environment.eval.time_limit=2", "+environment.eval.workers=0"]
    node = compose_config(words).environment
    needs_package(node.get("suite", "gym"))

    options = env_config_options(node)
    with make_env(**options, seed=3) as env:
        assert (env.num_envs, env.num_workers, env.spec.action_repeat) == (2, 1, 2)
        assert picture(env) in (None, (40, 40))
        assert decisions(env) == [3, 3]
    with make_env(**env_config_options(node, evaluation=True), seed=3) as env:
        assert (env.num_envs, env.num_workers, env.spec.action_repeat) == (1, 0, 2)
        assert picture(env) in (None, (24, 24))
        assert decisions(env) == [2]


def needs_package(suite):
    use_stand_in(suite)
    if PACKAGES[suite]:
        pytest.importorskip(PACKAGES[suite], reason=f"suite {suite}")


def picture(env):
    shapes = [spec.shape[1:] for spec in env.spec.observations.values() if len(spec.shape) == 3]
    return shapes[0] if shapes else None


def decisions(env):
    """Return the number of decisions until the first episode of each environment is truncated."""
    env.reset()
    found = [0] * env.num_envs
    for number in range(1, 5):
        _, _, terminated, truncated, _ = env.step(np.zeros_like(env.action_space.sample()))
        assert not terminated.any()
        for index in np.flatnonzero(truncated):
            found[index] = found[index] or number
    return found


@pytest.mark.parametrize(("crop", "limit"), [(False, 1010), (True, 1010), (True, None)])
def test_longer_limit_replaces_registered_limit(crop, limit):
    pytest.importorskip("Box2D", reason="extra: box2d")
    import gymnasium

    from rl_lab.environments.suites import carracing
    from rl_lab.environments.wrappers import TimeLimit, without_time_limit

    env = carracing.make("continuous", crop=crop)
    if limit is None:
        assert has_limit(env, gymnasium.wrappers.TimeLimit)
    else:
        env = TimeLimit(without_time_limit(env), limit)
        assert not has_limit(env, gymnasium.wrappers.TimeLimit)


def has_limit(env, kind):
    while hasattr(env, "env"):
        if isinstance(env, kind):
            return True
        env = env.env
    return False
