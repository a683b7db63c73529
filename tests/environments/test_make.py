import ctypes.util
import importlib.metadata
import os
import sys

import gymnasium
import numpy as np
import pytest

from rl_lab.environments import env_config_options, make_env, probe_spec, task_names
from rl_lab.errors import ConfigError, MissingPackageError, install_line
from rl_lab.records import ActionSpec, ArraySpec
from tests.environments import sample_envs


@pytest.mark.parametrize("task", ["CartPole-v1", "gym/CartPole-v1"])
def test_registered_id_with_and_without_suite(task):
    pytest.importorskip("pygame", reason="Gymnasium's classic control")
    spec = probe_spec(task)
    assert spec.name == task and spec.observations == {"vector": ArraySpec((4,), "float32")}
    assert spec.action == ActionSpec("discrete", (), choices=(2,)) and spec.num_actions == 2


@pytest.mark.parametrize(
    ("task", "package", "options", "shapes"),
    [
        ("LunarLander-v3", "Box2D", {}, {"vector": (8,)}),
        ("HalfCheetah-v5", "mujoco", {}, {"vector": (17,)}),
        ("HalfCheetah-v5", "mujoco", {"pixels": "both", "size": 24}, {"vector": (17,), "image": (3, 24, 24)}),
    ],
)
def test_box2d_and_mujoco_ids(task, package, options, shapes, monkeypatch):
    pytest.importorskip(package)
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", ""))  # restored after the test
    if "pixels" in options and not (ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa")):
        pytest.skip("neither EGL nor OSMesa to draw with")
    with make_env(task, 1, workers=0, **options) as env:
        assert {name: spec.shape for name, spec in env.spec.observations.items()} == shapes
        obs, _ = env.reset(seed=1)
        assert all(value.std() > 0 for value in obs.values())


@pytest.mark.parametrize(
    "task",
    [
        "gym:tests.environments.sample_envs:Nested",
        "tests.environments.sample_envs:Nested",
        sample_envs.Nested,
        lambda: sample_envs.Nested(),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_custom_class_with_dict_observation(task, workers):
    with make_env(task, 2, workers=workers) as env:
        assert {key: (spec.shape, spec.dtype) for key, spec in env.spec.observations.items()} == {
            "camera": ((3, 6, 8), "uint8"),
            "body_speed": ((2,), "float32"),
            "body_gear": ((4,), "float32"),
        }
        assert env.spec.action == ActionSpec("multi_discrete", (2,), choices=(3, 2))
        env.reset()
        obs, reward, *_ = env.step(np.array([[0, 0], [2, 1]]))
        assert reward.tolist() == [1 + 10, 3 + 11]
        assert obs["camera"][:, 2, 0, 1].tolist() == [1, 3] and obs["body_gear"].argmax(1).tolist() == [1, 1]
        np.testing.assert_allclose(obs["body_speed"], [[0.1, 1.0], [0.3, 1.1]], rtol=1e-6)


def test_module_in_current_folder(tmp_path, monkeypatch):
    code = "import gymnasium\nfrom tests.environments.sample_envs import Base\n"
    (tmp_path / "my_own_env.py").write_text(
        code + "gymnasium.register('Mine-v3', entry_point='my_own_env:Base')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])
    for task in ("my_own_env:Base", "my_own_env:Mine-v3"):
        with make_env(task, 2, workers=2) as env:
            assert env.reset()[0]["vector"].tolist() == [[0.0], [0.0]]
    with make_env("Mine-v3", 2, workers=2) as env:  # registered only in this process
        assert env.reset()[0]["vector"].tolist() == [[0.0], [0.0]]
    del gymnasium.registry["Mine-v3"]
    del sys.modules["my_own_env"]


def test_options_reach_the_factory():
    with make_env("tests.environments.sample_envs:with_options", 1, size_of_step=2.5) as env:
        env.reset()
        assert env.step([0])[1].tolist() == [2.5]
    assert probe_spec(sample_envs.Nested, height=12).observations["camera"].shape == (3, 12, 8)
    with pytest.raises(ConfigError, match=r"Nested does not accept one of \['depth'\].*depth"):
        make_env(sample_envs.Nested, depth=1)


def test_image_size_pixels_and_observations():
    spec = probe_spec(sample_envs.Nested, size=(4, 5), observations=["camera"])
    assert spec.observations == {"camera": ArraySpec((3, 4, 5), "uint8")}
    spec = probe_spec("dummy/discrete", pixels=True, size=16)
    assert spec.observations == {"image": ArraySpec((3, 16, 16), "uint8")}
    with make_env("dummy/dict", 2, workers=2, pixels="both", size=[20, 24]) as env:
        obs, _ = env.reset()
        assert obs["image"].shape == (2, 3, 20, 24) and obs["vector"].shape == (2, 3)


def test_time_limit_replaces_registered_limit():
    pytest.importorskip("pygame", reason="Gymnasium's classic control")
    lengths = {}
    for limit in (None, 50, 210):
        with make_env("Pendulum-v1", 1, time_limit=limit, action_repeat=2) as env:
            env.reset()
            lengths[limit] = next(n for n in range(1, 300) if env.step(np.zeros((1, 1)))[3][0])
    assert lengths == {None: 100, 50: 50, 210: 210}  # the registered 200 counts frames, ours counts decisions


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("cartpole", r"no environment 'cartpole'\. Did you mean 'CartPole-v1'.*suites: .*dummy, gym"),
        ("gym/CartPole-v7", "'CartPole-v7' is registered. Did you mean 'CartPole-v1'"),
        ("dumy/discrete", "no suite 'dumy'.*Did you mean 'dummy/discrete'"),
        ("no_such_module:Env", "cannot import 'no_such_module'.*no_such_module.py"),
        (
            "tests.environments.sample_envs:Nestd",
            "'tests.environments.sample_envs' has no environment 'Nestd'. Did you mean 'Nested'",
        ),
        (
            "tests.environments.sample_envs:not_an_environment",
            "returned a dict: it must return a gymnasium.Env",
        ),
    ],
)
def test_unknown_task_suggests_closest(task, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_env(task)
    assert "\n" not in str(caught.value)


def test_missing_package_has_install_line(tmp_path, monkeypatch):
    (tmp_path / "adapter_without_package.py").write_text(
        "EXTRA = 'atari'\ndef make(task, *, render):\n    import package_that_is_not_there\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(task_names.SUITES, "other", "adapter_without_package")
    with pytest.raises(MissingPackageError, match=r"other/x needs .*package_that_is_not_there") as caught:
        make_env("other/x")
    assert str(caught.value).endswith(f": {install_line('atari')}")

    def needs_more():
        raise gymnasium.error.DependencyNotInstalled("thing is not installed, run `pip install thing`")

    monkeypatch.setitem(
        gymnasium.registry,
        "Needs-v0",
        gymnasium.envs.registration.EnvSpec("Needs-v0", entry_point=needs_more),
    )
    with pytest.raises(MissingPackageError, match=r"Needs-v0 .*pip install thing"):
        make_env("Needs-v0")


@pytest.mark.parametrize("extra", ["", "EXTRA = ''\n"])
def test_missing_module_without_extra(extra, tmp_path, monkeypatch):
    """`pip install cv2` would be wrong: the package is called opencv-python."""
    (tmp_path / "adapter_of_others.py").write_text(
        extra + "def make(task, *, render):\n    import cv2_that_is_not_there.data\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "adapter_of_others", raising=False)
    monkeypatch.setitem(task_names.SUITES, "other", "adapter_of_others")

    def own_environment():
        import cv2_that_is_not_there  # noqa: F401

    for task, name in (("other/x", "other/x"), (own_environment, "own_environment")):
        with pytest.raises(MissingPackageError) as caught:
            make_env(task)
        assert str(caught.value) == (
            f"{name} cannot be loaded: there is no module 'cv2_that_is_not_there', "
            "install the package that provides it"
        )


def test_suite_of_other_package(tmp_path, monkeypatch):
    (tmp_path / "their_suite.py").write_text(
        "from rl_lab.environments.suites.dummy import Count\n"
        "HANDLES = {'action_repeat'}\n"
        "def make(task, *, render, action_repeat, **options):\n"
        "    env = Count(**options)\n"
        "    env.action_repeat = action_repeat\n"
        "    return env\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("their", "their_suite", task_names.ENTRY_POINTS)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [point] if group == point.group else []
    )
    assert task_names.suites()["their"] == "their_suite"
    with make_env("their/any", 1, action_repeat=4) as env:
        env.reset()
        assert env.spec.action_repeat == 4 and env.step([0])[1][0] == 1.0  # no additional ActionRepeat


@pytest.mark.parametrize(
    "options",
    [
        {"num_envs": 0},
        {"action_repeat": 0},
        {"time_limit": 0},
        {"workers": -1},
        {"infos": "some"},
        {"size": [1, 2, 3]},
        {"pixels": "maybe"},
    ],
)
def test_invalid_settings_raise(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_env("dummy/discrete", **options)


def test_config_node_to_arguments():
    node = {"task": "dummy/discrete", "num_envs": 4, "size": [8, 8], "eval": {"num_envs": 2, "time_limit": 3}}
    assert env_config_options(node) == {"task": "dummy/discrete", "num_envs": 4, "size": [8, 8]}
    assert env_config_options(node, evaluation=True) == {
        **env_config_options(node),
        "num_envs": 2,
        "time_limit": 3,
    }
    with pytest.raises(ConfigError, match=r"environment\.task"):
        env_config_options({"task": None})
