"""dm_control's manipulation, rodent and ant mazes: observations, seeds, and what the published settings say."""

import ctypes.util

import numpy as np
import pytest

pytest.importorskip("dm_control", reason="extra: dmc")

from rl_lab.environments.make import env_factory
from rl_lab.environments.suites import dmc, loconav
from rl_lab.errors import ConfigError

DRAWS = bool(ctypes.util.find_library("EGL") or ctypes.util.find_library("OSMesa"))


def episode(env, seed, actions):
    obs, _ = env.reset(seed=seed)
    rows = [obs]
    for action in actions:
        obs, reward, *_ = env.step(action)
        rows.append({**obs, "reward": np.array(reward)})
    return rows


def assert_same_episodes(left, right):
    for one, other in zip(left, right, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], name)


def test_manipulation_from_vectors():
    from dm_control import manipulation

    listed = {name.removesuffix("_features") for name in manipulation.ALL if name.endswith("_features")}
    assert listed == set(dmc.MANIPULATION.split())
    seen = {name.removesuffix("_vision") for name in manipulation.ALL if name.endswith("_vision")}
    assert listed - seen == {dmc.WITHOUT_VISION}
    env = env_factory("dmc/manip_reach_site")()
    assert {"target_position", "jaco_arm/joints_pos"} <= set(env.observation_space.spaces)
    assert all(
        space.dtype == np.float32 and len(space.shape) == 1 for space in env.observation_space.values()
    )
    actions = [np.full(9, 0.3, np.float32)] * 3
    first = episode(env, 5, actions)
    episode(env, 6, actions)
    assert_same_episodes(first, episode(env, 5, actions))
    env.close()


@pytest.mark.learning
@pytest.mark.parametrize("task", [f"rodent_{name}" for name in dmc.RODENT.split()])
def test_rodent_episodes_depend_on_their_seed_alone(task):
    used, fresh = env_factory(f"dmc/{task}")(), env_factory(f"dmc/{task}")()
    assert used.action_space.shape == (38,)
    rng = np.random.default_rng(1)
    actions = [rng.uniform(-1, 1, 38).astype(np.float32) for _ in range(5)]
    episode(used, 1, actions)
    np.random.seed(int(rng.integers(1000)))
    assert_same_episodes(episode(used, 7, actions), episode(fresh, 7, actions))


def test_names_of_dm_control():
    from dm_control.locomotion.examples import basic_rodent_2020

    assert {name for name in dir(basic_rodent_2020) if name.startswith("rodent_")} == {
        f"rodent_{name}" for name in dmc.RODENT.split()
    }
    assert dmc.resolve("manip_stack_2_bricks") == ("manip", "stack_2_bricks")
    assert dmc.resolve("rodent_run_gaps") == ("rodent", "run_gaps")


def test_own_generator_leaves_numpys_alone():
    env = env_factory("dmc/rodent_two_touch")().unwrapped
    np.random.seed(3)
    expected = np.random.RandomState(3).rand()
    with env._own_random():
        np.random.rand()
    assert np.random.rand() == expected


@pytest.mark.parametrize("name", list(loconav.MAPS))
def test_maps_are_closed(name):
    """Every cell that can be reached from the start has a neighbour on all sides, and the goal can be reached."""
    rows = loconav.MAPS[name]
    assert len({len(row) for row in rows}) == 1
    if name == "empty":  # the arena's own border is around it
        return
    cells = {(y, x): cell for y, row in enumerate(rows) for x, cell in enumerate(row)}
    (start,) = (place for place, cell in cells.items() if cell == "P")
    reached, queue = {start}, [start]
    while queue:
        y, x = queue.pop()
        for place in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            assert place in cells, f"a hole at {(y, x)}"
            if cells[place] in ".PG" and place not in reached:
                reached.add(place)
                queue.append(place)
    assert sum(cells[place] == "G" for place in reached) == 1


def test_ant_maze():
    if not DRAWS:
        pytest.skip("neither EGL nor OSMesa to draw with")
    env = env_factory("loconav/ant_maze_s", fast_render=True, keys="joints|image")()
    assert set(env.observation_space.spaces) == {"walker/joints_pos", "walker/joints_vel", "image"}
    assert env.observation_space["image"].shape == (3, 64, 64) and env.action_space.shape == (8,)
    inner = env.unwrapped
    assert inner._env.task.control_timestep == 1 / 50 and inner._env._time_limit == 60
    obs, _ = env.reset(seed=1)
    assert obs["image"].std() > 5
    assert not inner._env.task._target.activated
    # Put the ant into the goal: from then on every step is rewarded, and the episode goes on.
    physics = inner._env.physics
    goal = physics.bind(inner._env.task._target.geom).xpos
    walker = inner._env.task._walker
    walker.set_pose(physics, position=[*goal[:2], 0.8])
    results = [env.step(np.zeros(8, np.float32)) for _ in range(4)]
    assert [result[1] for result in results][1:] == [1.0, 1.0, 1.0]
    assert not any(terminated or truncated for _, _, terminated, truncated, _ in results)
    assert sum(result[4]["log/coverage"] for result in results) >= 1
    env.close()
    with pytest.raises(ConfigError, match=r"environment\.keys='\(' is not a regular expression"):
        env_factory("loconav/ant_maze_s", keys="(")()
    with pytest.raises(ConfigError, match="use the ant"):
        env_factory("loconav/quadruped_maze_m")
