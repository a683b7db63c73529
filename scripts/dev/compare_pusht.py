"""Hold the suite `pusht` to gym-pusht, which needs a virtual environment of its own (pygame, OpenCV, pymunk < 7).

    python -m venv /tmp/gym_pusht && /tmp/gym_pusht/bin/pip install gym-pusht==0.1.8
    /tmp/gym_pusht/bin/python scripts/dev/compare_pusht.py record DEMOS.npz RECORD.npz
    .venv/bin/python scripts/dev/compare_pusht.py compare DEMOS.npz RECORD.npz docs/results/pusht_gym_pusht.json

DEMOS.npz has `state` (T, 5), `action` (T, 2) and `episode_ends` (E,) of the published demonstrations. `record` replays
them and 20 seeded episodes with random actions in gym-pusht; `compare` does the same here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

SEEDS, RANDOM_STEPS = range(20), 100
IMAGE_EPISODES = 20  # demonstrations whose images are compared, every 5th one
IMAGE_EVERY = 5


def episodes(demos: Any) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    start = 0
    for number, end in enumerate(demos["episode_ends"]):
        yield number, demos["state"][start:end].astype(float), demos["action"][start:end].astype(float)
        start = end


def random_actions(seed: int, agent: np.ndarray) -> np.ndarray:
    """Targets on a random walk, so that the agent meets the block and the walls."""
    steps = np.random.default_rng(seed).normal(0.0, 40.0, (RANDOM_STEPS, 2)).cumsum(0)
    return np.clip(agent + steps, 0.0, 512.0)


def play(env: Any, read: Any, image: Any, demos: Any, set_state: Any) -> dict[str, np.ndarray]:
    """Replay the demonstrations and the seeded episodes; returns states, coverage and images."""
    states, coverages, images, random_states, rewards = [], [], [], [], []
    for number, state, action in episodes(demos):
        set_state(env, state[0])
        for step in range(len(state)):
            states.append(read(env))
            if number < IMAGE_EPISODES and step % IMAGE_EVERY == 0:
                images.append(image(env))
            coverages.append(env.step(action[step])[4]["coverage"])
    for seed in SEEDS:
        env.reset(seed=seed)
        for action in random_actions(seed, read(env)[:2]):
            random_states.append(read(env))
            rewards.append(env.step(action)[1])
    return {
        "state": np.array(states),
        "coverage": np.array(coverages),
        "image": np.array(images),
        "random_state": np.array(random_states),
        "reward": np.array(rewards),
    }


def record(demos: Any, out: Path) -> None:
    from gym_pusht.envs.pusht import PushTEnv

    def set_state(env: Any, state: np.ndarray) -> None:
        # Not by `reset_to_state`, which moves the block: the angle first, then the position.
        env.reset(seed=0)
        env._setup()
        env.agent.position = list(state[:2])
        env.block.angle = float(state[4])
        env.block.position = list(state[2:4])
        env.space.step(env.dt)

    np.savez_compressed(out, **play(PushTEnv(), PushTEnv.get_obs, PushTEnv._render, demos, set_state))


def compare(demos: Any, recorded: Any, out: Path) -> None:
    from rl_lab.environments.suites.pusht import IMAGE_SIDE, PushT, shrink
    from rl_lab.tools.doctor import commit, describe_machine

    ours = play(
        PushT(render_mode="rgb_array"),
        PushT.state,
        lambda env: shrink(env.frame(), IMAGE_SIDE),
        demos,
        lambda env, state: env.reset(options={"state": state}),
    )
    pixels = np.abs(ours["image"].astype(int) - recorded["image"].astype(int))
    demonstrated = np.abs(ours["state"] - demos["state"])
    angle = demonstrated[:, 4]
    ends = np.cumsum([len(state) for _, state, _ in episodes(demos)])
    best = [float(part.max()) for part in np.split(ours["coverage"], ends[:-1])]
    rows = {
        "demonstrations": len(ends),
        "steps": len(demonstrated),
        "state_px_max_against_gym_pusht": float(np.abs(ours["state"] - recorded["state"])[:, :4].max()),
        "state_px_max_against_the_data": float(demonstrated[:, :4].max()),
        "angle_max_against_the_data": float(np.minimum(angle, 2 * np.pi - angle).max()),
        "coverage_max_difference": float(np.abs(ours["coverage"] - recorded["coverage"]).max()),
        "random_episodes_state_px_max": float(
            np.abs(ours["random_state"] - recorded["random_state"])[:, :4].max()
        ),
        "random_episodes_reward_max_difference": float(np.abs(ours["reward"] - recorded["reward"]).max()),
        "images": len(pixels),
        "image_values_that_differ": float((pixels > 0).mean()),
        "image_values_that_differ_by_more_than_8": float((pixels > 8).mean()),
        "image_max_difference": int(pixels.max()),
        "demonstrators_mean_max_coverage": float(np.mean(best)),
        "demonstrators_mean_max_reward": float(np.mean([min(b / 0.95, 1.0) for b in best])),
        "demonstrators_success": float(np.mean([b > 0.95 for b in best])),
    }
    content = {
        "command": "python scripts/dev/compare_pusht.py compare DEMOS.npz RECORD.npz FILE",
        "against": "gym-pusht 0.1.8, pymunk 6.11.1, pygame 2.6.1, opencv-python 4.14.0.94",
        "date": "2026-11-18",
        "commit": commit() or None,
        "machine": describe_machine(),
        "results": rows,
    }
    out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    verb, data, other, *rest = sys.argv[1:]
    loaded = np.load(data, allow_pickle=False)
    if verb == "record":
        record(loaded, Path(other))
    else:
        compare(loaded, np.load(other, allow_pickle=False), Path(rest[0]))
