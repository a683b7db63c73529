"""A random agent scores what was published for one, so presets, rewards and ends of games are right.

Atari: Mnih et al. 2015 (Pong −20.7, Breakout 1.7, Boxing 0.1, used since as the zero of normalised scores). Their
protocol, as far as we know it: 30 games with up to 30 no-ops, a random action every sixth frame, at most five minutes a game; the rest is
Atari 100k, DreamerV3's variant (the game's own actions, not sticky). Their mean is one of 30 games, as ours is, so both
have an error: the two must agree within two standard errors of their difference.

Crafter: Hafner 2021, table 1: reward 2.1, deviation 1.3; score 1.6 %.
"""

import numpy as np
import pytest

from rl_lab.environments import make_env
from rl_lab.environments.crafter import crafter_score

EPISODES = 30


def random_episodes(task, seed, **options):
    """(returns, logs) of 30 games. Each environment plays as many, or short games would count too often."""
    num_envs = 6
    rng = np.random.default_rng(seed)
    with make_env(task, num_envs, workers=2, seed=seed, **options) as env:
        env.reset()
        total, found = np.zeros(num_envs), [[] for _ in range(num_envs)]
        while min(map(len, found)) < EPISODES // num_envs:
            _, reward, _, _, infos = env.step(rng.integers(env.spec.num_actions, size=num_envs))
            total += reward
            for index in np.flatnonzero(env.last_dones):
                found[index].append((total[index], infos.get("log", {}).get(index, {})))
                total[index] = 0.0
    games = [game for games in found for game in games[: EPISODES // num_envs]]
    assert len(games) == EPISODES
    return np.array([score for score, _ in games]), [log for _, log in games]


@pytest.mark.learning
@pytest.mark.parametrize(("game", "published"), [("pong", -20.7), ("breakout", 1.7), ("boxing", 0.1)])
def test_random_agent_scores_as_published(game, published):
    pytest.importorskip("ale_py", reason="extra: atari")
    returns, _ = random_episodes(f"atari100k/{game}", seed=0, action_repeat=6, time_limit=3000)
    error = returns.std(ddof=1) / np.sqrt(EPISODES)
    print(f"{game}: {returns.mean():.2f} ± {error:.2f}, published {published}")
    assert abs(returns.mean() - published) <= 2 * np.sqrt(2) * error


@pytest.mark.learning
def test_random_agent_in_crafter():
    pytest.importorskip("crafter", reason="extra: crafter")
    returns, logs = random_episodes("crafter/reward", seed=0)
    score = crafter_score({name: np.mean([log[name] for log in logs]) for name in logs[0]})
    print(
        f"crafter: {returns.mean():.2f} ± {returns.std(ddof=1) / np.sqrt(EPISODES):.2f}, score {score:.2f} %"
    )
    assert abs(returns.mean() - 2.1) < 1.3
    assert 0.8 < score < 2.6
