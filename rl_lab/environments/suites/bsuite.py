"""Suite `bsuite`: DeepMind's behaviour suite, 468 small experiments, each about one ability of an agent

    bsuite/catch, bsuite/deep_sea/7, …      experiment, or experiment/setting; without one, setting 0

Osband et al. 2019, "Behaviour Suite for Reinforcement Learning". The observation is a vector or a small grid, which is
flattened. Each step logs by how much the numbers of `bsuite_info` grew, as `log/total_regret` and so on: their sums
over all episodes are the numbers from which bsuite computes its scores, and `log_files` makes the package write its
own CSV files as well. An experiment is defined for `episodes(task)` episodes of one environment: num_envs=1.

The experiments `mnist…` download MNIST to /tmp/mnist when they start.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import ConfigError, LabError, known_task, one_line

EXTRA = "bsuite"
# Experiment -> number of settings (bsuite 0.3.6).
EXPERIMENTS = {
    "bandit": 20,
    "bandit_noise": 20,
    "bandit_scale": 20,
    "cartpole": 20,
    "cartpole_noise": 20,
    "cartpole_scale": 20,
    "cartpole_swingup": 20,
    "catch": 20,
    "catch_noise": 20,
    "catch_scale": 20,
    "deep_sea": 21,
    "deep_sea_stochastic": 21,
    "discounting_chain": 20,
    "memory_len": 23,
    "memory_size": 17,
    "mnist": 20,
    "mnist_noise": 20,
    "mnist_scale": 20,
    "mountain_car": 20,
    "mountain_car_noise": 20,
    "mountain_car_scale": 20,
    "umbrella_distract": 23,
    "umbrella_length": 23,
}
HEIGHT = 160  # pixels of a rendered observation


def tasks() -> list[str]:
    return [f"{name}/{setting}" for name, count in EXPERIMENTS.items() for setting in range(count)]


def resolve(task: str) -> str:
    """Return `experiment/setting`."""
    name, slash, setting = task.partition("/")
    known_task("bsuite", task, EXPERIMENTS, name)
    setting = setting if slash else "0"
    if not setting.isdecimal() or int(setting) >= EXPERIMENTS[name]:
        raise ConfigError(f"no task 'bsuite/{task}': the settings of {name} are 0 to {EXPERIMENTS[name] - 1}")
    return f"{name}/{int(setting)}"


def make(task: str, *, render: bool = False, log_files: str | None = None) -> gymnasium.Env:
    """`log_files`: folder for the CSV files of the package; only with num_envs=1"""
    return BehaviourEnv(task, log_files=log_files, render_mode="rgb_array" if render else None)


def episodes(task: str) -> int:
    """Return the number of episodes of an experiment."""
    return int(_load(resolve(task), None).bsuite_num_episodes)


class BehaviourEnv(gymnasium.Env):
    """One experiment. The seed decides what is random in an episode, not the setting's own numbers."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (as in Gymnasium)

    def __init__(self, task: str, *, log_files: str | None = None, render_mode: str | None = None) -> None:
        self._env = _load(task, log_files)
        self.render_mode = render_mode
        self._shape = self._env.observation_spec().shape
        size = int(np.prod(self._shape))
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = spaces.Discrete(int(self._env.action_spec().num_values))
        self._numbers = self._read()
        self._obs = np.zeros(size, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed(int(self.np_random.integers(2**32)))
        return self._observe(self._env.reset()), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        result = self._env.step(int(action))
        numbers = self._read()
        info = {f"log/{name}": value - self._numbers.get(name, 0.0) for name, value in numbers.items()}
        self._numbers = numbers
        truncated = result.last() and result.discount != 0.0
        return (
            self._observe(result),
            float(result.reward or 0.0),
            result.last() and not truncated,
            truncated,
            info,
        )

    def render(self) -> np.ndarray:
        """Return the observation as a grid of grey cells, (160, W, 3) uint8."""
        grid = self._obs.reshape(self._shape if len(self._shape) == 2 else (1, -1))
        low, high = float(grid.min()), float(grid.max())
        grey = (255 * (grid - low) / (high - low or 1.0)).astype(np.uint8)
        cell = max(1, HEIGHT // grid.shape[0] if grid.shape[0] > 1 else HEIGHT // grid.shape[1])
        frame = np.repeat(np.repeat(grey, cell, axis=0), cell, axis=1)
        frame[::cell] //= 2  # lines between cells
        frame[:, ::cell] //= 2
        return np.repeat(frame[:, :, None], 3, axis=2)

    def close(self) -> None:
        if hasattr(self._env, "flush"):
            self._env.flush()

    def _read(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._raw().bsuite_info().items()}

    def _raw(self) -> Any:
        return getattr(self._env, "raw_env", self._env) if hasattr(self._env, "flush") else self._env

    def _seed(self, seed: int) -> None:
        """Seed every generator of the environment and of the wrappers of its experiment."""
        env, number = self._env, seed
        while env is not None:
            generator = vars(env).get("_rng")
            if isinstance(generator, np.random.RandomState) and not _is_setting(env):
                generator.seed(number)
            env, number = vars(env).get("_env"), (number + 1) % 2**32

    def _observe(self, result: Any) -> np.ndarray:
        self._obs = np.asarray(result.observation, np.float32).reshape(-1)
        return self._obs


def step_seconds(task: str) -> float:
    return 40e-6


def _is_setting(env: Any) -> bool:
    """A bandit draws nothing but the order of its rewards, in the constructor."""
    return type(env).__name__ == "SimpleBandit"


def _load(task: str, log_files: str | None) -> Any:
    import bsuite

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the task's name in bold
            if log_files is None:
                return bsuite.load_from_id(task)
            Path(log_files).mkdir(parents=True, exist_ok=True)
            return bsuite.load_and_record_to_csv(task, str(log_files), overwrite=True)
    except OSError as error:
        if task.startswith("mnist"):
            raise LabError(
                f"bsuite/{task} needs the four files of MNIST in /tmp/mnist, and downloading them failed: "
                f"{one_line(error)}"
            ) from error
        raise
