"""How long a dream follows the actions: rewards after constant actions, in the environment and in the dream.

    python scripts/dev/dream_actions.py RUN --json docs/results/NAME.json

Episodes begin with random actions. Then all actions are the lowest, or, from the same states, the highest. For 1, 2, 3, 6
and 9 decisions the table has the correlation over episodes of the environment's and the dream's sums of rewards (level),
and that of the difference between highest and lowest (effect), with the standard deviations of both differences.
Works for runs with continuous actions whose workflow dreams; `--checkpoint` as for `rl-lab eval`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.agent import load_agent
from rl_lab.environments import make_env
from rl_lab.environments.make import env_config_options
from rl_lab.records import Batch
from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.utils.files import write_json_atomic

SEEN, DREAMED, SAMPLES = 4, 9, 6  # rows before the dream, decisions in it, dreams that are averaged
LENGTHS = (1, 2, 3, 6, 9)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--checkpoint", default="last")
    parser.add_argument("--episodes", type=int, default=48)
    parser.add_argument("--note", default="", help="such as the command that trained RUN")
    options = parser.parse_args()
    agent = load_agent(options.run, checkpoint=options.checkpoint)
    rows = compare(agent, options.episodes)
    for row in rows:
        print("  ".join(f"{name} {value:.3g}" for name, value in row.items()))
    result = {
        "commit": commit(),
        "machine": describe_machine(),
        "command": f"scripts/dev/dream_actions.py {options.run.name}",
        "note": options.note,
        "episodes": options.episodes,
        "seen": SEEN,
        "samples": SAMPLES,
        "rows": rows,
    }
    write_json_atomic(options.json, result)


def compare(agent: Any, episodes: int) -> list[dict[str, float]]:
    real, dream = {}, {}
    generator = torch.Generator(agent.device).manual_seed(0)
    for sign in (-1, 1):
        batch, real[sign], action = play(agent, episodes, sign)
        dream[sign] = np.mean([dreamed(agent, batch, action, generator) for _ in range(SAMPLES)], 0)
    rows = []
    for length in LENGTHS:
        ours, theirs = ({sign: value[sign][:, :length].sum(1) for sign in value} for value in (dream, real))
        effects = ours[1] - ours[-1], theirs[1] - theirs[-1]
        rows.append(
            {
                "decisions": length,
                "level": correlation(ours[1], theirs[1]),
                "effect": correlation(*effects),
                "effect_std_dream": float(effects[0].std()),
                "effect_std_environment": float(effects[1].std()),
            }
        )
    return rows


def play(agent: Any, episodes: int, sign: int) -> tuple[Batch, np.ndarray, torch.Tensor]:
    """The rows before the dream; rewards after the constant actions, (episodes, DREAMED); that action."""
    options = env_config_options(agent.config.environment, evaluation=True)
    rng = np.random.default_rng(0)
    rows: dict[str, list[torch.Tensor]] = {}
    rewards = []
    with make_env(**{**options, "num_envs": episodes, "workers": 0}, seed=5) as env:
        low, high = env.action_space.low, env.action_space.high
        constant = (high if sign > 0 else low).astype(np.float32)
        obs, _ = env.reset()
        reward = np.zeros(episodes, np.float32)
        for step in range(SEEN + DREAMED):
            action = rng.uniform(low, high).astype(np.float32) if step < SEEN else constant
            if step < SEEN:
                row = {f"obs/{key}": torch.as_tensor(value).clone() for key, value in obs.items()}
                row |= {"action": torch.as_tensor(action), "reward": torch.as_tensor(reward.copy())}
                row |= {"is_first": torch.full((episodes,), step == 0)}
                row |= {"terminated": torch.zeros(episodes, dtype=torch.bool)}
                for key, value in row.items():
                    rows.setdefault(key, []).append(value.to(agent.device))
            obs, reward, *_ = env.step(action)
            if step >= SEEN:
                rewards.append(reward.copy())
    batch = Batch({key: torch.stack(values, 1) for key, values in rows.items()})
    return batch, np.stack(rewards, 1), torch.as_tensor(constant, device=agent.device)


def dreamed(agent: Any, batch: Batch, action: torch.Tensor, generator: torch.Generator) -> np.ndarray:
    """Dreamed rewards after the constant actions, (episodes, DREAMED); the first dreamed step is the last row's action."""
    workflow = agent.workflow
    state = workflow.dream_start(batch, generator=generator)
    state, _ = workflow.dream_step(state, batch.action[:, -1], generator=generator)
    rewards = []
    for _ in range(DREAMED):
        state, step = workflow.dream_step(state, action, generator=generator)
        rewards.append(step.reward.float().cpu().numpy())
    return np.stack(rewards, 1)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


if __name__ == "__main__":
    main()
