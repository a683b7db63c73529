"""Why a clone of scripts/clone_dmc.sh falls short: its actions beside those of the data, and its returns if acting changes.

    python scripts/dev/clone_errors.py FOLDER docs/results/clone_dmc_errors.json --episodes 4

FOLDER is that of scripts/clone_dmc.sh. Measured without training, and written after each part:

    errors    on states of the data, by the part of the episode: the noise in the data's actions (their distance to
              behaviour cloning, which regresses to the mean), the distance of Diffusion Policy's plans and of the mean of
              16 of them to behaviour cloning, and how much the plans of one state differ
    noise     returns of behaviour cloning if normal noise is added to its actions
    horizon   returns of Diffusion Policy that executes 1, 2, … actions of a plan
    mean      returns if it executes the mean of 16 plans
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rl_lab
from rl_lab.buffers.formats.dataset import open_dataset
from rl_lab.config.compose import to_plain
from rl_lab.environments.make import make_configured_env
from rl_lab.records import ActMode
from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.utils.files import write_json_atomic

PLANS = 16
PARTS = ("errors", "noise", "horizon", "mean")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("json", type=Path)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--cuts", type=int, nargs="+", default=[0, 42, 70, 250], help="parts of an episode")
    args = parser.parse_args()
    torch.set_num_threads(1)
    agent = rl_lab.load_agent(args.folder / "diffusion_policy", device="cpu")
    regression = rl_lab.load_agent(args.folder / "behaviour_cloning", device="cpu")
    result: dict[str, Any] = {
        "benchmark": "clone_errors",
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "command": f"python scripts/dev/clone_errors.py FOLDER FILE --episodes {args.episodes}",
        "rows": [],
    }

    def add(part: str, measure: Callable[[], dict[str, Any]]) -> None:
        if part not in args.parts:
            return
        began = time.process_time()
        row = {"part": part, **measure()}
        print(row, flush=True)
        result["rows"].append({**row, "cpu_seconds": round(time.process_time() - began, 1)})
        write_json_atomic(args.json, result)

    for first, last in zip(args.cuts, args.cuts[1:]):
        add("errors", lambda: errors(args.folder / "data", agent, regression, first, last))  # noqa: B023
    for noise in (0.0, 0.05, 0.1):
        add("noise", lambda: {"noise": noise, **returns(regression, args.episodes, noise)})  # noqa: B023
    workflow = agent.workflow
    settings = workflow.settings
    for horizon in range(1, settings.horizon - settings.observation_horizon + 2):
        workflow.settings = dataclasses.replace(settings, action_horizon=horizon)
        add("horizon", lambda: {"action_horizon": horizon, **returns(agent, args.episodes)})  # noqa: B023
    workflow.settings = settings
    plan = workflow._plan
    workflow._plan = lambda features, mode, needed: plans(plan, features, mode).mean(1)
    add("mean", lambda: {"plans": PLANS, **returns(agent, args.episodes)})


def plans(plan: Any, features: torch.Tensor, mode: ActMode) -> torch.Tensor:
    """Features (M, To, F) -> (M, plans, T, A) from as many drawn noises."""
    many: torch.Tensor = plan(features.repeat_interleave(PLANS, 0), mode, None)
    return many.unflatten(0, (-1, PLANS))


def errors(data: Path, agent: Any, regression: Any, first: int, last: int) -> dict[str, Any]:
    """Of the first executed action, over decisions first … last of every tenth episode."""
    with open_dataset(data) as stored:
        episodes = [stored.episode(index) for index in range(0, len(stored), 10)]
    names = list(agent.spec.observations)
    steps = np.linspace(first, last - 1, 20).astype(int)
    obs = {name: np.concatenate([each.observations[name][steps] for each in episodes]) for name in names}
    actions = np.concatenate([each.actions[steps] for each in episodes])
    regression.reset()
    mean = regression.act(obs, scaled=True)
    workflow = agent.workflow
    with torch.no_grad():
        past = workflow.settings.observation_horizon
        seen = {name: torch.as_tensor(value).repeat_interleave(past, 0) for name, value in obs.items()}
        mode = ActMode(sample=False, generator=torch.Generator().manual_seed(0))
        drawn = plans(workflow._plan, workflow._features(seen, slow=True), mode).flatten(0, 1)
        drawn = workflow.normalizer.inverse(drawn.float())[:, past - 1].clamp(-1, 1).unflatten(0, (-1, PLANS))
    sampled = drawn.numpy()  # (M, plans, A)

    def distance(value: np.ndarray) -> float:
        return round(float(np.sqrt(np.square(value - mean).mean())), 4)

    return {
        "decisions": [first, last],
        "states": len(actions),
        "std_of_regression": round(float(mean.std()), 4),
        "data_to_regression": distance(actions),
        "plan_to_regression": distance(sampled[:, 0]),
        "mean_of_plans_to_regression": distance(sampled.mean(1)),
        "std_of_plans_of_a_state": round(float(sampled.std(1).mean()), 4),
    }


def returns(agent: Any, episodes: int, noise: float = 0.0) -> dict[str, Any]:
    """Returns of as many episodes, the same starts for each call; noise: of added normal numbers"""
    random, total = np.random.default_rng(0), np.zeros(episodes)
    over = np.zeros(episodes, bool)
    agent.reset(0)
    config: dict[str, Any] = to_plain(agent.config.environment)
    with make_configured_env(config, num_envs=episodes, workers=0, seed=1000) as env:
        obs, _ = env.reset()
        while not over.all():
            action = agent.act(obs, env.is_first, scaled=True)
            action = np.clip(action + noise * random.standard_normal(action.shape), -1, 1)
            obs, reward, terminated, truncated, _ = env.step(action.astype(np.float32))
            total += np.where(over, 0.0, reward)
            over |= terminated | truncated
    found: Sequence[float] = [round(float(value), 1) for value in total]
    return {"return_mean": round(float(total.mean()), 1), "returns": found}


if __name__ == "__main__":
    main()
