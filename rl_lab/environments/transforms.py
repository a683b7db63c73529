"""Wrappers that a config or `make_env(wrappers={name: value, …})` adds, in the order written, around one environment.

    crop: [10, 74, 0, 64]     rows 10 to 73 and columns 0 to 63 of images
    grayscale: true           images with one channel (ITU-R BT.601 weights)
    frame_stack: 4            images of the last 4 steps as channels, oldest first; vectors where there are no images
    observation_noise: 0.1    Gaussian noise of this deviation on vectors, and of 255 times it on images
    reward_scale: 0.1         reward times this
    reward_clip: 1.0          reward within ± this
    reward_sign: true         reward's sign
    reward_tanh: true         tanh of the reward

They stand outside resizing, so images are (C, H, W) uint8. The reward wrappers keep the untouched sum of an episode as
`log/raw_return`. Whole numbers in observations need no wrapper: they are one-hot already (see `spec`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.row_checks import finite_number
from rl_lab.environments.spec import observation_space
from rl_lab.errors import ConfigError, closest
from rl_lab.records import ArraySpec

GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
Observation = dict[str, np.ndarray]
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


class Crop(gymnasium.ObservationWrapper):
    """A part of the images: rows from `top` and columns from `left`, up to `bottom` and `right`."""

    def __init__(self, env: gymnasium.Env, top: int, bottom: int, left: int, right: int) -> None:
        super().__init__(env)
        specs = _specs(env)
        self._images = _images(specs, "crop")
        self._part = (slice(None), slice(top, bottom), slice(left, right))
        for name in self._images:
            channels, height, width = specs[name].shape
            if not (0 <= top < bottom <= height and 0 <= left < right <= width):
                raise ConfigError(
                    f"wrappers.crop={[top, bottom, left, right]} is no part of the {height}×{width} image '{name}'"
                )
            specs[name] = ArraySpec((channels, bottom - top, right - left), "uint8")
        self.observation_space = observation_space(specs)

    def observation(self, observation: Observation) -> Observation:
        return {**observation, **{name: observation[name][self._part] for name in self._images}}


class Grayscale(gymnasium.ObservationWrapper):
    """Colour images (3, H, W) as (1, H, W), rounded."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        specs = _specs(env)
        self._images = [name for name in _images(specs, "grayscale") if specs[name].shape[0] == 3]
        for name in self._images:
            specs[name] = ArraySpec((1, *specs[name].shape[1:]), "uint8")
        self.observation_space = observation_space(specs)

    def observation(self, observation: Observation) -> Observation:
        gray = {
            name: np.rint(np.tensordot(GRAY, observation[name], axes=1)).astype(np.uint8)[None]
            for name in self._images
        }
        return {**observation, **gray}


class FrameStack(gymnasium.Wrapper):
    """The last `count` images, or vectors where there are no images, oldest first; a reset fills all places."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        specs = _specs(env)
        self._names = [name for name, spec in specs.items() if _is_image(spec)] or list(specs)
        self._past: deque[Observation] = deque(maxlen=count)
        for name in self._names:
            shape = specs[name].shape
            specs[name] = ArraySpec((count * shape[0], *shape[1:]), specs[name].dtype)
        self.observation_space = observation_space(specs)

    def reset(self, **kwargs: Any) -> tuple[Observation, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        for _ in range(self._past.maxlen or 0):
            self._past.append(obs)
        return self._stacked(obs), info

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._past.append(obs)
        return self._stacked(obs), reward, terminated, truncated, info

    def _stacked(self, obs: Observation) -> Observation:
        return {**obs, **{name: np.concatenate([past[name] for past in self._past]) for name in self._names}}


class ObservationNoise(gymnasium.Wrapper):
    """Noise that the episode's seed decides, so that an exact resume sees it again."""

    def __init__(self, env: gymnasium.Env, deviation: float) -> None:
        super().__init__(env)
        self.deviation = deviation
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Observation, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, **kwargs)
        if seed is not None:
            self._random = np.random.default_rng([seed, 1])  # not the environment's own numbers
        return self._noisy(obs), info

    def step(self, action: Any) -> StepResult:
        obs, *rest = self.env.step(action)
        return (self._noisy(obs), *rest)  # type: ignore[return-value]

    def _noisy(self, obs: Observation) -> Observation:
        noisy = {}
        for name, value in obs.items():
            noise = self._random.standard_normal(value.shape, np.float32) * self.deviation
            if value.dtype == np.uint8:
                noisy[name] = np.clip(np.rint(value + 255.0 * noise), 0, 255).astype(np.uint8)
            else:
                noisy[name] = value + noise.astype(value.dtype)
        return noisy


class RewardTransform(gymnasium.Wrapper):
    """The reward through a function; `log/raw_return` sums it as it was."""

    def __init__(self, env: gymnasium.Env, function: Callable[[float], float]) -> None:
        super().__init__(env)
        self._function = function

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        number = finite_number("reward", reward)  # before a bound makes a number of infinity
        # The innermost of several such wrappers is the one that saw the environment's own reward.
        info = {"log/raw_return": number, **info}
        return obs, self._function(number), terminated, truncated, info


def add_wrappers(env: gymnasium.Env, wrappers: Mapping[str, Any]) -> gymnasium.Env:
    """`env` behind the wrappers named; a value of null or false leaves one out."""
    for name, value in wrappers.items():
        if name not in WRAPPERS:
            raise ConfigError(f"no wrapper is called '{name}'.{closest(name, WRAPPERS)}")
        if value is None or value is False:
            continue
        env = WRAPPERS[name](env, value)
    return env


def _stack(env: gymnasium.Env, count: Any) -> gymnasium.Env:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"wrappers.frame_stack={count!r} must be a whole number of at least 1")
    return FrameStack(env, count)


def _crop(env: gymnasium.Env, part: Any) -> gymnasium.Env:
    if not (isinstance(part, list | tuple) and len(part) == 4 and all(type(n) is int for n in part)):
        raise ConfigError(f"wrappers.crop={part!r} must be four whole numbers: top, bottom, left, right")
    return Crop(env, *part)


def _noise(env: gymnasium.Env, deviation: Any) -> gymnasium.Env:
    return ObservationNoise(env, _number("observation_noise", deviation))


def _scale(env: gymnasium.Env, factor: Any) -> gymnasium.Env:
    number = _number("reward_scale", factor)
    return RewardTransform(env, lambda reward: reward * number)


def _clip(env: gymnasium.Env, bound: Any) -> gymnasium.Env:
    number = _number("reward_clip", bound)
    return RewardTransform(env, lambda reward: min(max(reward, -number), number))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"wrappers.{name}={value!r} must be a number of at least 0")
    return float(value)


WRAPPERS: dict[str, Callable[[gymnasium.Env, Any], gymnasium.Env]] = {
    "crop": _crop,
    "grayscale": lambda env, value: Grayscale(env),
    "frame_stack": _stack,
    "observation_noise": _noise,
    "reward_scale": _scale,
    "reward_clip": _clip,
    "reward_sign": lambda env, value: RewardTransform(env, lambda reward: float(np.sign(reward))),
    "reward_tanh": lambda env, value: RewardTransform(env, math.tanh),
}


def _specs(env: gymnasium.Env) -> dict[str, ArraySpec]:
    assert isinstance(env.observation_space, spaces.Dict)
    return {name: ArraySpec(box.shape or (), str(box.dtype)) for name, box in env.observation_space.items()}


def _is_image(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 3


def _images(specs: Mapping[str, ArraySpec], wrapper: str) -> list[str]:
    names = [name for name, spec in specs.items() if _is_image(spec)]
    if not names:
        raise ConfigError(f"wrappers.{wrapper} needs an image, and the observations are {sorted(specs)}")
    return names
