"""Conversion of Gymnasium spaces to `Spec`, and checks of the rows that environments return.

Observations are converted to a flat dict of arrays. Each leaf of the environment's space is one entry:

    Box, uint8, 3-D            image, channels first; the smaller of the first and last axis has the channels
    Box, uint8, 2-D            image with one channel
    Box, uint8, 4-D            stacked images (S, H, W, C) or (S, C, H, W), merged to (S*C, H, W)
    Box, other, 0-D or 1-D     float32 vector
    Box, other, 2-D and more   float32 array of that shape
    Discrete, MultiDiscrete    one-hot float32 vector(s), concatenated: an integer would imply an order
    MultiBinary                float32 vector

Names are the keys of Dict and Tuple spaces, nested keys joined with "_"; a single space is called `image`,
`vector` or (2-D and more) `array`. Actions are converted to one of three kinds; see `ActionSpec`.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.errors import ConfigError, closest
from rl_lab.records import ActionSpec, ArraySpec, Spec

NUMERIC_KINDS = "biuf"  # dtype kinds: bool, integers, floats
FLOAT32_MAX = float(np.finfo(np.float32).max)
_PLAIN = (float, int)

Convert = Callable[[Any], np.ndarray]
Path = tuple[Hashable, ...]


@dataclass(frozen=True)
class Leaf:
    """One entry of the observation dict: its path in the environment's observation, and how to convert it."""

    name: str
    path: Path
    shape: tuple[int, ...]  # in the environment
    spec: ArraySpec
    convert: Convert


def observation_leaves(space: spaces.Space, keep: Sequence[str] | None = None) -> list[Leaf]:
    """Return the entries of an observation space, in its order; `keep` selects names, None keeps all."""
    entries = [(_leaf_name(path, leaf), path, leaf) for path, leaf in _walk(space, ())]
    names = [name for name, _, _ in entries]
    for name in keep or ():
        if name not in names:
            raise ConfigError(f"no observation is called '{name}'.{closest(name, names)}")
    if len(set(names)) != len(names):
        duplicates = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(
            f"observations {duplicates} would have the same name: rename a key of the Dict space"
        )
    leaves = []
    for name, path, leaf in entries:
        if keep is None or name in keep:
            spec, convert = _leaf_reader(name, leaf)
            leaves.append(Leaf(name, path, tuple(leaf.shape or ()), spec, convert))
    if not leaves:
        raise ConfigError(f"the observation space {space} has no entry")
    return leaves


def observation_space(specs: dict[str, ArraySpec]) -> spaces.Dict:
    """Return the Gymnasium space of one converted observation."""
    boxes: dict[str, spaces.Space] = {}
    for name, spec in specs.items():
        low, high = (0, 255) if spec.dtype == "uint8" else (-np.inf, np.inf)
        boxes[name] = spaces.Box(low, high, spec.shape, np.dtype(spec.dtype).type)
    return spaces.Dict(boxes)


def action_mapping(space: spaces.Space) -> tuple[ActionSpec, Callable[[Any], Any]]:
    """Return the `ActionSpec` of an action space, and the function that converts actions for the environment.

    A continuous dimension without finite bounds is not rescaled: the environment receives values in [-1, 1].
    """
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return ActionSpec("discrete", (), choices=(int(space.n),)), lambda action: int(action) + start
    if isinstance(space, spaces.MultiDiscrete):
        starts, shape, dtype = np.asarray(space.start).reshape(-1), space.nvec.shape, space.dtype
        choices = tuple(int(n) for n in space.nvec.reshape(-1))
        return (
            ActionSpec("multi_discrete", (len(choices),), choices=choices),
            lambda action: (np.asarray(action) + starts).astype(dtype).reshape(shape),
        )
    if isinstance(space, spaces.MultiBinary):
        shape, dtype, count = space.shape, space.dtype, int(np.prod(space.shape))
        return (
            ActionSpec("multi_discrete", (count,), choices=(2,) * count),
            lambda action: np.array(action, dtype=dtype).reshape(shape),
        )
    if isinstance(space, spaces.Box):
        return _continuous(space)
    raise ConfigError(
        f"actions of a {type(space).__name__} space are not supported: use Discrete, MultiDiscrete, MultiBinary "
        "or Box, for example with a wrapper that flattens the space"
    )


def action_space(spec: ActionSpec) -> spaces.Space:
    """Return the Gymnasium space of one action of this `ActionSpec`."""
    if spec.kind == "discrete":
        return spaces.Discrete(spec.choices[0])
    if spec.kind == "multi_discrete":
        return spaces.MultiDiscrete(np.asarray(spec.choices))
    return spaces.Box(-1.0, 1.0, spec.shape, np.float32)


def spec_of(env: gymnasium.Env, name: str) -> Spec:
    """Return the `Spec` of an environment that has the lab's wrappers."""
    assert isinstance(env.observation_space, spaces.Dict)
    observations = {
        key: ArraySpec(tuple(box.shape or ()), str(box.dtype))
        for key, box in env.observation_space.spaces.items()
    }
    repeat = env.get_wrapper_attr("action_repeat") if env.has_wrapper_attr("action_repeat") else 1
    return Spec(name, observations, env.get_wrapper_attr("action_spec"), action_repeat=int(repeat))


def _continuous(space: spaces.Box) -> tuple[ActionSpec, Callable[[Any], Any]]:
    finite = np.isfinite(space.low) & np.isfinite(space.high)
    low = np.where(finite, space.low, -1.0).astype(np.float64).reshape(-1)
    high = np.where(finite, space.high, 1.0).astype(np.float64).reshape(-1)
    center, half = (high + low) / 2, (high - low) / 2
    shape, dtype, floor, ceiling = space.shape, space.dtype, space.low, space.high
    assert dtype is not None
    is_integer = np.issubdtype(dtype, np.integer)

    def to_environment(action: Any) -> np.ndarray:
        # For small arrays np.clip takes three times as long as minimum and maximum.
        value = center + np.minimum(np.maximum(action, -1.0), 1.0) * half
        value = (np.rint(value) if is_integer else value).reshape(shape)
        # Respect one-sided bounds, and rounding errors of a rescaled ±1.
        return np.minimum(np.maximum(value.astype(dtype), floor), ceiling)

    return ActionSpec(
        "continuous", (low.size,), low=tuple(low.tolist()), high=tuple(high.tolist())
    ), to_environment


def _walk(space: spaces.Space, path: Path) -> Iterator[tuple[Path, spaces.Space]]:
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from _walk(child, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, child in enumerate(space.spaces):
            yield from _walk(child, (*path, index))
    else:
        yield path, space


def _leaf_name(path: Path, space: spaces.Space) -> str:
    if path:
        return "_".join(str(key) for key in path)
    dims = len(space.shape or ())
    if isinstance(space, spaces.Box) and dims >= 2:
        return "image" if space.dtype == np.uint8 else "array"
    return "vector"


def _leaf_reader(name: str, space: spaces.Space) -> tuple[ArraySpec, Convert]:
    if isinstance(space, spaces.Box):
        if space.dtype == np.uint8 and len(space.shape) >= 2:
            return _image_reader(name, space.shape)
        return _float_reader(name, space.shape, space.shape or (1,))
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        counts = np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec).reshape(-1)
        return _one_hot_reader(name, counts, np.asarray(space.start).reshape(-1))
    if isinstance(space, spaces.MultiBinary):
        return _float_reader(name, space.shape, (int(np.prod(space.shape)),))
    raise ConfigError(
        f"observation '{name}' is a {type(space).__name__} space, which cannot be converted to an array: select other "
        "observations with environment.observations=[…], or convert it in the environment"
    )


def _float_reader(name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> tuple[ArraySpec, Convert]:
    """Convert values of `shape` to float32 of the shape `target`."""

    def convert(value: Any) -> np.ndarray:
        return shaped_array(name, value, shape).astype(np.float32, order="C", copy=False).reshape(target)

    return ArraySpec(target, "float32"), convert


def _image_reader(name: str, shape: tuple[int, ...]) -> tuple[ArraySpec, Convert]:
    """Convert uint8 (H, W), (H, W, C), (C, H, W), or a stack of the latter two, to (C, H, W)."""
    if len(shape) > 4:
        raise ConfigError(
            f"observation '{name}' has shape {shape}: images have 2, 3 or 4 (stacked) dimensions"
        )
    channels_last = len(shape) > 2 and shape[-1] <= shape[-3]
    frame = (shape[-1], *shape[-3:-1]) if channels_last else shape[-3:] if len(shape) > 2 else (1, *shape)
    stack = shape[0] if len(shape) == 4 else 1
    target = (stack * frame[0], *frame[1:])

    def convert(value: Any) -> np.ndarray:
        image = integer_array(name, shaped_array(name, value, shape), np.uint8)
        image = image.reshape(shape)
        image = np.moveaxis(image, -1, -3) if channels_last else image
        return np.ascontiguousarray(image).reshape(target)

    return ArraySpec(target, "uint8"), convert


def _one_hot_reader(name: str, counts: np.ndarray, starts: np.ndarray) -> tuple[ArraySpec, Convert]:
    # First column of each variable minus its start: adding the value gives the column.
    columns = np.concatenate([[0], np.cumsum(counts)[:-1]]) - starts
    width = int(counts.sum())
    ends = starts + counts

    def convert(value: Any) -> np.ndarray:
        choices = numeric_array(name, value).reshape(-1)
        if choices.shape != columns.shape:
            raise UnusableRow(f"observation '{name}' has {choices.size} integers, not {columns.size}")
        choices = integer_array(name, choices, np.int64)
        # NumPy would count a negative index from the end, and a large one may be a column of the next variable.
        if (choices < starts).any() or (choices >= ends).any():
            limits = ", ".join(f"{low} to {high - 1}" for low, high in zip(starts, ends))
            raise UnusableRow(f"observation '{name}' is {reprlib.repr(choices.tolist())}, not in {limits}")
        vector = np.zeros(width, np.float32)
        vector[columns + choices] = 1.0
        return vector

    return ArraySpec((width,), "float32"), convert


# --- Checks of rows --------------------------------------------------------------------------------------
#
# A single NaN in replay breaks every update that samples it, and one in running statistics stays there. Each
# row is therefore checked before it is used; an unusable row is a fault of its environment (see `EnvRunner`).


class UnusableRow(ValueError):
    """An environment returned an unusable observation, reward or flag; the message starts with its name."""


def numeric_array(name: str, value: Any) -> np.ndarray:
    """Convert an observation to an array; raise UnusableRow unless its dtype is bool, integer or float."""
    array = value if type(value) is np.ndarray else np.asarray(value)
    if array.dtype.kind not in NUMERIC_KINDS:
        raise UnusableRow(f"observation '{name}' has dtype {array.dtype}, not bool, integer or float")
    return array


def shaped_array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Like `numeric_array`, and check the shape; axes of length 1 do not matter."""
    array = numeric_array(name, value)
    if array.shape != shape and [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
        raise UnusableRow(f"observation '{name}' has shape {array.shape}, not {shape}")
    return array


def integer_array(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Convert an array to an integer dtype; raise UnusableRow if a value is out of its range or a fraction."""
    if array.dtype == dtype:
        return array
    limits = np.iinfo(dtype)
    # This form of the condition also rejects NaN.
    if array.size and not (array.min() >= limits.min and array.max() <= limits.max):
        raise UnusableRow(f"observation '{name}' has values outside {limits.min} to {limits.max}")
    integers = array.astype(dtype)
    if array.dtype.kind == "f" and (integers != array).any():  # an image in [0, 1] would become black
        raise UnusableRow(f"observation '{name}' has fractions, but its space has dtype {np.dtype(dtype)}")
    return integers


def typed_array(name: str, value: Any, dtype: Any) -> np.ndarray:
    """Convert an observation to a float or integer dtype; raise UnusableRow if it does not have such values."""
    array = numeric_array(name, value)
    if np.dtype(dtype).kind != "f":
        return integer_array(name, array, dtype)
    with np.errstate(over="ignore"):  # infinity is the next check
        array = array.astype(dtype)
    if not np.isfinite(array).all():
        raise UnusableRow(f"observation '{name}' has NaN or infinity")
    return array


def finite_number(name: str, value: Any) -> float:
    """Convert a reward to a float; raise UnusableRow unless it is finite in float32."""
    number = value
    if not isinstance(value, _PLAIN):
        array = np.asarray(value)
        number = array.item() if array.dtype.kind in NUMERIC_KINDS and array.size == 1 else math.nan
    if not -FLOAT32_MAX <= number <= FLOAT32_MAX:
        raise UnusableRow(f"{name} is {reprlib.repr(value)}, not a finite float32 value")
    return float(number)


def flag(name: str, value: Any) -> bool:
    """Convert a flag to bool; raise UnusableRow for text, NaN and arrays: even "no" is true in Python."""
    if value is True or value is False or value is None:
        return bool(value)
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in NUMERIC_KINDS or array.item() not in (0, 1):
        raise UnusableRow(f"{name} is {reprlib.repr(value)}, not true or false")
    return bool(array.item())


def returned_values(call: str, result: Any, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the result of reset() or step(); raise UnusableRow unless it has these values, with a dict as info."""
    if not isinstance(result, tuple | list) or len(result) != len(names):
        count = f"{len(result)} values" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
        raise UnusableRow(f"{call}() returned {count}, not ({', '.join(names)})")
    if not isinstance(result[-1], Mapping):
        raise UnusableRow(f"info is a {type(result[-1]).__name__}, not a dict")
    return tuple(result)


class ObservationCheck:
    """Checks the observations of one environment against the arrays (N, …) that they are written to."""

    def __init__(self, targets: Mapping[str, np.ndarray]) -> None:
        self._columns = [
            (name, array.shape[1:], array.dtype, array.dtype.kind == "f") for name, array in targets.items()
        ]

    def __call__(self, obs: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the values to write, in the order of the targets; raise UnusableRow for an unusable one."""
        values = []
        for name, shape, dtype, is_float in self._columns:
            if name not in obs:
                raise UnusableRow(f"observation '{name}' is missing")
            value = obs[name]
            if type(value) is not np.ndarray or value.dtype != dtype:
                value = numeric_array(name, value)
                value = value.astype(dtype) if is_float else integer_array(name, value, dtype)
            if value.shape != shape:
                raise UnusableRow(f"observation '{name}' has shape {value.shape}, not {shape}")
            # A finite sum of squares implies finite values and takes a third of the time of `isfinite`. Large
            # values overflow the sum, so `isfinite` decides in that case.
            if is_float and not math.isfinite(np.vdot(value, value)) and not np.isfinite(value).all():
                raise UnusableRow(f"observation '{name}' has NaN or infinity")
            values.append(value)
        return values
