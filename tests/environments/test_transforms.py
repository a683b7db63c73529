import numpy as np
import pytest

from rl_lab.config.compose import compose_config
from rl_lab.environments import env_config_options, make_env, probe_spec
from rl_lab.environments.wrappers import WRAPPERS
from rl_lab.errors import ConfigError


def steps(task, count, wrappers, action=0, **options):
    with make_env(task, 2, workers=0, wrappers=wrappers, seed=3, **options) as env:
        rows = [(env.reset()[0], None, {})]
        for _ in range(count):
            obs, reward, _, _, infos = env.step(np.full_like(env.action_space.sample(), action))
            rows.append((obs, reward, infos.get("log", {})))
        return env.spec, rows


def test_grayscale_weights():
    spec, rows = steps("dummy/dict", 3, {"grayscale": True})
    _, plain = steps("dummy/dict", 3, {})
    assert spec.observations["image"].shape == (1, 16, 16) and spec.observations["vector"].shape == (3,)
    for (obs, *_), (full, *_) in zip(rows, plain, strict=True):
        red, green, blue = full["image"].astype(float).transpose(1, 0, 2, 3)
        np.testing.assert_array_equal(obs["image"][:, 0], np.rint(0.299 * red + 0.587 * green + 0.114 * blue))
        np.testing.assert_array_equal(obs["vector"], full["vector"])


def test_crop():
    spec, rows = steps("dummy/dict", 2, {"crop": [2, 9, 4, 16]})
    _, plain = steps("dummy/dict", 2, {})
    assert spec.observations["image"].shape == (3, 7, 12) and spec.observations["vector"].shape == (3,)
    for (obs, *_), (full, *_) in zip(rows, plain, strict=True):
        np.testing.assert_array_equal(obs["image"], full["image"][:, :, 2:9, 4:16])
    with pytest.raises(ConfigError, match="outside of the 16×16 image"):
        steps("dummy/dict", 1, {"crop": [2, 17, 4, 16]})
    with pytest.raises(ConfigError, match="four integers"):
        steps("dummy/dict", 1, {"crop": 64})


def test_frame_stack():
    spec, rows = steps("dummy/count", 7, {"frame_stack": 3}, length=5)
    assert spec.observations["vector"].shape == (3,)
    seen = [obs["vector"][0].tolist() for obs, *_ in rows]
    assert seen == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [0, 0, 0], [0, 0, 1]]
    spec, rows = steps("dummy/dict", 2, {"grayscale": True, "frame_stack": 4})  # in the order written
    assert spec.observations["image"].shape == (4, 16, 16) and spec.observations["vector"].shape == (3,)
    np.testing.assert_array_equal(rows[2][0]["image"][:, 2], rows[1][0]["image"][:, 3])


@pytest.mark.parametrize(
    ("wrappers", "rewards"),
    [
        ({"reward_scale": 0.5}, [0.5, 1.0, 1.5]),
        ({"reward_shift": -1.5}, [-0.5, 0.5, 1.5]),
        ({"reward_shift": 1, "reward_scale": 2}, [4.0, 6.0, 8.0]),
        ({"reward_clip": 2}, [1.0, 2.0, 2.0]),
        ({"reward_sign": True}, [1.0, 1.0, 1.0]),
        ({"reward_tanh": True}, np.tanh([1.0, 2.0, 3.0])),
        ({"reward_clip": 2, "reward_scale": 2}, [2.0, 4.0, 4.0]),
        ({"reward_clip": None, "reward_sign": False}, [1.0, 2.0, 3.0]),
    ],
)
def test_reward_wrappers_log_raw_return(wrappers, rewards):
    _, rows = steps("dummy/count", 3, wrappers, length=3)
    np.testing.assert_allclose([reward[0] for _, reward, _ in rows[1:]], rewards, rtol=1e-6)
    changed = any(value not in (None, False) for value in wrappers.values())
    assert rows[-1][2][0].get("log/raw_return") == (6.0 if changed else None)


def test_observation_noise():
    _, clean = steps("dummy/dict", 40, {}, length=50)
    _, noisy = steps("dummy/dict", 40, {"observation_noise": 0.1}, length=50)
    _, again = steps("dummy/dict", 40, {"observation_noise": 0.1}, length=50)
    difference = np.concatenate([a[0]["vector"] - b[0]["vector"] for a, b in zip(noisy, clean, strict=True)])
    assert 0.08 < difference.std() < 0.12 and abs(difference.mean()) < 0.03
    for a, b in zip(noisy, again, strict=True):
        np.testing.assert_array_equal(a[0]["vector"], b[0]["vector"])
        np.testing.assert_array_equal(a[0]["image"], b[0]["image"])
    assert noisy[0][0]["image"].dtype == np.uint8 and (noisy[5][0]["image"] != clean[5][0]["image"]).any()


FROM_CONFIG = {
    "crop": "[2,9,0,16]",
    "frame_stack": 3,
    "observation_noise": 0.1,
    "reward_shift": -1.5,
    "reward_scale": 0.5,
    "reward_clip": 0.2,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_all_wrappers_from_command_line(name):
    word = f"+environment.wrappers.{name}={FROM_CONFIG.get(name, 'true')}"
    results = []
    for words in ([], [word]):
        options = env_config_options(compose_config(["environment=dummy_dict", *words]).environment)
        with make_env(**{**options, "workers": 0}, seed=2) as env:
            obs, _ = env.reset()
            rewards = [env.step(np.zeros((env.num_envs, 2), np.int64))[1] for _ in range(3)]
            results.append((obs["image"], obs["vector"], np.array(rewards)))
    changed = [
        left.shape != right.shape or (left != right).any() for left, right in zip(*results, strict=True)
    ]
    assert any(changed[2:] if name.startswith("reward") else changed[:2])
    if name == "reward_sign":  # rewards are 0, 1/2 and 1
        assert set(results[1][2].reshape(-1)) == {0.0, 1.0}


@pytest.mark.parametrize("workers", [0, 1])
def test_wrapped_environments_resume_exactly(workers):
    wrappers = {"grayscale": True, "frame_stack": 3, "observation_noise": 0.05, "reward_tanh": True}
    with (
        make_env("dummy/dict", 2, workers=0, wrappers=wrappers) as env,
        make_env("dummy/dict", 2, workers=workers, wrappers=wrappers) as other,
    ):
        env.reset(seed=1)
        for _ in range(14):
            env.step(np.zeros((2, 2), np.int64))
        assert other.set_state(env.get_state()) == []
        left, right = (which.step(np.ones((2, 2), np.int64)) for which in (env, other))
        np.testing.assert_array_equal(left[0]["image"], right[0]["image"])
        np.testing.assert_array_equal(left[1], right[1])


@pytest.mark.parametrize(
    ("wrappers", "message"),
    [
        ({"frame_stak": 4}, "environment.wrappers.frame_stak does not exist. Did you mean 'frame_stack'"),
        ({"frame_stack": 0}, "frame_stack=0 must be an integer"),
        ({"reward_clip": -1}, "reward_clip=-1 must be a number"),
        ({"reward_shift": float("inf")}, "reward_shift=inf must be a finite number"),
        ({"grayscale": True}, r"grayscale needs an image, and the observations are \['vector'\]"),
    ],
)
def test_invalid_options_raise(wrappers, message):
    with pytest.raises(ConfigError, match=message):
        probe_spec("dummy/discrete", wrappers=wrappers)
