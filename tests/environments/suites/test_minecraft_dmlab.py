"""Minecraft and DeepMind Lab, with stand-ins written from the packages' sources: actions, rewards, ends, errors."""

import numpy as np
import pytest

from rl_lab.environments import make_env, probe_spec
from rl_lab.environments.make import env_factory
from rl_lab.environments.suites import dmlab, minecraft
from rl_lab.errors import ConfigError, LabError
from tests.environments.suites.suite_cases import use_stand_in


@pytest.fixture(autouse=True)
def _stand_ins():
    use_stand_in("minecraft")
    use_stand_in("dmlab")


def game(task="diamond", **options):
    env = env_factory(f"minecraft/{task}", **options)()
    env.reset(seed=3)
    return env


def do(env, *names):
    """Return the rewards of these actions."""
    inner = env.unwrapped
    return [env.step(inner.action_names.index(name))[1] for name in names]


def test_minecraft_spaces():
    spec = probe_spec("minecraft/diamond")
    assert spec.num_actions == 25 and spec.observations["image"].shape == (3, 64, 64)
    assert spec.observations["inventory"].shape == spec.observations["inventory_max"].shape == (14,)
    assert spec.observations["equipped"].shape == (16,)  # the items, with `other`
    assert [probe_spec(f"minecraft/{task}").num_actions for task in ("wood", "climb")] == [12, 12]
    assert probe_spec("minecraft/diamond", size=[32, 48]).observations["image"].shape == (3, 32, 48)


def test_diamond_chain_gives_every_milestone_once():
    env = game()
    rewards = []
    rewards += do(env, *["attack"] * 7, *["craft_planks"] * 6)
    assert rewards == [1, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    chain = [
        ("craft_stick", 1),
        ("craft_stick", 0),
        ("craft_crafting_table", 1),
        ("craft_wooden_pickaxe", 0),  # no table yet
        ("place_crafting_table", 0),
        ("craft_wooden_pickaxe", 1),
        ("equip_wooden_pickaxe", 0),
        *[("attack", int(number == 0)) for number in range(11)],  # cobblestone
        ("craft_stone_pickaxe", 1),
        ("craft_furnace", 1),
        ("equip_stone_pickaxe", 0),
        ("attack", 1),  # iron ore
        ("attack", 0),
        ("attack", 0),
        ("smelt_iron_ingot", 0),
        ("place_furnace", 0),
        ("smelt_iron_ingot", 1),
        ("smelt_iron_ingot", 0),
        ("smelt_iron_ingot", 0),
        ("craft_iron_pickaxe", 1),
        ("equip_iron_pickaxe", 0),
        ("attack", 1),  # a diamond
        ("attack", 0),
    ]
    assert do(env, *[name for name, _ in chain]) == [reward for _, reward in chain]
    obs = env.step(0)[0]
    items = env.unwrapped.items
    assert obs["inventory"][items.index("diamond")] == 2 and obs["inventory"][items.index("furnace")] == 0
    assert obs["inventory_max"][items.index("furnace")] == 1
    assert obs["equipped"].argmax() == env.unwrapped.equipment.index("iron_pickaxe")


def test_achievements_are_logged_once_an_episode():
    with make_env("minecraft/diamond", 1, workers=0, time_limit=6) as env:
        env.reset(seed=1)
        for action in (1, 1, 12, 0, 0, 0):  # attack, attack, craft planks
            infos = env.step(np.array([action]))[4]
        log = infos["log"][0]
        assert log["log/achievement_log"] == log["log/achievement_planks"] == 1
        assert log["log/achievement_diamond"] == 0 and len([key for key in log if "achievement" in key]) == 12


def test_wood_climb_and_health_rewards():
    assert do(game("wood"), "attack", "attack", "noop") == [1, 1, 0]
    env = game("climb")
    assert do(env, "jump", "noop", "turn_left") == [1, 1, 1]  # a jump continues
    env = game()
    env.unwrapped._game.life = 15.0
    assert do(env, "noop") == pytest.approx([-0.01 * 5 / 20])


def test_pitch_is_limited_and_actions_are_complete():
    env = game()
    do(env, *["turn_up"] * 6, "turn_right", "turn_down")
    commands = env.unwrapped._game.commands
    assert [float(command["camera"][0]) for command in commands] == [-15] * 4 + [0, 0, 0, 15]
    assert commands[6]["camera"].tolist() == [0, 15]
    assert commands[0]["place"] == "none" and len(commands[0]) == 13


@pytest.mark.parametrize(("speed", "attacks"), [(1.0, 30), (100.0, 1)])
def test_attacks_continue_at_the_games_own_speed(speed, attacks):
    env = game(break_speed=speed)
    assert env.unwrapped._game.task.agent_start[0].multiplier == speed
    do(env, "attack", *["jump"] * 35)
    commands = env.unwrapped._game.commands
    assert [command["attack"] for command in commands] == [1] * attacks + [0] * (36 - attacks)
    assert [command["jump"] for command in commands[1:3]] == ([0, 0] if speed == 1 else [1, 1])[
        :2
    ] or speed == 1


def test_action_repeat_keeps_only_movement():
    env = env_factory("minecraft/diamond", action_repeat=3)()
    env.reset(seed=0)
    do(env, "turn_left", "jump")
    commands = env.unwrapped._game.commands
    assert [command["camera"][1] for command in commands] == [-15, 0, 0, 0, 0, 0]
    assert [command["jump"] for command in commands] == [0, 0, 0, 1, 0, 0]
    assert [command["forward"] for command in commands] == [0, 0, 0, 1, 1, 1]


def test_death_and_lost_connection():
    env = game()
    env.unwrapped._game.die_at = 2
    env.step(0)
    obs, reward, terminated, truncated, _ = env.step(0)
    assert terminated and not truncated and obs["health"] == 0 and reward == pytest.approx(-0.01)
    obs, _ = env.reset(seed=4)
    inner = env.unwrapped._game
    inner.die_at, inner.fail_at = None, 1
    after, reward, terminated, truncated, info = env.step(1)
    assert (reward, terminated, truncated) == (0, False, True) and info["log/connection_lost"] == 1
    np.testing.assert_array_equal(after["image"], obs["image"])  # not the random observation


def test_minecraft_settings():
    with pytest.raises(ConfigError, match=r"environment\.break_speed=0 must be"):
        probe_spec("minecraft/diamond", break_speed=0)


def test_minecraft_that_does_not_start(monkeypatch):
    from minerl.herobraine import env_spec

    def fails(self, fake=False):
        raise FileNotFoundError("java")

    monkeypatch.setattr(env_spec.EnvSpec, "make", fails)
    with pytest.raises(
        LabError, match=r"minecraft does not start: FileNotFoundError: java\. scripts/setup/mine"
    ):
        probe_spec("minecraft/diamond", size=48)


# --- DeepMind Lab ----------------------------------------------------------------------------------------


def level(task="explore_goal_locations_small", **options):
    env = env_factory(f"dmlab/{task}", **options)()
    env.reset(seed=3)
    return env


@pytest.mark.parametrize(("actions", "count"), [("popart", 15), ("impala", 9)])
def test_lab_actions(actions, count):
    env = level(actions=actions)
    assert env.action_space.n == count
    turns = []
    for action in range(count):
        env.reset(seed=action)
        env.step(action)
        turns.append(env.unwrapped._lab.actions[-1])
    assert all(frames == 4 and sent[5:] == [0, 0] for sent, frames in turns)
    assert turns[0][0] == [0, 0, 0, 1, 0, 0, 0] and turns[-1][0] == [0, 0, 0, 0, 1, 0, 0]
    assert len({tuple(sent) for sent, _ in turns}) == count


def test_lab_episode():
    env = level()
    obs, rewards = None, []
    for step in range(10):  # 40 frames
        last = obs
        obs, reward, terminated, truncated, _ = env.step(0)
        rewards.append(reward)
        assert terminated == (step == 9) and not truncated
    assert rewards == [4.0] * 10
    np.testing.assert_array_equal(obs["image"], last["image"])  # Lab has no observation after the end
    env = level(time_limit=3)
    assert [env.step(0)[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_lab_config():
    lab = level("rooms_collect_good_objects_test").unwrapped._lab
    assert lab.level == "contributed/dmlab30/rooms_collect_good_objects_train"
    assert lab.config == {"height": "64", "width": "64", "logLevel": "WARN"}
    lab = level("rooms_collect_good_objects_test", evaluation=True, size=[32, 48]).unwrapped._lab
    assert lab.level.endswith("_test") and lab.config["allowHoldOutLevels"] == "true"
    assert (lab.config["height"], lab.config["width"]) == ("32", "48")
    assert lab.config["mixerSeed"] == str(0x600D5EED)


def test_lab_instruction():
    env = level("language_execute_random_task")
    obs, _ = env.reset(seed=1)
    words = obs["instruction"].reshape(32, 32)
    assert len(np.unique(words, axis=0)) == 6  # pick the red balloon . and the padding
    assert (words[5:] == words[5]).all() and not (words[0] == words[1]).all()
    np.testing.assert_array_equal(env.unwrapped._embed("PICK THE RED BALLOON."), obs["instruction"])


def test_lab_level_cache(tmp_path):
    cache = dmlab.LevelCache(str(tmp_path / "cache"))
    (tmp_path / "level").write_bytes(b"map")
    assert not cache.fetch("key/with/slashes", str(tmp_path / "found"))
    cache.write("key/with/slashes", str(tmp_path / "level"))
    assert cache.fetch("key/with/slashes", str(tmp_path / "found"))
    assert (tmp_path / "found").read_bytes() == b"map"
    assert len(list((tmp_path / "cache").rglob("*.pk3"))) == 1
    env = level(level_cache=str(tmp_path / "cache"))
    assert env.unwrapped._lab.cache.folder == tmp_path / "cache"


def test_lab_settings():
    with pytest.raises(ConfigError, match=r"environment\.actions='popar': Did you mean 'popart'"):
        probe_spec("dmlab/psychlab_visual_search", actions="popar")
    with pytest.raises(ConfigError, match=r"environment\.renderer='gpu'"):
        probe_spec("dmlab/psychlab_visual_search", renderer="gpu")
    assert len(dmlab.TASKS) == 32 and len(minecraft.MILESTONES) == 12
