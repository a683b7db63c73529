"""What the world model of Dreamer runs on CartPole-v1 sees: python scripts/dev/cartpole_model.py RUN… --json FILE

For each run: the last ten evaluations of training; and over 16 new episodes of its last weights, by position of the cart,
what the model reconstructs, the probability that the episode goes on, and the value; the error of each element relative
to its spread; where episodes end; and the returns when the agent acts on the likeliest latents instead of sampled ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import rl_lab
from rl_lab.buffers.offline import OfflineBuffer
from rl_lab.records import ActMode, BatchSpec
from rl_lab.tools.doctor import commit, describe_machine
from rl_lab.tools.report.curves import Metrics
from rl_lab.utils.files import write_json_atomic

EPISODES, STEPS = 16, 500
EDGES = (-9.0, -2.4, -2.2, -1.8, -1.0, 1.0, 1.8, 2.2, 2.4, 9.0)  # the episode ends beyond ±2.4
TRAINING = "rl-lab train [+experiment=dreamer_cartpole_steady] experiment.seed=S training.evaluate.every_env_steps=500"
NAMES = ("position", "velocity", "angle", "angular velocity")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [describe(run) for run in args.runs]
    for row in rows:
        print(json.dumps(row, indent=1))
    if args.json:
        content = {
            "command": "python scripts/dev/cartpole_model.py RUN… --json FILE",
            "commit": commit() or None,
            "machine": describe_machine(),
            "training": TRAINING,
            "episodes": EPISODES,
            "rows": rows,
        }
        write_json_atomic(args.json, content)


def describe(run: Path) -> dict[str, Any]:
    metrics = Metrics.read(run / "metrics.jsonl")
    evaluations = [round(float(value), 1) for value in metrics.curve("eval/return_mean").y]
    sampled, likeliest = play(run, likeliest=False), play(run, likeliest=True)
    return {
        "run": run.name,
        "evaluations": evaluations,
        "last_ten": round(float(np.mean(evaluations[-10:])), 1),
        "kl": metrics.last("train/kl"),
        "prior_entropy": metrics.last("train/prior_entropy"),
        "posterior_entropy": metrics.last("train/posterior_entropy"),
        **sampled,
        "in_replay": replay(run),
        "return_mean_likeliest_latents": likeliest["return_mean"],
    }


@torch.no_grad()
def replay(run: Path) -> list[dict[str, Any]]:
    """The same by position, over 20,000 rows of the run's replay, inferred as in training."""
    agent = rl_lab.load_agent(run)
    workflow, spec = agent.workflow, agent.spec
    columns = {**spec.row_columns(), **workflow.policy_columns()}
    buffer = OfflineBuffer(columns, path=run.resolve(), spec=spec, device=agent.device, storage="host")
    generator = torch.Generator().manual_seed(0)
    context = workflow.settings.replay_context
    request = BatchSpec(32, 16, context=context, sampler="uniform")
    seen: dict[str, list[np.ndarray]] = {"truth": [], "model": [], "continue": [], "value": [], "ended": []}
    for _ in range(40):
        batch = buffer.sample(request, generator=generator)
        noise = torch.rand(32, 16, workflow.rssm.stoch, generator=generator)
        states, _ = workflow.infer(batch, noise)
        feature = workflow.rssm.feature(states)
        decoded = workflow.decoder.observations(workflow.decoder(states, feature))["vector"]
        alive = workflow.continue_head.predict(feature) / workflow.settings.discount
        seen["truth"].append(batch.obs["vector"][:, context:].flatten(0, 1).numpy())
        seen["model"].append(decoded.flatten(0, 1).numpy())
        seen["continue"].append(alive.flatten().numpy())
        seen["value"].append(workflow.critic.value(feature).flatten().numpy())
        seen["ended"].append(batch.terminated[:, context:].flatten().numpy())
    return by_position({name: np.concatenate(parts) for name, parts in seen.items()})


@torch.no_grad()
def play(run: Path, *, likeliest: bool) -> dict[str, Any]:
    """Run episodes with sampled actions; `likeliest`: the latents of largest probability instead of samples."""
    agent = rl_lab.load_agent(run)
    workflow = agent.workflow
    asked = {key: agent.config.environment[key] for key in ("action_repeat", "time_limit")}
    env = rl_lab.make_env("CartPole-v1", EPISODES, workers=0, seed=3, **asked)
    generator = torch.Generator().manual_seed(5)
    obs, _ = env.reset()
    state = workflow.initial_policy_state(EPISODES)
    returns, running, ends = (
        np.full(EPISODES, np.nan),
        np.zeros(EPISODES),
        {"position": 0, "angle": 0, "time": 0},
    )
    seen: dict[str, list[np.ndarray]] = {"truth": [], "model": [], "continue": [], "value": [], "ended": []}
    ended = np.zeros(EPISODES, bool)
    for _ in range(STEPS + 1):
        given = agent.normalizer(obs) if agent.normalizer is not None else obs
        tensors = {name: torch.as_tensor(value) for name, value in given.items()}
        noise = torch.rand(EPISODES, workflow.rssm.stoch, generator=generator)
        first = torch.as_tensor(env.is_first.copy())
        embed = workflow.encoder(tensors)
        latent, log_probs = workflow.rssm.observe(state, state["action"], embed, first, noise)
        if likeliest:
            hot = functional.one_hot(log_probs.argmax(-1), workflow.rssm.classes).float()
            latent = {**latent, "stoch": hot}
        feature = workflow.rssm.feature(latent)
        action = workflow.actor.act(feature, ActMode(sample=True, generator=generator))
        decoded = workflow.decoder.observations(workflow.decoder(latent, feature))["vector"]
        alive = workflow.continue_head.predict(feature) / workflow.settings.discount
        seen["truth"].append(given["vector"].copy())
        seen["model"].append(decoded.numpy())
        seen["continue"].append(alive.numpy())
        seen["value"].append(workflow.critic.value(feature).numpy())
        seen["ended"].append(ended.copy())
        state = {**latent, "action": action}
        obs, reward, terminated, truncated, _ = env.step(action.numpy())
        running += reward
        ended = np.array(terminated)
        for index in np.flatnonzero(terminated | truncated):
            if np.isnan(returns[index]):
                returns[index] = running[index]
                far = abs(float(obs["vector"][index][0])) > 2.4
                ends["time" if truncated[index] else "position" if far else "angle"] += 1
    env.close()
    joined = {name: np.concatenate(parts) for name, parts in seen.items()}
    error = np.sqrt(((joined["truth"] - joined["model"]) ** 2).mean(0)) / joined["truth"].std(0)
    return {
        "return_mean": round(float(returns.mean()), 1),
        "ends": ends,
        "error_over_spread": {name: round(float(value), 2) for name, value in zip(NAMES, error)},
        "by_position": by_position(joined),
    }


def by_position(seen: dict[str, np.ndarray]) -> list[dict[str, float | int | list[float]]]:
    """Means by position of the cart; in a run that normalizes observations positions are normalized, too."""
    position = seen["truth"][:, 0]
    rows: list[dict[str, float | int | list[float]]] = []
    for low, high in itertools.pairwise(EDGES):
        part = (position >= low) & (position < high)
        if part.any():
            rows.append(
                {
                    "position": [low, high],
                    "rows": int(part.sum()),
                    "ended": int(seen["ended"][part].sum()),
                    "reconstructed": round(float(seen["model"][part, 0].mean()), 2),
                    "continue": round(float(seen["continue"][part].mean()), 4),
                    "value": round(float(seen["value"][part].mean()), 1),
                }
            )
    return rows


if __name__ == "__main__":
    main()
