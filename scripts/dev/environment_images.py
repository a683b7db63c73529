"""One picture of every installed suite, for docs/environments.md: left what a person sees, right what the agent sees.

python scripts/dev/environment_images.py [suite …]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rl_lab.environments import make_env
from rl_lab.errors import LabError

FOLDER = Path(__file__).parents[2] / "docs" / "images" / "environments"
HEIGHT = 160
# Suite -> (task, options, decisions before the picture is taken)
SCENES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gym": ("CartPole-v1", {"pixels": True, "size": 64}, 8),
    "atari": ("atari/breakout", {}, 40),
    "atari100k": ("atari100k/pong", {}, 60),
    "dmc": ("dmc/walker_walk", {"observe": "vision"}, 20),
    "crafter": ("crafter/reward", {}, 20),
    "minigrid": ("minigrid/DoorKey-8x8", {"observe": "rgb", "size": 63}, 10),
    "carracing": ("carracing/continuous", {"size": 64, "crop": True}, 60),
    "pusht": ("pusht/pixels", {}, 10),
    "popgym": ("popgym/RepeatPreviousEasy", {}, 10),
    "memory_maze": ("memory_maze/9x9", {}, 10),
    "pinpad": ("pinpad/six", {}, 40),
    "loconav": ("loconav/ant_maze_m", {}, 40),
    "manipulation": ("dmc/manip_stack_2_bricks", {"observe": "vision"}, 20),
    "rodent": ("dmc/rodent_maze_forage", {"observe": "vision"}, 20),
    "bsuite": ("bsuite/catch", {}, 4),
    "vizdoom": ("vizdoom/take_cover", {"action_repeat": 4}, 30),
    "metaworld": ("metaworld/door-open", {"observe": "vision"}, 20),
    "procgen": ("procgen/coinrun", {}, 20),
    "tensor": ("tensor/catch", {}, 4),
}


def main(suites: list[str]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for suite in suites or SCENES:
        try:
            path = draw(suite)
        except LabError as error:
            print(f"{suite}: no picture: {str(error).splitlines()[0]}")
        else:
            print(path)


def draw(suite: str) -> Path:
    """Play at random for a while, with one seed, and keep what is seen then."""
    task, options, decisions = SCENES[suite]
    with make_env(task, 1, workers=0, seed=3, render=True, **options) as env:
        obs, _ = env.reset()
        env.action_space.seed(1)
        for _ in range(decisions):
            obs, *_ = env.step(env.action_space.sample())
        pictures = [env.frame()]
        if "image" in obs:
            image = obs["image"][0].transpose(1, 2, 0)
            pictures.append(np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image)
    path = FOLDER / f"{suite}.png"
    Image.fromarray(np.concatenate([_scaled(picture) for picture in pictures], axis=1)).save(
        path, optimize=True
    )
    return path


def _scaled(picture: np.ndarray) -> np.ndarray:
    """At the common height, with a white edge."""
    height, width = picture.shape[:2]
    small = height < HEIGHT  # pixels of what the agent sees stay pixels
    filter_ = Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS
    scaled = np.asarray(Image.fromarray(picture).resize((round(width * HEIGHT / height), HEIGHT), filter_))
    return np.pad(scaled, ((2, 2), (2, 2), (0, 0)), constant_values=255)


if __name__ == "__main__":
    main(sys.argv[1:])
