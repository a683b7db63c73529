import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments.suites.dummy import Count, DiscreteCue
from rl_lab.environments.wrappers import (
    ActionRepeat,
    DictObservation,
    RenderedPixels,
    Resize,
    StandardAction,
    TimeLimit,
    resize,
    without_time_limit,
)
from rl_lab.errors import ConfigError


def test_action_repeat_sums_and_stops_at_end():
    env = ActionRepeat(Count(length=5), 3)
    env.reset(seed=0)
    obs, reward, terminated, truncated, info = env.step(0)
    assert (obs[0], reward, terminated, truncated, info["log/steps"]) == (3, 1 + 2 + 3, False, False, 3.0)
    obs, reward, terminated, truncated, info = env.step(0)
    assert (obs[0], reward, terminated, truncated, info["log/steps"]) == (5, 4 + 5, True, False, 2.0)


def test_time_limit_counts_decisions():
    env = TimeLimit(ActionRepeat(Count(length=6), 2), 2)
    env.reset(seed=0)
    assert env.step(0)[2:4] == (False, False)
    assert env.step(0)[2:4] == (False, True)  # frame 4 of 6
    env = TimeLimit(Count(length=2), 2)
    for _ in range(2):  # counts again after a reset
        env.reset(seed=0)
        assert env.step(0)[2:4] == (False, False)
        assert env.step(0)[2:4] == (True, False)


def test_registered_limit_is_removed():
    env = gymnasium.wrappers.TimeLimit(Count(), 3)
    assert without_time_limit(env) is env.env
    assert without_time_limit(env.env) is env.env


def test_resize_equals_pillow_bilinear():
    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    wanted = np.asarray(Image.fromarray(picture).resize((12, 8), Image.Resampling.BILINEAR))
    ours = resize(picture.transpose(2, 0, 1), (8, 12))
    np.testing.assert_array_equal(ours, wanted.transpose(2, 0, 1))
    many = resize(np.repeat(picture[:, :, 0][None], 5, axis=0), (8, 12))
    assert many.shape == (5, 8, 12)
    np.testing.assert_array_equal(many[3], wanted[:, :, 0])


def test_rendered_pixels_alone_and_added():
    alone = DictObservation(RenderedPixels(DiscreteCue(render_mode="rgb_array"), keep=False))
    assert list(alone.observation_space) == ["image"] and alone.reset(seed=0)[0]["image"].shape == (3, 32, 32)
    both = Resize(DictObservation(RenderedPixels(DiscreteCue(render_mode="rgb_array"), keep=True)), (16, 24))
    obs = both.step(both.action_space.sample())[0] if both.reset(seed=0) else None
    assert {name: value.shape for name, value in obs.items()} == {"vector": (4,), "image": (3, 16, 24)}
    assert both.observation_space.contains(obs)
    np.testing.assert_array_equal(obs["image"], resize(both.render().transpose(2, 0, 1), (16, 24)))
    scaled = DictObservation(
        RenderedPixels(DiscreteCue(render_mode="rgb_array"), keep=True, size=(16, 24))
    )  # directly: the same image
    np.testing.assert_array_equal(scaled.reset(seed=0)[0]["image"], both.reset(seed=0)[0]["image"])


def test_pixels_and_size_need_images():
    env = Count()
    env.render = lambda: None
    with pytest.raises(ConfigError, match="render"):
        RenderedPixels(env, keep=False)
    with pytest.raises(ConfigError, match="pixels=true"):
        Resize(DictObservation(Count()), (8, 8))


def test_standard_action_converts_actions():
    class Takes(gymnasium.Env):
        observation_space = spaces.Box(-1, 1, (1,), np.float32)
        action_space = spaces.Box(0.0, 4.0, (2, 1), np.float32)

        def step(self, action):
            self.taken = action
            return np.zeros(1, np.float32), 0.0, False, False, {}

    env = StandardAction(Takes())
    env.step(np.array([0.0, 1.0], np.float32))
    np.testing.assert_array_equal(env.unwrapped.taken, [[2.0], [4.0]])
    assert env.action_spec.shape == (2,) and env.action_space.shape == (2,)
