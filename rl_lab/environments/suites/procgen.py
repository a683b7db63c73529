"""Suite `procgen`: ProcGen, 16 games with generated levels (64×64 RGB, 15 actions), through EnvPool

    procgen/coinrun, procgen/starpilot, …      levels: hard | easy, and for some games exploration, memory, extreme

Cobbe et al. 2020, "Leveraging Procedural Generation to Benchmark Reinforcement Learning". OpenAI's package `procgen`
has no build for Python above 3.10; EnvPool contains its C++ code. Options and defaults are those of the package
(openai/procgen @ 37b521d): `num_levels` levels from `start_level` on, 0 for all; an episode ends after 1,000 steps.
EnvPool has no larger picture, so `size` above 64, such as the 96 of DreamerV3's preset, enlarges the 64×64 one.
EnvPool's games need Qt 5 on Linux: apt install libqt5gui5.
"""

from __future__ import annotations

import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.base import SeededEnv
from rl_lab.environments.wrappers import TimeLimit
from rl_lab.errors import ConfigError, LabError, known_task

EXTRA = "envpool"
# Game -> kinds of levels besides easy and hard.
GAMES = {
    "bigfish": (),
    "bossfight": (),
    "caveflyer": ("exploration", "memory"),
    "chaser": ("extreme",),
    "climber": ("exploration",),
    "coinrun": ("exploration",),
    "dodgeball": ("extreme", "memory"),
    "fruitbot": (),
    "heist": ("exploration", "memory"),
    "jumper": ("exploration", "memory"),
    "leaper": ("exploration", "extreme"),
    "maze": ("exploration", "memory"),
    "miner": ("memory",),
    "ninja": ("exploration",),
    "plunder": (),
    "starpilot": ("extreme",),
}
LEVELS = ("hard", "easy", "exploration", "memory", "extreme")
LENGTH = 1000
NO_LIMIT = 2**30


def tasks() -> list[str]:
    return list(GAMES)


def resolve(task: str) -> str:
    return known_task("procgen", task, GAMES)


def make(
    task: str,
    *,
    render: bool = False,
    levels: str = "hard",
    num_levels: int = 0,
    start_level: int = 0,
    use_backgrounds: bool = True,
    center_agent: bool = True,
) -> gymnasium.Env:
    known = ("hard", "easy", *GAMES[task])
    if levels not in known:
        raise ConfigError(f"environment.levels={levels!r}: procgen/{task} has {', '.join(known)}")
    for name, value in (("num_levels", num_levels), ("start_level", start_level)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"environment.{name}={value!r} must be an integer of at least 0")
    env = ProcGenEnv(
        f"{task.capitalize()}{levels.capitalize()}-v0",
        render_mode="rgb_array" if render else None,
        num_levels=num_levels,
        start_level=start_level,
        use_backgrounds=use_backgrounds,
        center_agent=center_agent,
    )
    return TimeLimit(env, LENGTH)


class ProcGenEnv(SeededEnv):
    """One game of EnvPool. A pool can only be seeded when it is created, so each episode has its own."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, name: str, *, render_mode: str | None = None, **options: Any) -> None:
        import envpool

        super().__init__(render_mode=render_mode)
        self._make_pool = envpool.make_gymnasium
        self._name = name
        self._options = options
        self._pool: Any = None
        self.observation_space = spaces.Box(0, 255, self._image.shape, np.uint8)
        self.action_space = spaces.Discrete(15)

    def _start(self, seed: int) -> np.ndarray:
        self.close()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the bounds of its spaces
                self._pool = self._make_pool(
                    self._name,
                    num_envs=1,
                    num_threads=1,
                    channel_first=False,
                    seed=seed,
                    max_episode_steps=NO_LIMIT,  # a wrapper enforces the limit
                    **self._options,
                )
        except ImportError as error:
            if "Qt" in str(error):
                raise LabError(
                    "procgen needs Qt 5, which EnvPool does not contain: apt install libqt5gui5, or dnf install "
                    "qt5-qtbase"
                ) from error
            raise
        self._image = self._pool.reset()[0][0]  # 64×64: EnvPool has no larger one
        return self._image

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, _, info = self._pool.step(np.array([action], np.int32))
        self._image = obs[0]
        ended = bool(terminated[0])
        solved = float(ended and bool(info["prev_level_complete"][0]))
        return self._image, float(reward[0]), ended, False, {"log/level_complete": solved}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def step_seconds(task: str) -> float:
    return 1e-3
