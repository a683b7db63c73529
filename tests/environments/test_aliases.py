import numpy as np
import pytest

from rl_lab.config.compose import CONFIG_FOLDER, compose_config
from rl_lab.environments import env_config_options, make_env
from rl_lab.environments.make import probe_spec
from rl_lab.environments.task_names import canonical, with_suite
from rl_lab.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("atari_pong", "atari/pong"),
        ("atari_space_invaders", "atari/space_invaders"),
        ("atari100k_ms_pacman", "atari100k/ms_pacman"),
        ("dmc_walker_walk", "dmc/walker_walk"),
        ("dmc_cup_catch", "dmc/cup_catch"),
        ("crafter_reward", "crafter/reward"),
        ("CrafterNoReward-v1", "crafter/noreward"),
        ("BreakoutNoFrameskip-v4", "atari100k/Breakout"),
        ("memmaze_9x9", "memory_maze/9x9"),
        ("MemoryMaze-15x15-v0", "memory_maze/15x15"),
        ("MiniGrid-Empty-5x5-v0", "minigrid/MiniGrid-Empty-5x5-v0"),
        ("popgym-CountRecallEasy-v0", "popgym/CountRecallEasy"),
        ("carracing", "carracing/continuous"),
        ("minecraft_diamond", "minecraft/diamond"),
        ("dmlab_explore_goal_locations_small", "dmlab/explore_goal_locations_small"),
        ("loconav_ant_maze_m", "loconav/ant_maze_m"),
        ("bsuite_catch/3", "bsuite/catch/3"),
        ("dmc_rodent_rodent_run_gaps", "dmc/rodent_run_gaps"),
        ("mw-push", "metaworld/push"),
        ("DoomTakeCover-v0", "vizdoom/take_cover"),
        # no aliases
        ("CartPole-v1", "CartPole-v1"),
        ("my_module:atari_pong", "my_module:atari_pong"),
        ("atari/pong", "atari/pong"),
        ("atari", "atari"),
    ],
)
def test_names_of_other_projects(name, task):
    assert canonical(name) == task


def test_suite_config_needs_only_task():
    assert with_suite("pong", "atari100k") == "atari100k/pong"
    assert with_suite("atari/pong", "atari100k") == "atari/pong"
    assert with_suite("dmc_walker_walk", "dmc") == "dmc/walker_walk"
    assert with_suite("my_module:Env", "dmc") == "my_module:Env"
    assert with_suite("CartPole-v1", None) == "CartPole-v1"
    node = {"suite": "dummy", "task": "discrete", "num_envs": 2, "eval": {"task": "dict"}}
    assert env_config_options(node) == {"task": "dummy/discrete", "num_envs": 2}
    assert env_config_options(node, evaluation=True)["task"] == "dummy/dict"
    with make_env(**env_config_options(node), workers=0) as env:
        assert env.spec.name == "dummy/discrete"


@pytest.mark.parametrize(
    "file", sorted((CONFIG_FOLDER / "experiment").glob("*atari*.yaml")), ids=lambda file: file.stem
)
def test_atari_names_in_every_atari_experiment(file):
    pytest.importorskip("ale_py", reason="extra: atari")
    node = compose_config([f"experiment={file.stem}", "environment.task=atari_pong"]).environment
    expected = probe_spec(**env_config_options({**node, "task": "pong"}))
    for name in (node.task, "PongNoFrameskip-v4"):
        spec = probe_spec(**env_config_options({**node, "task": name}))
        assert spec.name.lower() == f"{node.suite}/pong"  # the suite stays that of the experiment
        assert spec.observations == expected.observations and spec.action == expected.action


def test_both_command_line_forms_are_equal():
    short = compose_config(["environment=atari100k", "environment.task=boxing"]).environment
    long = compose_config(["environment=atari100k", "environment.task=atari100k/boxing"]).environment
    assert env_config_options(short) == env_config_options(long)
    other = compose_config(["environment=gym", "environment.task=atari_boxing"]).environment
    assert env_config_options(other)["action_repeat"] is None  # the suite's own four frames, not one
    with pytest.raises(ConfigError, match="no environment 'boxing'"):
        make_env("boxing")


def test_python_and_command_line_are_equal():
    pytest.importorskip("minigrid", reason="extra: minigrid")
    node = compose_config(
        ["environment=minigrid", "environment.task=DoorKey-5x5", "environment.num_envs=2"]
    ).environment
    with (
        make_env(**{**env_config_options(node), "workers": 0}, seed=4) as left,
        make_env("minigrid/DoorKey-5x5", num_envs=2, workers=0, seed=4, observe="rgb", size=64) as right,
    ):
        assert left.spec == right.spec
        for env in (left, right):
            env.reset()
        for step in range(6):
            seen = [env.step(np.array([step % 3, 2])) for env in (left, right)]
            np.testing.assert_array_equal(seen[0][0]["image"], seen[1][0]["image"])
            np.testing.assert_array_equal(seen[0][1], seen[1][1])
