import numpy as np
import pytest

pytest.importorskip("crafter", reason="extra: crafter")

from rl_lab.environments import make_env, probe_spec
from rl_lab.environments.suites.crafter import ACHIEVEMENT, CrafterEnv, crafter_score
from rl_lab.errors import ConfigError

SMALL = {"area": 16}  # generating a full world takes a second


def test_achievements_are_logged_once_per_episode():
    with make_env("crafter/reward", 2, workers=0, time_limit=150, **SMALL) as env:
        env.reset(seed=1)
        rng = np.random.default_rng(0)
        episodes, total = [], np.zeros(2)
        while len(episodes) < 3:
            _, reward, _, _, infos = env.step(rng.integers(1, 17, 2))
            total += reward
            for index, log in infos.get("log", {}).items():
                episodes.append((log, total[index]))
                total[index] = 0.0
        for log, score in episodes:
            assert len(log) == 22 and all(name.startswith(ACHIEVEMENT) for name in log)
            assert set(log.values()) <= {0.0, 1.0}
            # Besides achievements there is only health: 9 points of 0.1, some of which come back.
            assert -0.95 <= score - sum(log.values()) <= 0.65
        assert sum(sum(log.values()) for log, _ in episodes) > 0


def test_noreward_task():
    paid, unpaid = (CrafterEnv(reward=pay, size=(64, 64), area=16) for pay in (True, False))
    for env in (paid, unpaid):
        env.reset(seed=3)
    rng = np.random.default_rng(1)
    rewards = []
    for _ in range(60):
        action = int(rng.integers(17))
        left, right = paid.step(action), unpaid.step(action)
        np.testing.assert_array_equal(left[0], right[0])
        rewards.append((left[1], right[1]))
        assert left[2:4] == right[2:4] and left[4] == right[4]
        if left[2]:
            break
    assert any(reward for reward, _ in rewards) and not any(reward for _, reward in rewards)


def test_render_does_not_change_game():
    seen, unseen = (CrafterEnv(reward=True, size=(48, 48), area=16) for _ in range(2))
    for env in (seen, unseen):
        env.reset(seed=2)
        env._env._step = 260  # night: its noise uses the generator of the game
    for step in range(20):
        frame = seen.render()
        assert frame.shape == (576, 576, 3)
        left, right = seen.step(step % 5), unseen.step(step % 5)
        np.testing.assert_array_equal(left[0], right[0])


def test_seed_determines_creatures():
    """Crafter uses sets, whose order depends on memory addresses; without a fixed order games diverge in 20 steps."""
    games = []
    for _ in range(2):
        env = CrafterEnv(reward=True, size=(64, 64), area=24)
        env.reset(seed=2)
        places = []
        for _ in range(40):
            env.step(0)
            env._env._player.health = 9
            places.append([(type(thing).__name__, *map(int, thing.pos)) for thing in env._env._world.objects])
        games.append(places)
    assert games[0] == games[1]


def test_score_formula():
    assert crafter_score({"a": 1.0, "b": 1.0}) == pytest.approx(100.0)
    assert crafter_score({"a": 0.0, "b": 0.0}) == 0.0
    # exp((ln 2 + ln 51) / 2) - 1
    assert crafter_score({"log/achievement_a": 0.01, "log/achievement_b": 0.5, "log/x": 7}) == pytest.approx(
        np.sqrt(2 * 51) - 1
    )
    with pytest.raises(ConfigError):
        crafter_score({"log/other": 1.0})


def test_names_and_sizes():
    spec = probe_spec("crafter/noreward", size=(32, 48), **SMALL)
    assert spec.observations["image"].shape == (3, 32, 48) and spec.num_actions == 17
    with pytest.raises(ConfigError, match=r"no task 'crafter/rewards'. Did you mean 'reward'"):
        make_env("crafter/rewards")
