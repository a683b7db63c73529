"""Small wrappers that every environment passes through on its way to the lab (see `make.EnvFactory`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.row_checks import UnusableRow, finite_number
from rl_lab.environments.spec import action_mapping, action_space, observation_leaves, observation_space
from rl_lab.errors import ConfigError, one_line
from rl_lab.records import ArraySpec

LOG_PREFIX = "log/"  # step infos under such keys are numbers, summed over the episode
StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


def add_log(log: dict[str, float], info: Mapping[str, Any]) -> None:
    """Add a step's `log/` infos to the sums of an episode. One that is not finite would make the sum so, and is left out."""
    for key, value in info.items():
        if key.startswith(LOG_PREFIX):
            number = float(value)
            if math.isfinite(number):
                log[key] = log.get(key, 0.0) + number


class ActionRepeat(gymnasium.Wrapper):
    """One decision, `times` environment steps: rewards and `log/` infos are summed, an end stops early."""

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
    """Truncates after `steps` calls of `step`: agent decisions, as it stands outside the action repeat."""

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
    """The environment without the limit it came with, so that a longer one can be given."""
    if isinstance(env, (gymnasium.wrappers.TimeLimit, TimeLimit)):
        return env.env
    if isinstance(env, gymnasium.Wrapper):  # a suite's own wrappers may stand around the limit
        env.env = without_time_limit(env.env)
    return env


class RenderedPixels(gymnasium.ObservationWrapper):
    """The rendered frame as observation: alone, or (`keep`) as `image` beside what the environment shows.

    size: height and width to scale it to; a large frame is then not turned around (as `Resize` has to) on its way
    """

    def __init__(self, env: gymnasium.Env, keep: bool, size: tuple[int, int] | None = None) -> None:
        super().__init__(env)
        self.keep = keep
        self.size = size
        env.reset(seed=0)  # the frame's size is known only from a frame, and most render only after a reset
        frame = self._frame()
        image = spaces.Box(0, 255, frame.shape, np.uint8)
        if keep and isinstance(env.observation_space, spaces.Dict):
            self.observation_space = spaces.Dict({**env.observation_space.spaces, "image": image})
        elif keep:
            self.observation_space = spaces.Dict({"vector": env.observation_space, "image": image})
        else:
            self.observation_space = spaces.Dict({"image": image})

    def observation(self, observation: Any) -> dict[str, Any]:
        if not self.keep:
            return {"image": self._frame()}
        old = observation if isinstance(observation, dict) else {"vector": observation}
        return {**old, "image": self._frame()}

    def _frame(self) -> np.ndarray:
        frame = np.asarray(self.env.render())
        if frame.ndim != 3 or frame.dtype != np.uint8:
            raise ConfigError("pixels=true needs an environment whose render() gives (H, W, 3) uint8 frames")
        if self.size is None or frame.shape[:2] == self.size or frame.shape[2] != 3:
            return frame
        return scale(frame, self.size)


class DictObservation(gymnasium.ObservationWrapper):
    """Observations as a flat dict of contiguous arrays (see `spec`)."""

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
            except Exception as error:  # a missing key, lists of different lengths, a choice that is none
                raise UnusableRow(f"observation '{name}' cannot be read ({one_line(error)})") from error
        return result


class Resize(gymnasium.ObservationWrapper):
    """Images of a flat dict observation, (C, H, W) uint8, at `size` = (height, width); bilinear, antialiased."""

    def __init__(self, env: gymnasium.Env, size: tuple[int, int]) -> None:
        super().__init__(env)
        assert isinstance(env.observation_space, spaces.Dict)
        self.size = size
        specs = {
            name: ArraySpec(box.shape or (), str(box.dtype)) for name, box in env.observation_space.items()
        }
        images = [name for name, spec in specs.items() if spec.dtype == "uint8" and len(spec.shape) == 3]
        if not images:
            raise ConfigError(
                f"size={size} needs an image, and the observations are {sorted(specs)}: leave size out, or add "
                "pixels=true to look at the rendered frame"
            )
        self._images = [name for name in images if specs[name].shape[1:] != size]
        for name in self._images:
            specs[name] = ArraySpec((specs[name].shape[0], *size), "uint8")
        self.observation_space = observation_space(specs)

    def observation(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        resized = {name: resize(observation[name], self.size) for name in self._images}
        return {**observation, **resized}


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(C, H, W) uint8 at (height, width), with Pillow's bilinear filter."""
    if len(image) == 3:
        return np.ascontiguousarray(
            scale(np.ascontiguousarray(image.transpose(1, 2, 0)), size).transpose(2, 0, 1)
        )
    return np.stack([scale(plane, size) for plane in image])


def scale(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8 at (height, width)."""
    from PIL import Image

    return np.asarray(Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling.BILINEAR))


class StandardAction(gymnasium.ActionWrapper):
    """Takes actions as the lab writes them: from zero, flat, in [-1, 1]; `action_spec` describes them."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.action_spec, self._to_environment = action_mapping(env.action_space)
        self.action_space = action_space(self.action_spec)

    def action(self, action: Any) -> Any:
        return self._to_environment(action)
