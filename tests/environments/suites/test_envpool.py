"""EnvPool's MiniGrid and dm_control compared with the originals: equal rules from equal starts, other starts."""

import numpy as np
import pytest

pytest.importorskip("envpool", reason="extra: envpool, 750 MB, so not among those of the tests")

from rl_lab.environments import make_env
from rl_lab.environments.suites import atari, dmc, minigrid
from rl_lab.errors import ConfigError


def same_rows(one, two, steps, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        action = int(rng.choice([0, 1, 2, 2, 2, 3, 4, 5]))
        first, second = one.step(action), two.step(action)
        assert first[0].keys() == second[0].keys()
        for name in first[0]:
            np.testing.assert_array_equal(first[0][name], second[0][name])
        np.testing.assert_allclose(first[1], second[1], atol=1e-6)
        assert first[2:4] == second[2:4]
        if first[2] or first[3]:
            return
    raise AssertionError("the episode did not end")


@pytest.mark.parametrize("task", ["MiniGrid-Empty-5x5-v0", "MiniGrid-Empty-8x8-v0"])
def test_minigrid_has_the_same_rules(task):
    """Levels without chance: observations, rewards, missions and ends are equal."""
    pytest.importorskip("minigrid")
    ours = minigrid.make(task, mission=6)
    theirs = minigrid.make(task, mission=6, backend="envpool")
    for seed in range(4):
        first, second = ours.reset(seed=seed)[0], theirs.reset(seed=seed)[0]
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
        same_rows(ours, theirs, 400, seed)


def test_minigrid_seeds_lead_to_other_levels_but_determine_them():
    pytest.importorskip("minigrid")
    env = minigrid.make("MiniGrid-DoorKey-8x8-v0", backend="envpool")
    grids = [env.reset(seed=seed)[0]["grid"] for seed in (1, 1, 2, 3, 4)]
    np.testing.assert_array_equal(grids[0], grids[1])
    assert any((grids[0] != other).any() for other in grids[2:])


@pytest.mark.parametrize(
    ("domain", "task", "angles"),
    [("pendulum", "swingup", "orientation"), ("cartpole", "swingup", "position")],
)
def test_dm_control_has_the_same_physics(domain, task, angles):
    """From equal starts, which these observations contain completely, for an episode of 1,000 control steps."""
    pytest.importorskip("dm_control")
    theirs = dmc.make((domain, task), backend="envpool")
    ours = dmc.make((domain, task))
    theirs.reset(seed=4), ours.reset(seed=4)
    first = {name: value[0] for name, value in theirs._pool.reset()[0].items()}  # float64
    cart = [first[angles][0]] if domain == "cartpole" else []
    cosine, sine = first[angles][-2:]
    physics = ours._env.physics
    with physics.reset_context():
        physics.data.qpos[:] = [*cart, np.arctan2(sine, cosine)]
        physics.data.qvel[:] = first["velocity"]
    rng = np.random.default_rng(0)
    for step in range(1000):
        action = rng.uniform(-1, 1, ours.action_space.shape).astype(np.float32)
        one, two = ours.step(action), theirs.step(action)
        for name in one[0]:
            np.testing.assert_allclose(one[0][name], two[0][name], atol=1e-4, err_msg=f"{name} at {step}")
        np.testing.assert_allclose(one[1], two[1], atol=1e-4)
        assert one[2:4] == two[2:4] == (False, step == 999)


@pytest.mark.parametrize(
    "task", ["walker/walk", "cheetah/run", "ball_in_cup/catch", "humanoid_CMU/run", "point_mass/easy"]
)
def test_dm_control_has_the_same_spaces(task):
    pytest.importorskip("dm_control")
    ours, theirs = dmc.make(tuple(task.split("/"))), dmc.make(tuple(task.split("/")), backend="envpool")
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space


def test_dm_control_limits_and_repeats():
    pytest.importorskip("dm_control")
    with make_env("dmc/walker_walk", 2, workers=0, backend="envpool", action_repeat=2, time_limit=7) as env:
        first, _ = env.reset(seed=3)
        ends = [env.step(np.zeros((2, 6), np.float32))[3].tolist() for _ in range(7)]
        assert ends == [[False, False]] * 6 + [[True, True]] and env.spec.action_repeat == 2
        assert env.set_state(env.get_state()) == []
        again, _ = env.reset(seed=3)
        for name in first:
            np.testing.assert_array_equal(first[name], again[name])
        # Each environment has its own seed.
        assert any((first[name][0] != first[name][1]).any() for name in first)


@pytest.mark.parametrize(("game", "full"), [("pong", False), ("breakout", True)])
def test_atari_is_the_same_game_resized_differently(game, full):
    """With one no-op and without sticky actions, 400 decisions: rewards and ends are equal, images are close."""
    pytest.importorskip("ale_py")
    settings = {"size": (64, 64), "gray": False, "sticky": 0.0, "full_actions": full, "noops": 1}
    ours, theirs = atari.make(game, **settings), atari.make(game, backend="envpool", **settings)
    assert ours.observation_space == theirs.observation_space and ours.action_space == theirs.action_space
    ours.noops = (1, 1)
    ours.reset(seed=0), theirs.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(400):
        action = int(rng.integers(ours.action_space.n))
        one, two = ours.step(action), theirs.step(action)
        assert one[1:4] == two[1:4]
        difference = np.abs(one[0].astype(int) - two[0].astype(int))
        assert difference.mean() < 2 and (difference > 0).mean() < 0.3
        if one[2]:
            break


def test_what_it_cannot_do_is_said():
    pytest.importorskip("minigrid"), pytest.importorskip("dm_control")
    with pytest.raises(ConfigError, match=r"environment\.backend=envpool renders no MiniGrid"):
        make_env("minigrid/Empty-5x5", backend="envpool", observe="rgb")
    with pytest.raises(ConfigError, match=r"environment\.backend=envpool renders no dm_control"):
        make_env("dmc/walker_walk", backend="envpool", observe="vision")
    with pytest.raises(ConfigError, match=r"environment\.backend=envpool has neither lost lives"):
        make_env("atari100k/pong", backend="envpool", variant="iris")
    with pytest.raises(ConfigError, match=r"environment\.backend='envpol': Did you mean 'envpool'"):
        make_env("dmc/walker_walk", backend="envpol")
