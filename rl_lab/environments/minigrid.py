"""Suite `minigrid`: MiniGrid and BabyAI, as symbols or pictures of what the agent sees

    minigrid/DoorKey-5x5, minigrid/MiniGrid-DoorKey-5x5-v0, minigrid/BabyAI-GoToObj-v0

    observe: symbolic   `grid`: the 7×7 view, object (11), colour (6) and state (3) of each cell one-hot; `direction`
             rgb        `image`: the 7×7 view, drawn
             rgb_full   `image`: the whole map, drawn

The mission's text is left out: tasks in which it changes (most of BabyAI) cannot be solved without it.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.gym_adapter import nearest
from rl_lab.errors import ConfigError, closest

EXTRA = "minigrid"
HANDLES = frozenset({"size"})
OBSERVE = ("symbolic", "rgb", "rgb_full")
CHOICES = (11, 6, 3)  # objects, colours, door states: minigrid.core.constants
PREFIXES = ("MiniGrid-", "BabyAI-")


def tasks() -> list[str]:
    """Registered ids; none where the package is missing."""
    try:
        return _ids()
    except ModuleNotFoundError:
        return []


def resolve(task: str) -> str:
    """The registered id; prefix `MiniGrid-` and version may be left out."""
    known = _ids()
    short = {name.removeprefix("MiniGrid-").rpartition("-v")[0].lower(): name for name in sorted(known)}
    found = task if task in known else short.get(task.removeprefix("MiniGrid-").lower())
    if found is None:
        raise ConfigError(f"no task 'minigrid/{task}'.{nearest(task, known) or closest(task, short)}")
    return found


def make(
    task: str, *, render: bool = False, size: tuple[int, int] | None = None, observe: str = "symbolic"
) -> gymnasium.Env:
    """`size` is for pictures; without one a cell of the view has 8×8 pixels, and one of the whole map too."""
    import minigrid.wrappers

    if observe not in OBSERVE:
        raise ConfigError(f"observe={observe!r}:{closest(str(observe), OBSERVE)}")
    env = gymnasium.make(task, render_mode="rgb_array" if render else None, disable_env_checker=True)
    if observe == "symbolic":
        return SymbolicView(env)
    if observe == "rgb":
        cells = env.unwrapped.agent_view_size  # type: ignore[attr-defined]
        tile = 8 if size is None else max(1, min(size) // cells)
        env = minigrid.wrappers.RGBImgPartialObsWrapper(env, tile_size=tile)
    else:
        cells = max(env.unwrapped.width, env.unwrapped.height)  # type: ignore[attr-defined]
        tile = 8 if size is None else max(1, min(size) // cells)
        env = minigrid.wrappers.RGBImgObsWrapper(env, tile_size=tile)
    return Picture(env, size)


class SymbolicView(gymnasium.ObservationWrapper):
    """What is in each cell, one-hot."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        self._shape = env.observation_space["image"].shape
        self._offsets = np.cumsum([0, *CHOICES[:-1]])
        assert self._shape is not None
        width = int(np.prod(self._shape[:2])) * sum(CHOICES)
        self.observation_space = spaces.Dict(
            {"grid": spaces.Box(0.0, 1.0, (width,), np.float32), "direction": spaces.Discrete(4)}
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        codes = observation["image"].reshape(-1, len(CHOICES)) + self._offsets
        grid = np.zeros((len(codes), sum(CHOICES)), np.float32)
        np.put_along_axis(grid, codes, 1.0, axis=1)
        return {"grid": grid.reshape(-1), "direction": observation["direction"]}


class Picture(gymnasium.ObservationWrapper):
    """The drawn view alone, at the size asked for."""

    def __init__(self, env: gymnasium.Env, size: tuple[int, int] | None) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        shape = env.observation_space["image"].shape
        assert shape is not None
        self._size = size if size is not None and size != shape[:2] else None
        self.observation_space = spaces.Dict(
            {"image": spaces.Box(0, 255, (*(size or shape[:2]), 3), np.uint8)}
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        image = observation["image"]
        if self._size is not None:
            from PIL import Image

            scaled = Image.fromarray(image).resize(self._size[::-1], Image.Resampling.BILINEAR)
            image = np.asarray(scaled)
        return {"image": image}


def step_seconds(task: str) -> float:
    return 200e-6


def _ids() -> list[str]:
    import minigrid  # noqa: F401 (registers its ids)

    return sorted(name for name in gymnasium.registry if name.startswith(PREFIXES))
