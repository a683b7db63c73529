"""Suite `multitask`: several tasks behind one door; each episode plays one of them, drawn by its seed.

    environment: {suite: multitask, task: several, tasks: [dmc/walker_walk, dmc/cheetah_run]}

Every task is seen in one shape: `vector` holds all its vector observations side by side in sorted order, zeros behind
them; `task` is a one-hot vector; `action_mask` is 1 for the parts of an action that the task has. Parts that it does not
have are not sent to it. `log/return_<task>` is the return of an episode of that task. A task is made when it is first
played.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.spec import finite_number
from rl_lab.errors import ConfigError
from rl_lab.records import Spec

EXTRA = ""
HANDLES = frozenset({"size", "action_repeat", "time_limit"})


def tasks() -> list[str]:
    return ["several"]


def make(
    task: str,
    *,
    render: bool = False,
    tasks: Sequence[str] = (),
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    **options: Any,
) -> gymnasium.Env:
    """options: for the suites of all the tasks."""
    from rl_lab.environments.make import env_factory, probe_spec

    if not tasks:
        raise ConfigError(
            "environment.tasks is empty: name the tasks, for example [dmc/walker_walk, dmc/cheetah_run]"
        )
    common = {"size": size, "action_repeat": action_repeat, "time_limit": time_limit, **options}
    specs = [probe_spec(name, **common) for name in tasks]  # kept by the door: each is probed once
    factories = [env_factory(name, **common) for name in tasks]
    return MultiTaskEnv(list(tasks), specs, factories, render_mode="rgb_array" if render else None)


class MultiTaskEnv(gymnasium.Env):
    """One of several environments at a time. They must have vector observations and continuous actions."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (Gymnasium's form)

    def __init__(
        self, names: list[str], specs: list[Spec], factories: list[Any], *, render_mode: str | None = None
    ) -> None:
        for spec in specs:
            images = [key for key, item in spec.observations.items() if item.dtype == "uint8"]
            if spec.action.kind != "continuous" or images:
                raise ConfigError(
                    f"{spec.name} cannot be one of several tasks: they need continuous actions and no images"
                )
        repeats = {spec.action_repeat for spec in specs}
        if len(repeats) > 1:
            raise ConfigError(
                f"the tasks repeat actions differently ({sorted(repeats)}): set environment.action_repeat"
            )
        self.action_repeat = repeats.pop()
        self.names, self.specs, self.render_mode = names, specs, render_mode
        self._factories = factories
        self._made: dict[int, gymnasium.Env] = {}
        self._playing = 0
        self._keys = [sorted(spec.observations) for spec in specs]
        self._widths = [
            sum(int(np.prod(item.shape)) for item in spec.observations.values()) for spec in specs
        ]
        self._actions = max(spec.action.size for spec in specs)
        self.observation_space = spaces.Dict(
            {
                "vector": spaces.Box(-np.inf, np.inf, (max(self._widths),), np.float32),
                "task": spaces.Box(0.0, 1.0, (len(names),), np.float32),
                "action_mask": spaces.Box(0.0, 1.0, (self._actions,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (self._actions,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        # Drawn from the episode's seed: a resumed run plays the same task again.
        self._playing = int(self.np_random.integers(len(self.names)))
        obs, info = self._env().reset(seed=seed, options=options)
        return self._padded(obs), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        own = np.asarray(action)[: self.specs[self._playing].action.size]
        obs, reward, terminated, truncated, info = self._env().step(own)
        name, number = self.names[self._playing].replace("/", "_"), finite_number("reward", reward)
        return self._padded(obs), number, terminated, truncated, {**info, f"log/return_{name}": number}

    def render(self) -> Any:
        return self._env().render()

    def close(self) -> None:
        for env in self._made.values():
            env.close()

    def _env(self) -> gymnasium.Env:
        if self._playing not in self._made:
            self._made[self._playing] = self._factories[self._playing](self.render_mode is not None)
        return self._made[self._playing]

    def _padded(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        vector = np.zeros(max(self._widths), np.float32)
        joined = np.concatenate([obs[key].reshape(-1) for key in self._keys[self._playing]])
        vector[: len(joined)] = joined
        task, mask = np.zeros(len(self.names), np.float32), np.zeros(self._actions, np.float32)
        task[self._playing] = 1.0
        mask[: self.specs[self._playing].action.size] = 1.0
        return {"vector": vector, "task": task, "action_mask": mask}
