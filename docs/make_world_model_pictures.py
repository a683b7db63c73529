"""Pictures for docs/algorithms/world_models.md: what V makes of images, and M's dreams at several temperatures.

python docs/make_world_model_pictures.py RUN NAME
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from rl_lab.agent import load_agent
from rl_lab.environments import make_env
from rl_lab.environments.make import env_config_options
from rl_lab.records import ActMode, Batch
from rl_lab.workflows.og_wm_report import TEMPERATURES, dreams_at

FOLDER = Path(__file__).parent / "images" / "world_models"
ROWS, SEEN, SHOWN = 48, 12, 8  # of a sequence, of them seen, pictures of it that are shown


def main(run: str, name: str) -> None:
    agent = load_agent(run)
    batch = play(agent)
    key = agent.workflow.vae.keys[0]
    FOLDER.mkdir(parents=True, exist_ok=True)
    truth = batch.obs[key][0]
    model = agent.workflow.dream_observation({"z": agent.workflow.see_sequence(batch.obs)["mu"]})[key][0]
    pick = np.linspace(0, ROWS - 1, SHOWN).astype(int)
    save(FOLDER / f"{name}_reconstructions.png", [truth[pick], model[pick]])
    dreams = dreams_at(agent.workflow, batch, SEEN, TEMPERATURES)
    late = np.linspace(SEEN - 1, ROWS - 1, SHOWN).astype(int)
    save(FOLDER / f"{name}_dreams.png", [truth[late], *(dream[key][0][late] for dream in dreams.values())])


def play(agent: Any) -> Batch:
    """One episode's first rows under the agent, (1, ROWS, …)."""
    options = env_config_options(agent.config.environment, evaluation=True)
    generator = torch.Generator(agent.device).manual_seed(0)
    rows: dict[str, list[torch.Tensor]] = {}
    with make_env(**{**options, "num_envs": 1, "workers": 0}, seed=7) as env:
        obs, _ = env.reset()
        state = agent.workflow.initial_policy_state(1)
        for step in range(ROWS):
            tensors = {key: torch.as_tensor(value).to(agent.device) for key, value in obs.items()}
            first = torch.tensor([step == 0], device=agent.device)
            action, state, _ = agent.workflow.act(tensors, state, first, ActMode(generator=generator))
            row = {f"obs/{key}": value for key, value in tensors.items()}
            row |= {"action": action, "is_first": first, "reward": torch.zeros(1, device=agent.device)}
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
            obs, *_ = env.step(action.cpu().numpy())
    return Batch({key: torch.stack(values, 1) for key, values in rows.items()})


def save(path: Path, rows: list[torch.Tensor]) -> None:
    """rows: (n, C, H, W) uint8 each, one under the other."""
    picture = torch.stack(rows).permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu().numpy()
    picture = np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture
    Image.fromarray(picture).save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main(*sys.argv[1:3])
