"""The form in which an environment itself returns observations and takes actions, before the lab's wrappers.

A run saves this form in config/native.json, so that a trained agent converts both without an environment:

    raw observation   as `env.step` returns it: any Gymnasium space, images (H, W, C) of any size
    lab observation   flat dict of arrays as described in `spec`, resized and stacked by the wrappers of the config
    lab action        indices from zero, flat vectors, values in [-1, 1]
    raw action        as `env.step` takes it: within the bounds of the environment's action space
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.spec import (
    Leaf,
    ObservationCheck,
    UnusableRow,
    action_mapping,
    observation_leaves,
    spec_of,
)
from rl_lab.environments.wrappers import (
    DictObservation,
    RenderedPixels,
    Size,
    StandardAction,
    add_wrappers,
    automatic_size,
    is_image,
    resized,
)
from rl_lab.errors import ConfigError, LabError, one_line

# Wrappers that are part of the observation's form. Noise is not: it makes an environment harder.
FORM_WRAPPERS = ("crop", "grayscale", "frame_stack")


class NativeForm:
    """Converts raw observations to the lab's form, and actions of the lab to raw ones, for N environments.

    data: of `form_data`
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.observation_space = space_from_data(data["observation"])
        self.action_space = space_from_data(data["action"])
        _, self._to_environment = action_mapping(self.action_space)
        self._leaves = observation_leaves(self.observation_space, data["observations"])
        size = data["size"]
        self._size: Size = (int(size[0]), int(size[1])) if isinstance(size, list) else size
        self._data = data
        self._stacks = [self._stack()]  # wrappers of each environment: a stack of frames has memory
        self.spec = spec_of(StandardAction(self._stacks[0]), "native")

    def to_lab(self, obs: Any, is_first: np.ndarray | None) -> dict[str, np.ndarray]:
        """Return N observations in the lab's form, (N, …). `obs` is batched; is_first: (N,) bool, None: all."""
        count = self.count(obs)
        if count is None:
            raise ValueError("to_lab() takes a batch of observations")
        while len(self._stacks) < count:
            self._stacks.append(self._stack())
        arrays = {
            name: np.empty((count, *item.shape), item.dtype) for name, item in self.spec.observations.items()
        }
        check = ObservationCheck(arrays)
        leaves = [(leaf.path, _at(obs, leaf)) for leaf in self._leaves]
        for index, stack in enumerate(self._stacks[:count]):
            stack.unwrapped.given = _nested([(path, value[index]) for path, value in leaves])  # type: ignore[attr-defined]
            try:
                converted = stack.reset()[0] if is_first is None or is_first[index] else stack.step(0)[0]
                for array, value in zip(arrays.values(), check(converted), strict=True):
                    array[index] = value
            except UnusableRow as error:
                raise LabError(f"obs is unusable: {error}") from error
        return arrays

    def batched(self, obs: Any) -> Any:
        """Return one observation as a batch of one, with the entries that the agent uses."""
        return _nested([(leaf.path, np.asarray(_at(obs, leaf))[None]) for leaf in self._leaves])

    def count(self, obs: Any) -> int | None:
        """Return the number N of a batch of observations, or None for a single observation."""
        counts: dict[str, int | None] = {}
        for leaf in self._leaves:
            try:
                shape = np.shape(_at(obs, leaf))
            except ValueError as error:  # lists of different lengths
                raise LabError(f"obs '{leaf.name}' cannot be read: {one_line(error)}") from error
            if shape == leaf.shape:
                counts[leaf.name] = None
            elif shape[1:] == leaf.shape and len(shape) == len(leaf.shape) + 1:
                counts[leaf.name] = shape[0]
            else:
                raise LabError(
                    f"obs '{leaf.name}' has shape {shape}, but the environment returns {leaf.shape}, or "
                    f"{('N', *leaf.shape)} for N environments; scaled=True takes observations of rl_lab.make_env"
                )
        if len(set(counts.values())) > 1:
            raise LabError(f"obs has different numbers of environments: {counts}")
        return next(iter(counts.values()))

    def to_raw(self, actions: np.ndarray) -> list[Any]:
        """Return N actions for `env.step`; actions: (N, …) in the lab's form."""
        return [self._to_environment(action) for action in actions]

    def automatic_resizing(self) -> str:
        """Return a sentence about the images that `environment.size=auto` resizes, or ""."""
        sizes = {leaf.name: leaf.spec.shape[1:] for leaf in self._leaves if is_image(leaf.spec)}
        size = automatic_size(list(sizes.values())) if sizes and self._size == "auto" else None
        names = [f"{name} from {sides[0]}×{sides[1]}" for name, sides in sizes.items() if sides != size]
        return f"environment.size=auto resizes {', '.join(names)} to {size[0]}×{size[1]}" if size else ""

    def _stack(self) -> gymnasium.Env:
        given = GivenObservation(self.observation_space, self.action_space)
        env = DictObservation(given, self._data["observations"])
        return add_wrappers(resized(env, self._size), self._data["wrappers"])


class GivenObservation(gymnasium.Env):
    """Returns the observation that it was given: the wrappers of an environment then convert it."""

    def __init__(self, observation_space: spaces.Space, action_space: spaces.Space) -> None:
        self.observation_space = observation_space
        self.action_space = action_space
        self.given: Any = None

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self.given, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.given, 0.0, False, False, {}


def _at(obs: Any, leaf: Leaf) -> Any:
    value = obs
    for position, key in enumerate(leaf.path):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            where = "".join(f"[{key!r}]" for key in leaf.path[: position + 1])
            raise LabError(f"obs{where} is missing: the agent was trained with '{leaf.name}'") from None
    if isinstance(value, Mapping):
        raise LabError(
            f"obs is a dict, but the environment returns an array as '{leaf.name}': scaled=True takes observations of "
            "rl_lab.make_env"
        )
    return value


def _nested(items: Sequence[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return nested dicts with these values at these paths; the value itself for the path ()."""
    if not items[0][0]:
        return items[0][1]
    result: dict[Any, Any] = {}
    for path, value in items:
        inner = result
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = value
    return result


# --- Saved forms -----------------------------------------------------------------------------------------


def form_data(
    env: gymnasium.Env, *, size: Size, observations: Sequence[str] | None, wrappers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the JSON data of the `NativeForm` of an environment with the lab's wrappers.

    With `environment.pixels` the observation has the rendered frame, at its own size.
    """
    inner = env
    observation: spaces.Space | None = None
    action: spaces.Space | None = None
    while isinstance(inner, gymnasium.Wrapper):
        if isinstance(inner, StandardAction):
            action = inner.env.action_space
        elif isinstance(inner, DictObservation):
            below = inner.env
            observation = below.native_space if isinstance(below, RenderedPixels) else below.observation_space
        inner = inner.env
    if observation is None or action is None:
        raise ConfigError(f"{env} has no wrappers of rl_lab: create it with make_env")
    return {
        "observation": space_to_data(observation),
        "action": space_to_data(action),
        "size": list(size) if isinstance(size, tuple) else size,
        "observations": None if observations is None else list(observations),
        "wrappers": {name: value for name, value in wrappers.items() if name in FORM_WRAPPERS},
    }


def space_to_data(space: spaces.Space) -> dict[str, Any]:
    """Return a Gymnasium space as JSON data; a space that the lab cannot convert only by its name."""
    if isinstance(space, spaces.Dict):
        return {
            "kind": "Dict",
            "spaces": [[key, space_to_data(child)] for key, child in space.spaces.items()],
        }
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "spaces": [space_to_data(child) for child in space.spaces]}
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"kind": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        values = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
        return {"kind": "MultiDiscrete", "dtype": str(space.dtype), **values}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": space.n if isinstance(space.n, int) else [*map(int, space.n)]}
    return {"kind": type(space).__name__}


def space_from_data(data: Mapping[str, Any]) -> spaces.Space:
    """Return the space of `space_to_data`."""
    kind = data["kind"]
    if kind == "Dict":
        return spaces.Dict([(key, space_from_data(child)) for key, child in data["spaces"]])
    if kind == "Tuple":
        return spaces.Tuple([space_from_data(child) for child in data["spaces"]])
    if kind == "Box":
        shape, dtype = tuple(data["shape"]), np.dtype(data["dtype"])
        low, high = (_from_bound(data[name], shape, dtype) for name in ("low", "high"))
        return spaces.Box(low, high, shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(data["n"]), start=int(data["start"]))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(data["nvec"], dtype=np.dtype(data["dtype"]).type, start=data["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(data["n"])
    return spaces.Space()


def _bound(array: np.ndarray) -> Any:
    """One value if all are equal, else a flat list; infinity as text, which JSON has not as a number."""
    flat = array.reshape(-1)
    equal = flat.size > 0 and bool((flat == flat[0]).all())
    values = [value if np.isfinite(value) else str(value) for value in (flat[:1] if equal else flat).tolist()]
    return values[0] if equal else values


def _from_bound(data: Any, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    values = np.asarray(data, object)
    array = values.astype(np.float64).astype(dtype) if dtype.kind == "f" else values.astype(dtype)
    return np.broadcast_to(array, shape) if array.ndim == 0 else array.reshape(shape)
