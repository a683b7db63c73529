"""Atari compared with a slow reference implementation of the published descriptions, and the presets."""

import numpy as np
import pytest

pytest.importorskip("ale_py", reason="extra: atari")

from rl_lab.environments import make_env, probe_spec
from rl_lab.environments.suites.atari import AtariEnv
from rl_lab.errors import ConfigError
from rl_lab.records import ArraySpec

DECISIONS = 250  # of 4 frames each: 1,000 frames


def bilinear(image, height, width):
    """Pillow's bilinear filter in plain loops: triangle as wide as the scale, 22-bit weights, two passes."""

    def one_axis(planes, length):  # (before, …) -> (length, …)
        scale = planes.shape[0] / length
        support = max(scale, 1.0)
        result = np.zeros((length, *planes.shape[1:]), np.uint8)
        for out in range(length):
            center = (out + 0.5) * scale
            first = max(int(center - support + 0.5), 0)
            last = min(int(center + support + 0.5), planes.shape[0])
            weights = [max(0.0, 1.0 - abs((row - center + 0.5) / support)) for row in range(first, last)]
            total = sum(weights)
            whole = [int(np.floor(weight / total * (1 << 22) + 0.5)) for weight in weights]
            value = np.full(planes.shape[1:], 1 << 21, np.int64)
            for row, weight in zip(range(first, last), whole, strict=True):
                value += planes[row].astype(np.int64) * weight
            result[out] = np.clip(value >> 22, 0, 255)
        return result

    across = one_axis(image.transpose(1, 0, 2), width).transpose(1, 0, 2)
    return one_axis(across, height)


class Reference:
    """Records every screen of a game, then computes observations from the record."""

    def __init__(self, game, rng, noops):
        import ale_py

        self.ale = ale_py.ALEInterface()
        self.ale.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(ale_py.roms.get_rom_path(game))
        self.ale.reset_game()
        for _ in range(rng.integers(noops[0], noops[1] + 1)):
            self.ale.act(0)
        self.pair = [self.ale.getScreenRGB()] * 2

    def decide(self, action):
        reward = 0
        screens = []
        for _ in range(4):
            reward += self.ale.act(action)
            screens.append(self.ale.getScreenRGB())
            if self.ale.game_over():
                break
        for screen in screens[2:]:
            self.pair = [self.pair[1], screen]
        return reward

    def observe(self, size, resize_first, gray):
        if resize_first:
            image = np.max([bilinear(screen, size, size) for screen in self.pair], axis=0)
        else:
            image = bilinear(np.max(self.pair, axis=0), size, size)
        if gray:
            image = (image * np.array([0.299, 0.587, 0.114])).sum(-1, keepdims=True).astype(np.uint8)
        return image.transpose(2, 0, 1)


@pytest.mark.parametrize(
    ("task", "options", "look", "decisions"),
    [
        ("atari100k/pong", {}, (64, False, False), DECISIONS),
        ("atari100k/breakout", {"variant": "iris", "life_loss": "off"}, (64, True, False), DECISIONS),
        ("atari/breakout", {"sticky": 0.0}, (96, False, True), 40),
    ],
)
def test_frames_equal_reference(task, options, look, decisions):
    game = task.partition("/")[2]
    with make_env(task, 1, workers=0, **options) as env:
        single = env.pool.workers[0]._runner.slots[0].env.unwrapped
        obs, _ = env.reset(seed=4)
        actions = np.random.default_rng(1)
        for step in range(decisions):
            if env.is_first[0]:
                reference = Reference(game, np.random.default_rng(single.np_random_seed), single.noops)
            np.testing.assert_array_equal(obs["image"][0], reference.observe(*look), f"decision {step}")
            action = int(actions.integers(env.spec.num_actions))
            obs, reward, terminated, _, _ = env.step(np.array([action]))
            assert reward[0] == (0 if env.is_first[0] else reference.decide(single._actions[action]))
            assert terminated[0] == (reference.ale.game_over() and not env.is_first[0])


@pytest.mark.parametrize(
    ("task", "options", "shape", "actions"),
    [
        ("atari/pong", {}, (1, 96, 96), 18),
        ("atari/Pong", {"gray": False, "full_actions": False, "size": 84}, (3, 84, 84), 6),
        ("atari100k/pong", {}, (3, 64, 64), 6),
        ("atari100k/SpaceInvaders", {"variant": "iris"}, (3, 64, 64), 6),
    ],
)
def test_presets_and_names(task, options, shape, actions):
    spec = probe_spec(task, **options)
    assert spec.observations == {"image": ArraySpec(shape, "uint8")}
    assert spec.num_actions == actions and spec.action_repeat == 4


def lengths(env, episodes, action=1):
    """(decisions, game's lives at the end, terminated) of some episodes."""
    found = []
    env.reset(seed=1)
    for episode in range(episodes):
        decisions, terminated, truncated = 0, False, False
        while not (terminated or truncated):
            _, _, terminated, truncated, _ = env.step(action)
            decisions += 1
        found.append((decisions, env.ale.lives(), terminated))
        env.reset(seed=episode + 2)
    return found


def test_life_loss_ends_episode_and_continues_game():
    whole = lengths(AtariEnv("breakout", noops=(0, 0)), 1)
    lives = lengths(AtariEnv("breakout", noops=(0, 0), life_loss="end", life_loss_within=False), 6)
    assert [left for _, left, _ in lives] == [
        4,
        3,
        2,
        1,
        0,
        4,
    ]  # the fifth ends the game, the sixth starts another one
    assert whole[0][1] == 0 and all(terminated for *_, terminated in lives)
    restart = lengths(AtariEnv("breakout", noops=(0, 0), life_loss="restart"), 3)
    assert [left for _, left, _ in restart] == [4, 4, 4]
    env = AtariEnv("breakout", life_loss="end")
    lengths(env, 1)
    assert env.ale.lives() == 4
    env.reset(options={"restart": True})
    assert env.ale.lives() == 5


def test_limits_and_noops_of_variants():
    for options, frames, counted in (
        ({}, 108_000, False),
        ({"variant": "iris"}, 20_000, True),
        ({"variant": "iris", "evaluation": True}, 108_000, True),
        ({"time_limit": 12}, 48, False),
    ):
        with make_env("atari100k/pong", 1, workers=0, **options) as env:
            single = env.pool.workers[0]._runner.slots[0].env.unwrapped
            assert (single.max_frames, single.count_noops) == (frames, counted)
            env.reset()
            assert single._elapsed == (single.ale.getEpisodeFrameNumber() if counted else 0)
            if options.get("time_limit"):
                ends = [env.step(np.zeros(1, np.int64))[2:4] for _ in range(12)]
                assert not any(end[1][0] for end in ends[:-1]) and ends[-1][1][0] and not ends[-1][0][0]


def test_noops_depend_on_episode_seed():
    env = AtariEnv("pong", noops=(0, 30))
    starts = [(env.reset(seed=seed), env.ale.getEpisodeFrameNumber())[1] for seed in [*range(40), *range(40)]]
    assert starts[:40] == starts[40:] and min(starts) < 5 and 25 < max(starts) <= 30


def test_sticky_actions_repeat_previous_action():
    env = AtariEnv("pong", sticky=0.25, noops=(0, 0))
    env.reset(seed=0)
    sent = []
    original = env.ale

    class Recorder:
        def __getattr__(self, name):
            return getattr(original, name)

        def act(self, action):
            sent.append(getattr(action, "value", action))
            return original.act(action)

    env.ale = Recorder()
    for step in range(400):
        env.step(step % 2)  # every decision changes the action, so its first frame shows whether it stuck
    frames = np.array(sent).reshape(400, 4)
    chosen = np.array([env._actions[step % 2].value for step in range(400)])
    late = [(frames[step] != chosen[step]).mean() for step in range(400)]
    assert 0.2 < np.mean(frames[:, 0] != chosen) < 0.3
    assert 0.25 / 4 < np.mean(late) < 0.12  # .25 + .25² + … of the four frames
    assert set(frames[:, 3] == chosen) == {True, False} or np.mean(frames[:, 3] == chosen) > 0.98


def test_same_seed_same_game():
    for game in (
        "assault",
        "tennis",
        "solaris",
    ):  # their start depends on earlier games after `reset_game` alone
        fresh, used = AtariEnv(game, sticky=0.25), AtariEnv(game, sticky=0.25)
        used.reset(seed=9)
        for step in range(60):
            used.step(step % used.action_space.n)
        left, right = fresh.reset(seed=3)[0], used.reset(seed=3)[0]
        for step in range(40):
            np.testing.assert_array_equal(left, right)
            left, right = (env.step(step % env.action_space.n)[0] for env in (fresh, used))


def test_unknown_games_and_settings():
    with pytest.raises(ConfigError, match=r"no Atari game 'pongg'. Did you mean 'pong'"):
        make_env("atari/pongg")
    with pytest.raises(ConfigError, match="variant='irs': Did you mean 'iris'"):
        make_env("atari100k/pong", variant="irs")
    with pytest.raises(ConfigError, match="life_loss='yes'"):
        make_env("atari/pong", life_loss="yes")
