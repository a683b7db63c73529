"""A random agent scores what was published for one, so presets, rewards and ends of games are right.

Protocol: 30 whole games, actions drawn evenly from the game's own (Atari 100k, DreamerV3's variant: up to 30 no-ops,
no sticky actions, 4 frames a decision). The mean must lie within two standard errors of the published one.

    Pong −20.7, Breakout 1.7, Boxing 0.1    Wang et al. 2016, table 2 (also table 1 of Kaiser et al. 2020)
    Crafter 2.1 (deviation 1.3)             Hafner 2021, table 1
"""

import numpy as np
import pytest

from rl_lab.environments import make_env

EPISODES = 30


def random_returns(task, seed, **options):
    """Returns of 30 games. Each environment plays the same number, or short games would count too often."""
    num_envs = 6
    rng = np.random.default_rng(seed)
    with make_env(task, num_envs, workers=2, seed=seed, **options) as env:
        env.reset()
        total, found = np.zeros(num_envs), [[] for _ in range(num_envs)]
        while min(map(len, found)) < EPISODES // num_envs:
            _, reward, *_ = env.step(rng.integers(env.spec.num_actions, size=num_envs))
            total += reward
            for index in np.flatnonzero(env.last_dones):
                found[index].append(total[index])
                total[index] = 0.0
    return np.concatenate([returns[: EPISODES // num_envs] for returns in found])


@pytest.mark.learning
@pytest.mark.parametrize(
    ("task", "package", "published", "published_error"),
    [
        ("atari100k/pong", "ale_py", -20.7, 0.0),
        ("atari100k/breakout", "ale_py", 1.7, 0.0),
        ("atari100k/boxing", "ale_py", 0.1, 0.0),
        ("crafter/reward", "crafter", 2.1, 0.0),
    ],
)
def test_random_agent_scores_as_published(task, package, published, published_error):
    pytest.importorskip(package)
    returns = random_returns(task, seed=0)
    error = returns.std(ddof=1) / np.sqrt(len(returns))
    print(f"{task}: {returns.mean():.2f} ± {error:.2f} over {len(returns)} games, published {published}")
    assert len(returns) == EPISODES
    assert abs(returns.mean() - published) <= 2 * np.hypot(error, published_error)
