"""Suite `minigrid`: MiniGrid and BabyAI, with symbolic or image observations

    minigrid/DoorKey-5x5, minigrid/MiniGrid-DoorKey-5x5-v0, minigrid/BabyAI-GoToObj-v0

    observe: symbolic   `grid`: the 7×7 view, object (11), colour (6) and state (3) of each cell one-hot; `direction`
             rgb        `image`: the 7×7 view, rendered
             rgb_full   `image`: the complete map, rendered
    backend: gymnasium  MiniGrid itself
             envpool    EnvPool's MiniGrid, in C++: only symbolic; a seed leads to another level (see docs)
    mission: N          `mission`: the first N words of the mission, each one-hot over `WORDS`; 0: no mission

Tasks with changing missions (most of BabyAI) cannot be solved without the mission.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.pools import PooledEnv, require_backend
from rl_lab.environments.suites.gym import nearest
from rl_lab.errors import ConfigError, closest

EXTRA = "minigrid"
HANDLES = frozenset({"size"})
OBSERVE = ("symbolic", "rgb", "rgb_full")
CHOICES = (11, 6, 3)  # objects, colours, door states: minigrid.core.constants
PREFIXES = ("MiniGrid-", "BabyAI-")
# All words of the missions of the registered tasks (minigrid 3.2). Index 0 is padding, the last index any
# other word.
WORDS = [
    "a",
    "after",
    "and",
    "at",
    "avoid",
    "ball",
    "behind",
    "blue",
    "box",
    "door",
    "end",
    "fetch",
    "find",
    "from",
    "front",
    "get",
    "go",
    "goal",
    "green",
    "grey",
    "hallway",
    "in",
    "key",
    "lava",
    "left",
    "matching",
    "must",
    "near",
    "next",
    "object",
    "of",
    "on",
    "open",
    "opening",
    "pick",
    "purple",
    "put",
    "reach",
    "red",
    "right",
    "room",
    "rooms",
    "square",
    "the",
    "then",
    "to",
    "traverse",
    "unlock",
    "up",
    "use",
    "yellow",
    "you",
    "your",
]


def tasks() -> list[str]:
    """Return the registered ids; none if the package is not installed."""
    try:
        return _ids()
    except ModuleNotFoundError:
        return []


def resolve(task: str) -> str:
    """Return the registered id; the prefix `MiniGrid-` and the version are optional."""
    known = _ids()
    short = {name.removeprefix("MiniGrid-").rpartition("-v")[0].lower(): name for name in sorted(known)}
    match = task if task in known else short.get(task.removeprefix("MiniGrid-").lower())
    if match is None:
        raise ConfigError(f"no task 'minigrid/{task}'.{nearest(task, known) or closest(task, short)}")
    return match


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    observe: str = "symbolic",
    mission: int = 0,
    backend: str = "gymnasium",
) -> gymnasium.Env:
    """`size` is for images; without it a cell has 8×8 pixels."""
    import minigrid.wrappers

    require_backend(backend)
    if observe not in OBSERVE:
        raise ConfigError(f"environment.observe={observe!r}:{closest(str(observe), OBSERVE)}")
    if isinstance(mission, bool) or not isinstance(mission, int) or mission < 0:
        raise ConfigError(f"environment.mission={mission!r} must be a number of words, or 0 for none")
    if backend == "envpool":
        if observe != "symbolic" or render:
            raise ConfigError(
                "environment.backend=envpool renders no MiniGrid: set environment.observe=symbolic and "
                "environment.size=null, or environment.backend=gymnasium"
            )
        return SymbolicView(PooledMiniGrid(task), mission)
    env = gymnasium.make(task, render_mode="rgb_array" if render else None, disable_env_checker=True)
    if task.startswith("BabyAI-"):
        env = SuppressOutput(env)
    if observe == "symbolic":
        return SymbolicView(env, mission)
    if observe == "rgb":
        cells = env.unwrapped.agent_view_size  # type: ignore[attr-defined]
        tile = 8 if size is None else max(1, min(size) // cells)
        env = minigrid.wrappers.RGBImgPartialObsWrapper(env, tile_size=tile)
    else:
        cells = max(env.unwrapped.width, env.unwrapped.height)  # type: ignore[attr-defined]
        tile = 8 if size is None else max(1, min(size) // cells)
        env = minigrid.wrappers.RGBImgObsWrapper(env, tile_size=tile)
    return ImageView(env, size, mission)


class PooledMiniGrid(PooledEnv):
    """EnvPool's MiniGrid and BabyAI: the same rules and observations, other levels for a seed."""

    def __init__(self, task: str) -> None:
        super().__init__(task)
        self.observation_space = spaces.Dict(
            {"image": spaces.Box(0, 255, (7, 7, 3), np.uint8), "direction": spaces.Discrete(4)}
        )
        self.action_space = spaces.Discrete(7)

    def _read(self, obs: Any) -> dict[str, Any]:
        text = bytes(obs["mission"]).rstrip(b"\0").decode("ascii", "replace")
        return {"image": obs["image"], "direction": int(obs["direction"]), "mission": text}


class SuppressOutput(gymnasium.Wrapper):
    """Suppresses the output of BabyAI, which prints why it sampled a mission again."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        with contextlib.redirect_stdout(io.StringIO()):
            return self.env.reset(**kwargs)


class SymbolicView(gymnasium.ObservationWrapper):
    """One-hot encoding of the content of each cell."""

    def __init__(self, env: gymnasium.Env, mission: int = 0) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        self._mission_length = mission
        self._shape = env.observation_space["image"].shape
        self._offsets = np.cumsum([0, *CHOICES[:-1]])
        assert self._shape is not None
        width = int(np.prod(self._shape[:2])) * sum(CHOICES)
        self.observation_space = spaces.Dict(
            {
                "grid": spaces.Box(0.0, 1.0, (width,), np.float32),
                "direction": spaces.Discrete(4),
                **mission_space(mission),
            }
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        codes = observation["image"].reshape(-1, len(CHOICES)) + self._offsets
        grid = np.zeros((len(codes), sum(CHOICES)), np.float32)
        np.put_along_axis(grid, codes, 1.0, axis=1)
        view = {"grid": grid.reshape(-1), "direction": observation["direction"]}
        return (
            {**view, "mission": encode_mission(observation["mission"], self._mission_length)}
            if self._mission_length
            else view
        )


class ImageView(gymnasium.ObservationWrapper):
    """The rendered view, resized; the direction is omitted, since the image shows it."""

    def __init__(self, env: gymnasium.Env, size: tuple[int, int] | None, mission: int = 0) -> None:
        super().__init__(env)
        self._mission_length = mission
        assert isinstance(env.observation_space, spaces.Dict)
        shape = env.observation_space["image"].shape
        assert shape is not None
        self._size = size if size is not None and size != shape[:2] else None
        self.observation_space = spaces.Dict(
            {"image": spaces.Box(0, 255, (*(size or shape[:2]), 3), np.uint8), **mission_space(mission)}
        )

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        image = observation["image"]
        if self._size is not None:
            from PIL import Image

            scaled = Image.fromarray(image).resize(self._size[::-1], Image.Resampling.BILINEAR)
            image = np.asarray(scaled)
        if not self._mission_length:
            return {"image": image}
        return {"image": image, "mission": encode_mission(observation["mission"], self._mission_length)}


def mission_space(words: int) -> dict[str, spaces.Space]:
    """Return the entry of a Dict space for `encode_mission`; empty for no words."""
    return {"mission": spaces.MultiDiscrete([len(WORDS) + 2] * words)} if words else {}


def encode_mission(text: str, words: int) -> np.ndarray:
    """Return (words,) int64: indices into `WORDS`, counted from 1; 0 is padding."""
    indices = np.zeros(words, np.int64)
    for index, word in enumerate(re.findall(r"[a-z]+", text.lower())[:words]):
        indices[index] = _WORD_INDEX.get(word, len(WORDS) + 1)
    return indices


def step_seconds(task: str) -> float:
    return 200e-6


_WORD_INDEX = {word: index for index, word in enumerate(WORDS, start=1)}


def _ids() -> list[str]:
    import minigrid  # noqa: F401 (registers its ids)

    return sorted(name for name in gymnasium.registry if name.startswith(PREFIXES))
