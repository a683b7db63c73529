"""Pictures of observed states: a state that is set from an observation gives that observation again."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest

from rl_lab.environments.make import env_factory
from rl_lab.environments.normalizer import ObservationNormalizer
from rl_lab.environments.state_rendering import DMC, STATE_NAMES, StateDrawer, state_drawer, state_names
from rl_lab.environments.suites.dmc import TASKS, resolve
from rl_lab.records import ArraySpec

CLASSIC = ("CartPole-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1", "Acrobot-v1")


def played(task: str, steps: int = 25, **options: Any) -> tuple[gymnasium.Env, dict[str, np.ndarray]]:
    """An environment after random actions, and its observation there."""
    env = env_factory(task, **options)(True)
    obs, _ = env.reset(seed=3)
    env.action_space.seed(3)
    for _ in range(steps):
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        if terminated or truncated:
            break
    return env, {name: np.array(value) for name, value in obs.items()}


@pytest.mark.parametrize("task", CLASSIC)
def test_classic_control_is_drawn_as_the_environment_draws_itself(task: str):
    pytest.importorskip("pygame")
    env, obs = played(task)
    inner: Any = env.unwrapped
    if task == "Pendulum-v1":
        inner.last_u = None  # the arrow of the last torque, which no observation has
    drawer = state_drawer(env_factory(task))
    assert drawer is not None
    image = drawer.draw(obs)
    assert image is not None and np.abs(image.astype(int) - inner.render()).mean() < 0.05
    other = drawer.draw({name: -value for name, value in obs.items()})
    assert other is not None and not np.array_equal(image, other)
    assert drawer.draw({name: value[:1] for name, value in obs.items()}) is None  # of another size
    drawer.close()
    env.close()


@pytest.mark.parametrize("domain", sorted(DMC))
def test_dmc_state_set_from_an_observation_gives_it_again(domain: str):
    pytest.importorskip("dm_control")
    task = next(f"dmc/{name}" for name in TASKS if resolve(name)[0] == domain)
    env, obs = played(task, 40)
    inner: Any = env.unwrapped
    place = inner.physics.data.qpos.copy()
    fresh: Any = env_factory(task)(False)
    fresh.reset(seed=11)
    DMC[domain](fresh.unwrapped, {name: np.asarray(value, np.float64) for name, value in obs.items()})
    physics = fresh.unwrapped.physics
    again = fresh.unwrapped._env.task.get_observation(physics)
    for name in obs:
        if name not in ("velocity", "touch"):  # they do not move the picture
            assert np.allclose(np.ravel(again[name]), obs[name], atol=1e-5), (domain, name)
    unseen = {"cheetah": 1, "hopper": 1, "walker": 2}.get(domain, 0)  # the place, which is not observed
    difference = (physics.data.qpos - place)[unseen:]
    assert np.allclose(np.sin(difference / 2), 0.0, atol=1e-5)
    env.close()
    fresh.close()


def test_every_task_of_a_drawn_dmc_domain_has_the_same_observations():
    pytest.importorskip("dm_control")
    for task in ("cartpole_three_poles", "reacher_hard", "hopper_hop", "point_mass_hard"):
        env, obs = played(f"dmc/{task}", 5)
        DMC[resolve(task)[0]](env.unwrapped, {name: np.asarray(value, float) for name, value in obs.items()})
        env.close()


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("CartPole-v1", {"wrappers": {"frame_stack": 4}}),
        ("LunarLander-v3", {}),
        ("dummy/catch", {}),
        ("dummy/discrete", {}),
        ("dmc/quadruped_walk", {}),
        ("CartPole-v1", {"pixels": True, "size": 64}),
    ],
)
def test_other_observations_have_no_drawer(task: str, options: dict[str, Any]):
    if task.startswith("Lunar"):
        pytest.importorskip("Box2D")
    if task.startswith("dmc"):
        pytest.importorskip("dm_control")
    assert state_drawer(env_factory(task, **options)) is None


def test_normalized_observations_are_drawn_in_their_own_units():
    pytest.importorskip("pygame")
    normalizer = ObservationNormalizer({"vector": ArraySpec((4,), "float32")})
    rows = np.random.default_rng(0).normal((1.0, 0.0, 0.1, 2.0), (0.5, 1.0, 0.05, 3.0), (400, 4))
    normalizer.update({"vector": rows})
    obs = {"vector": np.array([0.7, -0.2, 0.12, 1.0], np.float32)}
    assert np.allclose(normalizer.inverse(normalizer(obs))["vector"], obs["vector"], atol=1e-5)
    plain = state_drawer(env_factory("CartPole-v1"))
    scaled = state_drawer(env_factory("CartPole-v1"), normalizer)
    assert isinstance(plain, StateDrawer) and isinstance(scaled, StateDrawer)
    assert np.array_equal(plain.draw(obs), scaled.draw(normalizer(obs)))
    assert plain.draw({"vector": np.full(4, np.nan, np.float32)}) is not None  # drawn at zero, no crash
    plain.close()
    scaled.close()


def test_names_of_the_values():
    assert state_names("CartPole-v1", {"vector": np.zeros(4)})[2] == "pole angle"
    assert state_names("my_env:MyEnv", {"vector": np.zeros(2), "height": np.zeros(1)}) == [
        "vector 0",
        "vector 1",
        "height",
    ]
    for prefix, names in STATE_NAMES.items():
        ids = [task for task in gymnasium.registry if task.startswith(prefix + "-")]
        sizes = set()
        for task in ids:
            try:
                sizes.add(gymnasium.make(task).observation_space.shape)
            except gymnasium.error.Error:  # Box2D is optional
                continue
        assert sizes <= {(len(names),)}, prefix
