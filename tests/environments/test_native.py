"""Raw observations and actions of an environment: converted without it, to what its wrappers give."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rl_lab.environments.env_runner import episode_seed
from rl_lab.environments.make import make_env, probe
from rl_lab.environments.native import NativeForm, space_from_data, space_to_data
from rl_lab.errors import ConfigError, LabError
from tests.environments import sample_envs

ACTIONS = {
    "discrete": spaces.Discrete(3, start=5),
    "multi_discrete": spaces.MultiDiscrete([[2, 3], [4, 2]], start=[[1, 0], [0, 7]]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float32),
    "integer_box": spaces.Box(-5, 5, (2, 2), np.int64),
    "one_sided_box": spaces.Box(np.array([-np.inf, 0.5]), np.array([np.inf, np.inf]), dtype=np.float64),
}


def form_of(task: Any, **options: Any) -> NativeForm:
    """The form as a saved run has it: through JSON."""
    return NativeForm(json.loads(json.dumps(probe(task, **options)[1], allow_nan=False)))


CASES = [
    *({"kind": kind, "size": "auto"} for kind in sample_envs.OBSERVATIONS),
    {"kind": "large_image", "size": [20, 30], "wrappers": {"crop": [2, 18, 0, 30], "grayscale": True, "frame_stack": 3}},
    {"kind": "vector", "wrappers": {"frame_stack": 2, "reward_clip": 1.0}},
    {"kind": "cameras", "observations": ["hand", "touch"]},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=str)
def test_raw_observations_become_those_of_the_wrappers(options: dict[str, Any]):
    """In two environments, the second of which starts a new episode after three steps."""
    form = form_of(sample_envs.Sampled, **options)
    raw = [sample_envs.Sampled(kind=options["kind"]) for _ in range(2)]
    with make_env(sample_envs.Sampled, 2, workers=0, seed=3, **options) as env:
        expected, _ = env.reset()
        observations = [each.reset()[0] for each in raw]
        for step in range(5):
            batch = _batch([each.observation_space for each in raw], observations)
            converted = form.to_lab(batch, np.array(env.is_first))
            assert set(converted) == set(expected)
            for name, value in expected.items():
                np.testing.assert_array_equal(converted[name], value)
                assert converted[name].dtype == value.dtype
            if step == 2:
                env.schedule({1: 9})  # ends its episode
            expected, *_ = env.step(np.zeros(2, np.int64))
            observations = [
                each.reset()[0] if first else each.step(0)[0] for each, first in zip(raw, env.is_first)
            ]


def _batch(all_spaces: list[spaces.Space], observations: list[Any]) -> Any:
    """As Gymnasium's vector environments return it."""
    from gymnasium.vector.utils import concatenate, create_empty_array

    space = all_spaces[0]
    return concatenate(space, observations, create_empty_array(space, len(observations)))


@pytest.mark.parametrize("name", ACTIONS)
def test_actions_are_those_that_the_environment_receives(name: str):
    received: list[Any] = []

    class Listens(sample_envs.Base):
        def __init__(self, render_mode=None):
            super().__init__(render_mode)
            self.action_space = ACTIONS[name]

        def step(self, action):
            received.append(action)
            return super().step(action)

    form = form_of(Listens)
    with make_env(Listens, 1, workers=0) as env:
        env.reset()
        env.action_space.seed(0)
        for _ in range(5):
            action = env.action_space.sample()
            env.step(action)
            (raw,) = form.to_raw(action)
            np.testing.assert_array_equal(raw, received[-1])
            assert type(raw) is type(received[-1]) and ACTIONS[name].contains(raw)


@pytest.mark.parametrize("space", [*ACTIONS.values(), *sample_envs.OBSERVATIONS.values()], ids=str)
def test_spaces_survive_json(space: spaces.Space):
    data = json.loads(json.dumps(space_to_data(space), allow_nan=False))
    assert space_from_data(data) == space


def test_space_that_cannot_be_converted_may_be_left_out():
    space = spaces.Dict({"text": spaces.Text(3), "value": spaces.Box(0, 1, (2,), np.float32)})

    class Talks(sample_envs.Base):
        def __init__(self, render_mode=None):
            super().__init__(render_mode)
            self.observation_space = space

    form = form_of(Talks, observations=["value"])
    assert form.to_lab({"value": np.ones((3, 2))}, None)["value"].shape == (3, 2)
    with pytest.raises(ConfigError, match="Text"):
        form_of(Talks)


def test_rendered_frames_have_their_own_size():
    class Rendered(sample_envs.Base):
        def render(self):
            return np.full((40, 60, 3), 5 * self.count, np.uint8)

    for pixels, size in ((True, "auto"), ("both", [16, 16])):
        form = form_of(Rendered, pixels=pixels, size=size)
        image = form.observation_space["image"]
        assert image.shape == (40, 60, 3)
        with make_env(Rendered, 1, workers=0, pixels=pixels, size=size) as env:
            env.reset()
            expected, *_ = env.step(np.zeros(1, np.int64))
        raw = {"vector": np.ones((1, 1)), "image": np.full((1, 40, 60, 3), 5, np.uint8)}
        for name, value in form.to_lab(raw, None).items():
            np.testing.assert_array_equal(value, expected[name])


@pytest.mark.parametrize(
    "obs, text",
    [
        (np.zeros((3, 30, 40), np.uint8), r"\['camera'\] is missing"),
        ({"camera": np.zeros((30, 40, 3), np.uint8)}, r"\['joints'\] is missing"),
        (None, r"\['camera'\] is missing"),
        ({"camera": np.zeros((3, 30, 40), np.uint8), "joints": np.zeros(4)}, r"'camera' has shape \(3, 30, 40\), but"),
        ({"camera": np.zeros((2, 30, 40, 3), np.uint8), "joints": np.zeros(4)}, "different numbers of environments"),
        ({"camera": np.zeros((30, 40, 3), np.uint8), "joints": [[1, 2], [3]]}, "'joints' cannot be read"),
        ({"camera": np.zeros((30, 40, 3), np.uint8), "joints": [1, 2, 3, np.nan]}, "'joints' has NaN or infinity"),
        ({"camera": np.zeros((30, 40, 3), np.uint8), "joints": ["a", "b", "c", "d"]}, "'joints' has dtype <U1"),
        ({"camera": np.full((30, 40, 3), 0.5), "joints": np.zeros(4)}, "'camera' has fractions"),
        ({"camera": np.full((30, 40, 3), 300), "joints": np.zeros(4)}, "outside 0 to 255"),
    ],
)  # fmt: skip
def test_unusable_observations_are_named(obs: Any, text: str):
    form = form_of(sample_envs.Sampled, kind="image_and_vector", size="auto")
    with pytest.raises(LabError, match=f"^obs.*{text}"):
        assert form.count(obs) is None
        form.to_lab(form.batched(obs), None)


def test_automatic_resizing_is_said():
    said = {
        kind: form_of(sample_envs.Sampled, kind=kind, size="auto").automatic_resizing()
        for kind in sample_envs.OBSERVATIONS
    }
    assert said["large_image"] == "environment.size=auto resizes image from 210×160 to 64×64"
    assert said["cameras"] == "environment.size=auto resizes front from 84×84, hand from 16×16 to 64×64"
    assert said["vector"] == said["fitting_image"] == ""
    assert form_of(sample_envs.Sampled, kind="large_image", size=64).automatic_resizing() == ""


def test_dict_for_an_array_is_the_labs_form():
    form = form_of("CartPole-v1")
    with pytest.raises(
        LabError, match=r"^obs is a dict, but .* scaled=True takes observations of rl_lab\.make_env"
    ):
        form.count({"vector": np.zeros(4)})


def test_registered_environment_needs_no_wrapper():
    form = form_of("Pendulum-v1")
    seed = episode_seed(7, 0, 0)
    raw = gymnasium.make("Pendulum-v1")
    with make_env("Pendulum-v1", 1, seed=7) as env:
        lab, _ = env.reset()
        obs, _ = raw.reset(seed=seed)
        for action in ([0.5], [-1.0], [0.3]):
            np.testing.assert_array_equal(form.to_lab(obs[None], None)["vector"], lab["vector"])
            lab, reward, *_ = env.step(np.array([action], np.float32))
            (force,) = form.to_raw(np.array([action], np.float32))
            obs, expected, *_ = raw.step(force)
            assert np.float32(expected) == reward[0]
        assert form.action_space == raw.action_space
