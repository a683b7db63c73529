"""DeepMind Control: observations, lengths of decisions and episodes, and seeding."""

import ctypes.util

import numpy as np
import pytest

pytest.importorskip("dm_control", reason="extra: dmc")

from rl_lab.environments import make_env, probe_spec
from rl_lab.environments.rendering import choose_renderer
from rl_lab.environments.suites import dmc
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec

choose_renderer(needed=False)
draws = pytest.mark.skipif(
    not (ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa")),
    reason="neither EGL nor OSMesa",
)
PROPRIO = {
    "orientations": ArraySpec((14,), "float32"),
    "height": ArraySpec((1,), "float32"),
    "velocity": ArraySpec((9,), "float32"),
}


@pytest.mark.parametrize("task", ["dmc/walker_walk", "dmc/walker-walk"])
def test_proprio_is_the_default(task):
    spec = probe_spec(task)
    assert spec.observations == PROPRIO and spec.action_repeat == 1
    assert (spec.action.kind, spec.action.shape) == ("continuous", (6,))


@draws
def test_vision_both_and_fast_render():
    image = {"image": ArraySpec((3, 64, 64), "uint8")}
    assert probe_spec("dmc/walker_walk", observe="vision").observations == image
    frames = {}
    for name, options in {"plain": {}, "fast": {"fast_render": True}, "other": {"camera": 1}}.items():
        with make_env("dmc/walker_walk", 1, observe="both", action_repeat=2, render=True, **options) as env:
            assert env.spec.observations == {**PROPRIO, **image} and env.spec.action_repeat == 2
            obs, _ = env.reset(seed=2)
            frames[name] = obs["image"][0].astype(int)
            assert env.frame().shape == (256, 256, 3)
    assert frames["plain"].std() > 10
    # The same scene without shadows, and another view of it.
    assert (
        0
        < np.abs(frames["fast"] - frames["plain"]).mean()
        < 20
        < np.abs(frames["other"] - frames["plain"]).mean()
    )


def test_decisions_and_limits():
    for repeat, limit, expected in ((1, None, 1000), (4, None, 250), (4, 30, 30), (4, 255, 255)):
        with make_env("dmc/cartpole_balance", 1, action_repeat=repeat, time_limit=limit) as env:
            env.reset()
            rewards = []
            while True:
                _, reward, terminated, truncated, _ = env.step(np.zeros((1, 1)))
                rewards.append(reward[0])
                assert not terminated[0]
                if truncated[0]:
                    break
            assert len(rewards) == expected
            assert 0.5 * repeat < rewards[0] <= repeat  # the sum of what the control steps gave


@pytest.mark.parametrize("task", ["manipulator_bring_ball", "reacher_easy", "swimmer_swimmer6"])
def test_seed_determines_episode(task):
    left, right = (dmc.make(dmc.resolve(task)) for _ in range(2))
    rng = np.random.default_rng(0)
    right.reset(seed=3)
    for _ in range(5):
        right.step(rng.uniform(-1, 1, right.action_space.shape))
    a, b = left.reset(seed=7)[0], right.reset(seed=7)[0]
    for _ in range(15):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)
        action = rng.uniform(-1, 1, left.action_space.shape)
        a, b = left.step(action)[0], right.step(action)[0]
    assert any(a[name].tobytes() != left.reset(seed=8)[0][name].tobytes() for name in a)


def test_names():
    assert dmc.resolve("cup_catch") == ("ball_in_cup", "catch")
    assert dmc.resolve("humanoid_CMU_run") == ("humanoid_CMU", "run")
    assert dmc.resolve("humanoid_run_pure_state") == ("humanoid", "run_pure_state")
    with pytest.raises(ConfigError, match=r"no task 'dmc/walker_wlak'. Did you mean 'walker_walk'"):
        make_env("dmc/walker_wlak")
    with pytest.raises(ConfigError, match=r"observe='pixels'.*vision"):
        make_env("dmc/walker_walk", observe="pixels")
