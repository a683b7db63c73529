"""Pictures for docs/algorithms/world_models.md: what V makes of images, and M's dreams at several temperatures.

python scripts/dev/world_model_images.py RUN NAME [FOLDER]

RUN is a run folder of any experiment with `workflow=og_wm`, NAME the beginning of the pictures' names.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from rl_lab.agent import load_agent
from rl_lab.environments import make_env
from rl_lab.environments.make import env_config_options
from rl_lab.records import ActMode, Batch
from rl_lab.workflows.og_wm.report import TEMPERATURES, dreams_at

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "world_models"
PLAYED, ROWS, SHOWN = (
    110,
    48,
    8,
)  # steps at most, the last of them that are looked at, pictures that are shown
SIDE = 64  # of a picture on paper, at least
GAP = 3  # between pictures
MARGIN = 104  # for the words beside a row


def main(run: str, name: str, folder: str | Path = FOLDER) -> None:
    folder = Path(folder)
    agent = load_agent(run)
    batch = play(agent)
    rows = batch.reward.shape[1]
    seen = max(1, rows // 4)  # the rest is dreamed, led by the actions that were taken
    key = agent.workflow.vae.keys[0]
    folder.mkdir(parents=True, exist_ok=True)
    truth = batch.obs[key][0]
    model = agent.workflow.dream_observation({"z": agent.workflow.encode_sequence(batch.obs)["mu"]})[key][0]
    pick = np.linspace(0, rows - 1, SHOWN).astype(int)
    save(folder / f"{name}_reconstructions.png", {"truth": truth[pick], "V": model[pick]})
    dreams = dreams_at(agent.workflow, batch, seen, TEMPERATURES)
    late = np.linspace(seen - 1, rows - 1, SHOWN).astype(int)
    films = {f"temperature {temperature}": dream[key][0][late] for temperature, dream in dreams.items()}
    save(folder / f"{name}_dreams.png", {"truth": truth[late], **films})


def play(agent: Any) -> Batch:
    """The last rows of one episode under the agent, or of its beginning where it is long, (1, ROWS, …)."""
    options = env_config_options(agent.config.environment, evaluation=True)
    generator = torch.Generator(agent.device).manual_seed(0)
    rows: dict[str, list[torch.Tensor]] = {}
    with make_env(**{**options, "num_envs": 1, "workers": 0}, seed=7) as env:
        obs, _ = env.reset()
        state = agent.workflow.initial_policy_state(1)
        for step in range(PLAYED):
            tensors = {key: torch.as_tensor(value).to(agent.device) for key, value in obs.items()}
            first = torch.tensor([step == 0], device=agent.device)
            action, state, _ = agent.workflow.act(tensors, state, first, ActMode(generator=generator))
            row = {f"obs/{key}": value for key, value in tensors.items()}
            row |= {"action": action, "is_first": first, "reward": torch.zeros(1, device=agent.device)}
            for key, value in row.items():
                rows.setdefault(key, []).append(value)
            obs, _, terminated, truncated, _ = env.step(action.cpu().numpy())
            if terminated[0] or truncated[0]:
                break
    return Batch({key: torch.stack(values[-ROWS:], 1) for key, values in rows.items()})


def save(path: Path, rows: dict[str, torch.Tensor]) -> None:
    """rows: what each row is called -> (n, C, H, W) uint8, one under the other."""
    times = max(1, SIDE // next(iter(rows.values())).shape[-1])
    images = torch.stack(list(rows.values())).repeat_interleave(times, -1).repeat_interleave(times, -2)
    images = torch.nn.functional.pad(images, (0, GAP, 0, GAP), value=255)
    picture = images.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1).cpu().numpy()
    picture = np.repeat(picture, 3, axis=2) if picture.shape[2] == 1 else picture
    height = images.shape[-2]
    page = Image.new("RGB", (picture.shape[1] + MARGIN, len(picture)), "white")
    page.paste(Image.fromarray(picture), (MARGIN, 0))
    for number, words in enumerate(rows):
        ImageDraw.Draw(page).text(
            (4, (number + 0.5) * height), words, fill="black", anchor="lm", font_size=12
        )
    page.save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    main(*sys.argv[1:4])
