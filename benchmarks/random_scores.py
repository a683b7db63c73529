"""Scores of a random agent in Atari and Crafter, compared with the published values.

Atari: Mnih et al. 2015, Extended Data Table 2, column "random play". The protocol of their Methods is used
for all games: 30 games of up to five minutes (18,000 frames), each started with up to 30 no-ops; a random
action every sixth frame (10 Hz), repeated in between; ALE's minimal action set (as in their wrapper,
google-deepmind/alewrap); an episode ends with the game, not with a life; no sticky actions. They give no
error for the random agent's mean, which is a mean of 30 games.

Crafter: danijar/crafter, scores/crafter_noreward-random.json: reward 1.377 ± 1.22 over 29,784 episodes of
five seeds (Hafner 2021, table 1, has 2.1 ± 1.3, which the file does not give); score 1.6 % (table 1).
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from rl_lab.environments import make_env
from rl_lab.environments.suites.crafter import crafter_score
from rl_lab.errors import LabError

PUBLISHED = {"pong": -20.7, "breakout": 1.7, "boxing": 0.1}
ATARI = {"action_repeat": 6, "time_limit": 3000}  # frames per decision; decisions per game: 18,000 frames
CRAFTER = {"reward": 1.377, "score": 1.6}
NUM_ENVS = 6


def run(argv: list[str]) -> list[dict[str, Any]]:
    """Return one row per task: mean, standard error, published value, and difference in standard errors."""
    parser = argparse.ArgumentParser(prog="rl-lab bench random_scores", description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=[*PUBLISHED, "crafter"])
    parser.add_argument("--episodes", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    rows = []
    for task in options.tasks:
        try:
            rows += measure(task, options.episodes, options.seed)
        except LabError as error:
            print(f"{task}: not measured: {str(error).splitlines()[0]}")
    return rows


def measure(task: str, episodes: int, seed: int) -> list[dict[str, Any]]:
    """Return the rows of one task."""
    if task != "crafter":
        returns, _ = random_episodes(f"atari100k/{task}", episodes, seed, **ATARI)
        return [row(task, returns, PUBLISHED[task])]
    returns, logs = random_episodes("crafter/reward", episodes, seed)
    score = crafter_score({name: float(np.mean([log[name] for log in logs])) for name in logs[0]})
    return [
        row("crafter_reward", returns, CRAFTER["reward"]),
        {
            "name": "random_scores/crafter_score",
            "value": score,
            "unit": "%",
            "published": CRAFTER["score"],
            "episodes": episodes,
        },
    ]


def row(name: str, returns: np.ndarray, published: float) -> dict[str, Any]:
    error = float(returns.std(ddof=1) / np.sqrt(len(returns)))
    return {
        "name": f"random_scores/{name}",
        "value": float(returns.mean()),
        "unit": "points",
        "standard_error": error,
        "published": published,
        "distance_in_standard_errors": abs(float(returns.mean()) - published) / error,
        "within_two": abs(float(returns.mean()) - published) <= 2 * error,
        "episodes": len(returns),
        "returns": [round(float(value), 4) for value in returns],
    }


def random_episodes(
    task: str, episodes: int, seed: int, workers: int = 2, **options: Any
) -> tuple[np.ndarray, list[dict[str, float]]]:
    """Return (returns, logs). Environments run equally many games, or short games would count too often."""
    quota = -(-episodes // NUM_ENVS)
    random = np.random.default_rng(seed)
    with make_env(task, NUM_ENVS, workers=workers, seed=seed, **options) as env:
        env.reset()
        total = np.zeros(NUM_ENVS)
        found: list[list[tuple[float, dict[str, float]]]] = [[] for _ in range(NUM_ENVS)]
        while min(map(len, found)) < quota:
            _, reward, _, _, infos = env.step(random.integers(env.spec.num_actions, size=NUM_ENVS))
            total += reward
            for index in np.flatnonzero(env.last_dones):
                found[index].append((total[index], infos.get("log", {}).get(index, {})))
                total[index] = 0.0
    games = [games[number] for number in range(quota) for games in found][:episodes]
    return np.array([score for score, _ in games]), [log for _, log in games]
