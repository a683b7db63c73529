"""Suite `crafter`: Crafter, 22 achievements in an open world (64×64 RGB, 17 actions)

    crafter/reward      +1 for the first time of each achievement, ±0.1 for health
    crafter/noreward    reward 0; agents are only scored by achievements

Hafner 2021, "Benchmarking the Spectrum of Agent Capabilities". Every episode logs `log/achievement_<name>`: 1
if it was unlocked, else 0; `crafter_score` computes the paper's score from their means.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.gym import load_old_gym
from rl_lab.environments.wrappers import TimeLimit
from rl_lab.errors import ConfigError, known_task

EXTRA = "crafter"
HANDLES = frozenset({"size"})
TASKS = ("reward", "noreward")
ACHIEVEMENT = "log/achievement_"
RENDER_SIZE = (576, 576)
LENGTH = 10_000  # steps of an episode (Hafner 2021)


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("crafter", task, TASKS)


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    area: int = 64,
) -> gymnasium.Env:
    """`area`: side length of the world, in cells (64 in the paper)."""
    env = CrafterEnv(
        reward=task == "reward",
        size=size or (64, 64),
        area=area,
        render_mode="rgb_array" if render else None,
    )
    return TimeLimit(env, LENGTH)


def crafter_score(success: Mapping[str, float]) -> float:
    """Return the paper's score, in percent: exp(mean(ln(1 + sᵢ))) − 1, with success rates sᵢ of 0 to 100 %.

    success: achievement -> fraction of episodes that unlocked it, 0 to 1 (the mean of `log/achievement_…`);
             other `log/` keys are ignored
    """
    rates = [
        100.0 * float(rate)
        for name, rate in success.items()
        if name.startswith(ACHIEVEMENT) or not name.startswith("log/")
    ]
    if not rates:
        raise ConfigError("crafter_score needs the success rate of at least one achievement")
    return math.exp(sum(math.log1p(rate) for rate in rates) / len(rates)) - 1.0


class CrafterEnv(gymnasium.Env):
    """Crafter with Gymnasium's interface and without a time limit; `terminated` means death."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        *,
        reward: bool,
        size: tuple[int, int],
        area: int = 64,
        render_mode: str | None = None,
    ) -> None:
        load_old_gym()
        import crafter

        # Crafter's size is (width, height). Its own time limit is off, since it cannot be told from death.
        self._env = crafter.Env(area=(area, area), reward=reward, size=size[::-1], length=None, seed=0)
        _order_objects(self._env._world)
        self._names: list[str] = list(crafter.constants.achievements)
        self.render_mode = render_mode
        self._begun = False
        self._unlocked: set[str] = set()
        self.observation_space = spaces.Box(0, 255, (*size, 3), np.uint8)
        self.action_space = spaces.Discrete(len(crafter.constants.actions))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:  # Crafter generates each world from its seed and the episode number
            self._env._seed, self._env._episode = seed, 0
        self._begun = False
        self._unlocked = set()
        return np.ascontiguousarray(self._env.reset()), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, dead, inner = self._env.step(int(action))
        # The episode's sums are logged: zeros in the first step add all names to every episode.
        info = {ACHIEVEMENT + name: 0.0 for name in self._names} if not self._begun else {}
        for name, count in inner["achievements"].items():
            if count and name not in self._unlocked:
                self._unlocked.add(name)
                info[ACHIEVEMENT + name] = 1.0
        self._begun = True
        return np.ascontiguousarray(obs), float(reward), bool(dead), False, info

    def render(self) -> np.ndarray:
        """Return (576, 576, 3) uint8; does not change the state of the game."""
        env, random = self._env, self._env._world.random
        size, state = env._size, random.get_state()
        env._size = np.array(RENDER_SIZE)
        frame = np.ascontiguousarray(env.render())
        env._size = size
        random.set_state(state)  # the noise at night uses the generator of the game
        return frame


class OrderedSet:
    """The set operations that Crafter uses, with iteration in the order of insertion."""

    def __init__(self) -> None:
        self._items: dict[Any, None] = {}

    def add(self, item: Any) -> None:
        self._items[item] = None

    def remove(self, item: Any) -> None:
        del self._items[item]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def _order_objects(world: Any) -> None:
    """Make the order of objects in a chunk deterministic.

    Crafter keeps them in sets, whose order depends on memory addresses, so two runs with one seed would
    diverge.
    """
    original = world.reset

    def reset(seed: int | None = None) -> None:
        original(seed=seed)
        world._chunks = defaultdict(OrderedSet)

    world.reset = reset


def step_seconds(task: str) -> float:
    return 3e-3
