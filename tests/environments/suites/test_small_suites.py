"""Specific tests of MiniGrid, POPGym, CarRacing and Memory Maze; test_suites covers the common ones."""

import ctypes.util

import numpy as np
import pytest

from rl_lab.environments import make_env, probe_spec
from rl_lab.errors import ConfigError


def single(env):
    return env.pool.workers[0]._runner.slots[0].env.unwrapped


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


def test_minigrid_images_and_names():
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
    with pytest.raises(ConfigError, match=r"environment.backend='envpol': Did you mean 'envpool'"):
        make_env("carracing/continuous", backend="envpol")


def test_minigrid_mission_encoding():
    pytest.importorskip("minigrid", reason="extra: minigrid")
    from rl_lab.environments.suites.minigrid import WORDS, encode_mission

    assert sorted(set(WORDS)) == WORDS
    with make_env("minigrid/BabyAI-GoToObj-v0", 1, workers=0, mission=8) as env:
        obs, _ = env.reset(seed=2)
        places = obs["mission"][0].reshape(8, len(WORDS) + 2).argmax(1)
        text = single(env).mission
        assert " ".join(WORDS[place - 1] for place in places if place) == text and len(text.split()) < 8
    with make_env("minigrid/BabyAI-GoToObj-v0", 1, workers=0, mission=2, observe="rgb") as env:
        assert set(env.spec.observations) == {"image", "mission"}  # cut after two words
        assert env.reset(seed=2)[0]["mission"][0].reshape(2, -1).argmax(1).tolist() == places[:2].tolist()
    assert encode_mission("Open the teapot", 4).tolist() == [
        WORDS.index("open") + 1,
        WORDS.index("the") + 1,
        len(WORDS) + 1,
        0,
    ]
    assert "mission" not in probe_spec("minigrid/BabyAI-GoToObj-v0").observations
    with pytest.raises(ConfigError, match=r"environment\.mission=True must be a number of words"):
        make_env("minigrid/Empty-5x5", mission=True)


@pytest.mark.learning
def test_minigrid_vocabulary_is_complete():
    pytest.importorskip("minigrid", reason="extra: minigrid")
    import contextlib
    import io
    import re

    import gymnasium

    from rl_lab.environments.suites import minigrid

    unknown = set()
    for name in minigrid.tasks():
        if "-WFC-" in name:  # its patterns are not in the package
            continue
        env = gymnasium.make(name, disable_env_checker=True)
        with contextlib.redirect_stdout(io.StringIO()):
            for seed in range(5):
                text = env.reset(seed=seed)[0]["mission"]
                unknown |= set(re.findall("[a-z]+", text.lower())) - set(minigrid.WORDS)
        env.close()
    assert unknown == set()


def test_memory_maze_sizes():
    pytest.importorskip("memory_maze", reason="extra: memory-maze")
    if not (ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa")):
        pytest.skip("neither EGL nor OSMesa to draw with")
    # Below 64 the package returns an image of a single colour.
    with make_env("memory_maze/9x9", 1, workers=0, size=[32, 40], render=True) as env:
        assert env.spec.observations["image"].shape == (3, 32, 40) and env.spec.num_actions == 6
        obs, _ = env.reset(seed=1)
        seen = env.step(np.array([1]))[0]["image"]
        assert obs["image"].std() > 10 and (seen != obs["image"]).mean() > 0.1
        np.testing.assert_array_equal(env.frame().transpose(2, 0, 1), seen[0])
