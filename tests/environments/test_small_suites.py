"""MiniGrid, POPGym and CarRacing: what is particular to each; test_suites has what they share."""

import numpy as np
import pytest

from rl_lab.environments import make_env, probe_spec
from rl_lab.errors import ConfigError


def single(env):
    return env._workers[0]._runner.slots[0].env.unwrapped


def test_minigrid_symbols_are_one_hot():
    pytest.importorskip("minigrid", reason="extra: minigrid")
    with make_env("minigrid/DoorKey-5x5", 1, workers=0) as env:
        obs, _ = env.reset(seed=2)
        codes = single(env).gen_obs()["image"].reshape(49, 3)
        grid = obs["grid"][0].reshape(49, 20)
        assert grid.sum() == 49 * 3
        np.testing.assert_array_equal(grid[:, :11].argmax(1), codes[:, 0])
        np.testing.assert_array_equal(grid[:, 11:17].argmax(1), codes[:, 1])
        np.testing.assert_array_equal(grid[:, 17:].argmax(1), codes[:, 2])
        assert obs["direction"][0].argmax() == single(env).agent_dir
        turned = env.step(np.array([1]))[0]
        assert turned["direction"][0].argmax() == single(env).agent_dir != obs["direction"][0].argmax()


def test_minigrid_pictures_and_names():
    pytest.importorskip("minigrid", reason="extra: minigrid")
    for observe, size, shape in (("rgb", None, 56), ("rgb", 63, 63), ("rgb", 64, 64), ("rgb_full", None, 40)):
        spec = probe_spec("minigrid/empty-5x5", observe=observe, size=size)
        assert spec.observations["image"].shape == (3, shape, shape)
    with pytest.raises(ConfigError, match=r"no task 'minigrid/DorKey-5x5'.*MiniGrid-DoorKey-5x5-v0"):
        make_env("minigrid/DorKey-5x5")
    with pytest.raises(ConfigError, match=r"observe='pixels'"):
        make_env("minigrid/Empty-5x5", observe="pixels")


def test_popgym_names_and_previous_action():
    pytest.importorskip("popgym", reason="extra: memory")
    plain = probe_spec("popgym/CountRecallEasy")
    assert probe_spec("popgym-CountRecallEasy-v0").action == plain.action
    more = probe_spec("popgym/countrecalleasy", previous_action=True)
    width = {
        name: sum(s.shape[0] for s in spec.observations.values())
        for name, spec in (("a", plain), ("b", more))
    }
    assert width["b"] > width["a"]
    with pytest.raises(ConfigError, match=r"no task 'popgym/CountRecal'. Did you mean 'CountRecall"):
        make_env("popgym/CountRecal")


def test_carracing_crop_and_discrete():
    pytest.importorskip("Box2D", reason="extra: box2d")
    assert probe_spec("carracing").action.shape == (3,)
    assert probe_spec("carracing/discrete").num_actions == 5
    with make_env("carracing/continuous", 1, workers=0, crop=True, time_limit=3) as env:
        obs, _ = env.reset(seed=1)
        assert obs["image"].shape == (1, 3, 84, 96)
        np.testing.assert_array_equal(obs["image"][0].transpose(1, 2, 0), single(env).state[:84])
        # -1 is no gas and no brake: Gymnasium's 0, not half of the range
        env.step(np.array([[0.0, -1.0, -1.0]]))
        assert all(wheel.gas == 0 and wheel.brake == 0 for wheel in single(env).car.wheels)
    with pytest.raises(ConfigError, match="no task 'carracing/discreet'"):
        make_env("carracing/discreet")
