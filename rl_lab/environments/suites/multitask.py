"""Suite `multitask`: several tasks in one environment; the seed of each episode selects its task.

    environment: {suite: multitask, task: several, tasks: [dmc/walker_walk, dmc/cheetah_run]}

All tasks have the same shapes: `vector` contains the vector observations, concatenated in sorted order and
padded with zeros; `task` is a one-hot vector; `action_mask` is 1 for the action dimensions of the task. Other
dimensions are ignored. `log/return_<task>` is the return of an episode of that task. The environment of a
task is created for its first episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    tasks: Sequence[str | Mapping[str, Any]] = (),
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    **options: Any,
) -> gymnasium.Env:
    """options: passed to the suites of all tasks

    A task is a name, or {task: its name, python: an interpreter, and other settings of its own}.
    """
    from rl_lab.environments.make import env_factory, probe_spec

    if not tasks:
        raise ConfigError(
            "environment.tasks is empty: list the tasks, for example [dmc/walker_walk, dmc/cheetah_run]"
        )
    common = {"size": size, "action_repeat": action_repeat, "time_limit": time_limit, **options}
    settings = [{**common, **({"task": item} if isinstance(item, str) else item)} for item in tasks]
    for item in settings:
        if not isinstance(item.get("task"), str):
            raise ConfigError(f"environment.tasks has {item}: a task is a name, or has its name as task")
    specs = [probe_spec(**item) for item in settings]  # cached: each task is probed once
    factories = [env_factory(**item) for item in settings]
    return MultiTaskEnv(
        [item["task"] for item in settings], specs, factories, render_mode="rgb_array" if render else None
    )


class MultiTaskEnv(gymnasium.Env):
    """One of several environments per episode. All must have vector observations and continuous actions."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self, names: list[str], specs: list[Spec], factories: list[Any], *, render_mode: str | None = None
    ) -> None:
        for spec in specs:
            images = [key for key, item in spec.observations.items() if item.dtype == "uint8"]
            if spec.action.kind != "continuous" or images:
                raise ConfigError(
                    f"{spec.name} cannot be used in environment.tasks: all tasks need continuous actions and no images"
                )
        repeats = {spec.action_repeat for spec in specs}
        if len(repeats) > 1:
            raise ConfigError(
                f"environment.tasks have different action repeats ({sorted(repeats)}): set environment.action_repeat"
            )
        self.action_repeat = repeats.pop()
        self.names, self.specs, self.render_mode = names, specs, render_mode
        self._factories = factories
        self._envs: dict[int, gymnasium.Env] = {}
        self._current = 0
        self._keys = [sorted(spec.observations) for spec in specs]
        self._widths = [
            sum(int(np.prod(item.shape)) for item in spec.observations.values()) for spec in specs
        ]
        self._action_size = max(spec.action.size for spec in specs)
        self.observation_space = spaces.Dict(
            {
                "vector": spaces.Box(-np.inf, np.inf, (max(self._widths),), np.float32),
                "task": spaces.Box(0.0, 1.0, (len(names),), np.float32),
                "action_mask": spaces.Box(0.0, 1.0, (self._action_size,), np.float32),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (self._action_size,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        # Sampled with the seed of the episode, so that a resumed run selects the same task.
        self._current = int(self.np_random.integers(len(self.names)))
        obs, info = self._env().reset(seed=seed, options=options)
        return self._pad(obs), info

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        task_action = np.asarray(action)[: self.specs[self._current].action.size]
        obs, reward, terminated, truncated, info = self._env().step(task_action)
        name, value = self.names[self._current].replace("/", "_"), finite_number("reward", reward)
        return self._pad(obs), value, terminated, truncated, {**info, f"log/return_{name}": value}

    def render(self) -> Any:
        return self._env().render()

    def close(self) -> None:
        for env in self._envs.values():
            env.close()

    def _env(self) -> gymnasium.Env:
        if self._current not in self._envs:
            self._envs[self._current] = self._factories[self._current](self.render_mode is not None)
        return self._envs[self._current]

    def _pad(self, obs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        vector = np.zeros(max(self._widths), np.float32)
        joined = np.concatenate([obs[key].reshape(-1) for key in self._keys[self._current]])
        vector[: len(joined)] = joined
        task, mask = np.zeros(len(self.names), np.float32), np.zeros(self._action_size, np.float32)
        task[self._current] = 1.0
        mask[: self.specs[self._current].action.size] = 1.0
        return {"vector": vector, "task": task, "action_mask": mask}
