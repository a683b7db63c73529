"""Wrappers around a single environment: those that `make.EnvFactory` always adds, and those of `WRAPPERS`.

A config (`environment.wrappers`) or `make_env(wrappers={name: value, …})` adds the latter, in the given
order:

    crop: [10, 74, 0, 64]     rows 10 to 73 and columns 0 to 63 of images
    grayscale: true           images with one channel (ITU-R BT.601 weights)
    frame_stack: 4            stack the last 4 images as channels, oldest first; vectors without images
    observation_noise: 0.1    Gaussian noise with this standard deviation on vectors, 255 times it on images
    reward_shift: 6.0         add to the reward (reward_shift: -1.0 subtracts); changes what is best if episodes end
    reward_scale: 0.1         multiply the reward
    reward_clip: 1.0          clip the reward to ± this value
    reward_sign: true         sign of the reward
    reward_tanh: true         tanh of the reward

They are applied after resizing, so images are (C, H, W) uint8. The reward wrappers log the original return of
an episode as `log/raw_return`. Integer observations need no wrapper: they are already one-hot (see `spec`).
"""

from __future__ import annotations

import math
import reprlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.spec import (
    UnusableRow,
    action_mapping,
    action_space,
    finite_number,
    flag,
    observation_leaves,
    observation_space,
    returned_values,
)
from rl_lab.errors import ConfigError, closest, one_line
from rl_lab.records import ArraySpec

LOG_PREFIX = "log/"  # values of these step infos are summed over the episode
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


def add_log(log: dict[str, float], info: Mapping[str, Any]) -> None:
    """Add the `log/` infos of a step to the sums of an episode; values that are not finite are ignored."""
    for key, value in info.items():
        if isinstance(key, str) and key.startswith(LOG_PREFIX):
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise UnusableRow(f"info['{key}'] is {reprlib.repr(value)}, not a number") from None
            if math.isfinite(number):
                log[key] = log.get(key, 0.0) + number


class CheckedReturns(gymnasium.Wrapper):
    """Checks what reset() and step() of an environment return, except for the observation: see `spec`."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = returned_values("reset", self.env.reset(**kwargs), ("obs", "info"))
        return obs, info

    def step(self, action: Any) -> StepResult:
        names = ("obs", "reward", "terminated", "truncated", "info")
        obs, reward, terminated, truncated, info = returned_values("step", self.env.step(action), names)
        return obs, reward, flag("terminated", terminated), flag("truncated", truncated), info


class ActionRepeat(gymnasium.Wrapper):
    """Repeats each action for `times` steps or until the episode ends; sums rewards and `log/` infos."""

    def __init__(self, env: gymnasium.Env, times: int) -> None:
        super().__init__(env)
        self.action_repeat = times

    def step(self, action: Any) -> StepResult:
        total = 0.0
        log: dict[str, float] = {}
        for _ in range(self.action_repeat):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += finite_number("reward", reward)
            add_log(log, info)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, {**info, **log}


class TimeLimit(gymnasium.Wrapper):
    """Truncates an episode after `steps` decisions; it is applied after the action repeat."""

    def __init__(self, env: gymnasium.Env, steps: int) -> None:
        super().__init__(env)
        self.steps = steps
        self.elapsed = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self.elapsed = 0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.elapsed += 1
        if self.elapsed >= self.steps and not terminated:
            truncated = True
        return obs, reward, terminated, truncated, info


def without_time_limit(env: gymnasium.Env) -> gymnasium.Env:
    """Remove the time limit of an environment, so that a longer one can be set."""
    if isinstance(env, (gymnasium.wrappers.TimeLimit, TimeLimit)):
        return env.env
    if isinstance(env, gymnasium.Wrapper):  # wrappers of the suite may be outside the limit
        env.env = without_time_limit(env.env)
    return env


# environment.size: height and width; "auto": see `automatic_size`; None: images are not resized
Size = tuple[int, int] | Literal["auto"] | None
SIZE_DIVISOR = 16  # image encoders halve images four times
MAX_AUTOMATIC_SIDE = 128


def automatic_size(sizes: Collection[tuple[int, ...]]) -> tuple[int, int] | None:
    """Return the size that images with these heights and widths are resized to; None: they are kept.

    They are kept if they have one size with sides of at most 128 that are divisible by 16, as image encoders need it;
    otherwise they become 64×64, the size of most published results.
    """
    if len(set(sizes)) == 1:
        (size,) = set(sizes)
        if all(side % SIZE_DIVISOR == 0 and side <= MAX_AUTOMATIC_SIDE for side in size):
            return None
    return (64, 64)


class RenderedPixels(gymnasium.ObservationWrapper):
    """Replaces the observation with the rendered frame, or (`keep`) adds the frame to it as `image`.

    size: of the result; scaling (H, W, 3) here avoids the transpositions of `Resize`
    """

    def __init__(self, env: gymnasium.Env, keep: bool, size: Size = None) -> None:
        super().__init__(env)
        self.keep = keep
        self.size: tuple[int, int] | None = None
        # The size is only known from a frame, and most environments render only after a reset.
        env.reset(seed=0)
        frame = self._frame()
        self.native_space = self._space(frame)  # with frames as they are rendered
        self.size = automatic_size([frame.shape[:2]]) if size == "auto" else size
        self.observation_space = self._space(self._frame())

    def _space(self, frame: np.ndarray) -> spaces.Dict:
        image = spaces.Box(0, 255, frame.shape, np.uint8)
        if not self.keep:
            return spaces.Dict({"image": image})
        old = self.env.observation_space
        return spaces.Dict(
            {**(old.spaces if isinstance(old, spaces.Dict) else {"vector": old}), "image": image}
        )

    def observation(self, observation: Any) -> dict[str, Any]:
        if not self.keep:
            return {"image": self._frame()}
        old = observation if isinstance(observation, dict) else {"vector": observation}
        return {**old, "image": self._frame()}

    def _frame(self) -> np.ndarray:
        frame = np.asarray(self.env.render())
        if frame.ndim != 3 or frame.dtype != np.uint8:
            raise ConfigError(
                "environment.pixels=true needs an environment whose render() returns (H, W, 3) uint8 frames: set it to false"
            )
        if self.size is None or frame.shape[:2] == self.size or frame.shape[2] != 3:
            return frame
        return scale(frame, self.size)


class DictObservation(gymnasium.ObservationWrapper):
    """Converts observations to a flat dict of contiguous arrays (see `spec`)."""

    def __init__(self, env: gymnasium.Env, keep: Sequence[str] | None = None) -> None:
        super().__init__(env)
        leaves = observation_leaves(env.observation_space, keep)
        self._readers = [(leaf.name, leaf.path, leaf.convert) for leaf in leaves]
        self.observation_space = observation_space({leaf.name: leaf.spec for leaf in leaves})

    def observation(self, observation: Any) -> dict[str, np.ndarray]:
        result = {}
        for name, path, convert in self._readers:
            value = observation
            try:
                for key in path:
                    value = value[key]
                result[name] = convert(value)
            except UnusableRow:
                raise
            except Exception as error:  # a missing key, lists of different lengths, an index out of range
                raise UnusableRow(f"observation '{name}' cannot be read ({one_line(error)})") from error
        return result


class Resize(gymnasium.ObservationWrapper):
    """Resizes the images of a flat dict observation, (C, H, W) uint8; bilinear with antialiasing."""

    def __init__(self, env: gymnasium.Env, size: tuple[int, int]) -> None:
        super().__init__(env)
        self.size = size
        specs = _specs(env)
        images = [name for name, spec in specs.items() if is_image(spec)]
        if not images:
            raise ConfigError(
                f"environment.size={size} needs an image, and the observations are {sorted(specs)}: remove size, or set "
                "environment.pixels=true to observe the rendered frame"
            )
        self._images = [name for name in images if specs[name].shape[1:] != size]
        for name in self._images:
            specs[name] = ArraySpec((specs[name].shape[0], *size), "uint8")
        self.observation_space = observation_space(specs)

    def observation(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        resized = {name: resize(observation[name], self.size) for name in self._images}
        return {**observation, **resized}


def resized(env: gymnasium.Env, size: Size) -> gymnasium.Env:
    """Add `Resize` where this size needs it; env: with a flat dict observation."""
    if size == "auto":
        sizes = [spec.shape[1:] for spec in _specs(env).values() if is_image(spec)]
        size = automatic_size(sizes) if sizes else None
    return env if size is None else Resize(env, size)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (C, H, W) uint8 to (height, width), with Pillow's bilinear filter."""
    if len(image) == 3:
        return np.ascontiguousarray(
            scale(np.ascontiguousarray(image.transpose(1, 2, 0)), size).transpose(2, 0, 1)
        )
    return np.stack([scale(plane, size) for plane in image])


def scale(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (H, W) or (H, W, 3) uint8 to (height, width)."""
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))


class StandardAction(gymnasium.ActionWrapper):
    """Accepts actions in the format of `action_spec`: indices from zero, flat vectors, values in [-1, 1]."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_spec, self._to_environment = action_mapping(env.action_space)
        self.action_space = action_space(self.action_spec)
        self._begun: tuple[Any, bytes, Any] | None = None  # dtype and bytes of an action, and its conversion

    def begin_action(self, action: np.ndarray) -> Any:
        """Convert an action that `begin_step` sends; `step` with the same action does not convert it again."""
        native = self._to_environment(action)
        self._begun = (action.dtype, action.tobytes(), native)
        return native

    def action(self, action: Any) -> Any:
        begun, self._begun = self._begun, None
        if begun is not None:
            array = np.asarray(action)
            if (array.dtype, array.tobytes()) == begun[:2]:
                return begun[2]
        return self._to_environment(action)


# --- Optional wrappers -----------------------------------------------------------------------------------

GRAY = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601
Observation = dict[str, np.ndarray]


class Crop(gymnasium.ObservationWrapper):
    """Crops images to rows `top` to `bottom` and columns `left` to `right`, exclusive."""

    def __init__(self, env: gymnasium.Env, top: int, bottom: int, left: int, right: int) -> None:
        super().__init__(env)
        specs = _specs(env)
        self._images = _images(specs, "crop")
        self._part = (slice(None), slice(top, bottom), slice(left, right))
        for name in self._images:
            channels, height, width = specs[name].shape
            if not (0 <= top < bottom <= height and 0 <= left < right <= width):
                raise ConfigError(
                    f"environment.wrappers.crop={[top, bottom, left, right]} is outside of the {height}×{width} image '{name}'"
                )
            specs[name] = ArraySpec((channels, bottom - top, right - left), "uint8")
        self.observation_space = observation_space(specs)

    def observation(self, observation: Observation) -> Observation:
        return {**observation, **{name: observation[name][self._part] for name in self._images}}


class Grayscale(gymnasium.ObservationWrapper):
    """Converts RGB images (3, H, W) to (1, H, W), rounded."""

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
    """Stacks the last `count` images (without images: vectors), oldest first; a reset fills the stack."""

    def __init__(self, env: gymnasium.Env, count: int) -> None:
        super().__init__(env)
        specs = _specs(env)
        self._names = [name for name, spec in specs.items() if is_image(spec)] or list(specs)
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
    """Adds noise that depends on the seed of the episode, so that an exact resume reproduces it."""

    def __init__(self, env: gymnasium.Env, deviation: float) -> None:
        super().__init__(env)
        self.deviation = deviation
        self._random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Observation, dict[str, Any]]:
        obs, info = self.env.reset(seed=seed, **kwargs)
        if seed is not None:
            self._random = np.random.default_rng([seed, 1])  # another stream than the environment's
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
    """Applies a function to the reward; `log/raw_return` is the sum of the original rewards."""

    def __init__(self, env: gymnasium.Env, function: Callable[[float], float]) -> None:
        super().__init__(env)
        self._function = function

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        number = finite_number("reward", reward)  # before clipping could hide an infinite reward
        # With several reward wrappers the innermost one sees the original reward, so its entry wins.
        info = {"log/raw_return": number, **info}
        return obs, self._function(number), terminated, truncated, info


def add_wrappers(env: gymnasium.Env, wrappers: Mapping[str, Any]) -> gymnasium.Env:
    """Apply these wrappers to `env`; null or false skips one."""
    for name, value in wrappers.items():
        if name not in WRAPPERS:
            raise ConfigError(f"environment.wrappers.{name} does not exist.{closest(name, WRAPPERS)}")
        if value is None or value is False:
            continue
        env = WRAPPERS[name](env, value)
    return env


def _stack(env: gymnasium.Env, count: Any) -> gymnasium.Env:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"environment.wrappers.frame_stack={count!r} must be an integer of at least 1")
    return FrameStack(env, count)


def _crop(env: gymnasium.Env, part: Any) -> gymnasium.Env:
    if not (isinstance(part, list | tuple) and len(part) == 4 and all(type(n) is int for n in part)):
        raise ConfigError(
            f"environment.wrappers.crop={part!r} must be four integers: top, bottom, left, right"
        )
    return Crop(env, *part)


def _noise(env: gymnasium.Env, deviation: Any) -> gymnasium.Env:
    return ObservationNoise(env, _number("observation_noise", deviation))


def _shift(env: gymnasium.Env, value: Any) -> gymnasium.Env:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"environment.wrappers.reward_shift={value!r} must be a finite number")
    return RewardTransform(env, lambda reward: reward + float(value))


def _scale(env: gymnasium.Env, factor: Any) -> gymnasium.Env:
    number = _number("reward_scale", factor)
    return RewardTransform(env, lambda reward: reward * number)


def _clip(env: gymnasium.Env, bound: Any) -> gymnasium.Env:
    number = _number("reward_clip", bound)
    return RewardTransform(env, lambda reward: min(max(reward, -number), number))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ConfigError(f"environment.wrappers.{name}={value!r} must be a number of at least 0")
    return float(value)


WRAPPERS: dict[str, Callable[[gymnasium.Env, Any], gymnasium.Env]] = {
    "crop": _crop,
    "grayscale": lambda env, value: Grayscale(env),
    "frame_stack": _stack,
    "observation_noise": _noise,
    "reward_shift": _shift,
    "reward_scale": _scale,
    "reward_clip": _clip,
    "reward_sign": lambda env, value: RewardTransform(env, lambda reward: float(np.sign(reward))),
    "reward_tanh": lambda env, value: RewardTransform(env, math.tanh),
}


def _specs(env: gymnasium.Env) -> dict[str, ArraySpec]:
    assert isinstance(env.observation_space, spaces.Dict)
    return {name: ArraySpec(box.shape or (), str(box.dtype)) for name, box in env.observation_space.items()}


def is_image(spec: ArraySpec) -> bool:
    return spec.dtype == "uint8" and len(spec.shape) == 3


def _images(specs: Mapping[str, ArraySpec], wrapper: str) -> list[str]:
    names = [name for name, spec in specs.items() if is_image(spec)]
    if not names:
        raise ConfigError(
            f"environment.wrappers.{wrapper} needs an image, and the observations are {sorted(specs)}: remove it"
        )
    return names
