"""Suite `tensor`: environments written in PyTorch, of which thousands are stepped at once on the training device

    tensor/cartpole     CartPole-v1, equal to Gymnasium's
    tensor/catch        Catch from pixels, as `dummy/catch`

With `environment.batched=true` their observations go into replay without a copy to the host (see `tensor_env`); without
it, and in evaluation, they are ordinary environments. Another simulator is a suite of another package (the docstring of
`rl_lab/environments/make.py`) with the function `simulator`; docs/howto/gpu_simulators.md shows some.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.wrappers import TimeLimit
from rl_lab.errors import known_task

if TYPE_CHECKING:
    from rl_lab.environments.tensor_env import TensorSimulator

EXTRA = ""
TASKS = ("cartpole", "catch")


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("tensor", task, TASKS)


def simulator(task: str, num_envs: int, device: Any, **options: Any) -> TensorSimulator:
    """options: of `simulators.Catch`: `cells`, `side`, `length`"""
    from rl_lab.environments.simulators import SIMULATORS

    return SIMULATORS[task](num_envs, device, **options)


def make(task: str, *, render: bool = False, **options: Any) -> gymnasium.Env:
    env = OneOfTensors(simulator(task, 1, "cpu", **options), "rgb_array" if render else None)
    limit = env.simulator.time_limit
    return env if limit is None else TimeLimit(env, limit)


class OneOfTensors(gymnasium.Env):
    """A simulator of one environment, with arrays."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, simulator: TensorSimulator, render_mode: str | None = None) -> None:
        import torch

        self._torch = torch
        self.simulator = simulator
        self.render_mode = render_mode
        self._which = torch.ones(1, dtype=torch.bool)
        self._generator = torch.Generator()
        self._images = {name for name, spec in simulator.observations.items() if spec.dtype == "uint8"}
        parts: dict[str, spaces.Space] = {}
        for name, spec in simulator.observations.items():
            if name in self._images:
                channels, height, width = spec.shape
                parts[name] = spaces.Box(0, 255, (height, width, channels), np.uint8)
            else:
                parts[name] = spaces.Box(-np.inf, np.inf, spec.shape, np.dtype(spec.dtype).type)
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Discrete(simulator.action.size)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        self._generator.manual_seed(int(self.np_random.integers(2**63)))
        self.simulator.start(self._which, self._generator)
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        reward, terminated = self.simulator.step(self._torch.tensor([int(action)]))
        ended = bool(terminated)
        if not ended:  # draws what the next step may need, as in a vector of environments
            self.simulator.start(~self._which, self._generator)
        return self._observe(), float(reward), ended, False, {}

    def render(self) -> np.ndarray:
        """Return the image of the observation, or a bar for each of its numbers, (H, W, 3) uint8."""
        obs = self._observe()
        if self._images:
            return next(obs[name] for name in sorted(self._images))
        values = np.concatenate([value.ravel() for value in obs.values()])
        frame = np.full((96, 24 * len(values), 3), 40, np.uint8)
        for index, value in enumerate(np.tanh(4 * values)):
            middle, end = 48, round(48 - 46 * float(value))
            frame[min(middle, end) : max(middle, end) + 1, 24 * index + 4 : 24 * index + 20] = (90, 200, 90)
        return frame

    def _observe(self) -> dict[str, np.ndarray]:
        values = {name: value[0].numpy() for name, value in self.simulator.observe().items()}
        return {
            name: np.ascontiguousarray(value.transpose(1, 2, 0)) if name in self._images else value.copy()
            for name, value in values.items()
        }


def step_seconds(task: str) -> float:
    return 150e-6
