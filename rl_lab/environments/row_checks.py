"""Which rows of an environment can be used: finite real numbers, in the shapes that its spaces promise.

One NaN in replay stops every update that draws it, and one in running statistics stays there for good. So a row is
checked before anyone sees it; one that cannot be used is a fault of its environment (see `EnvRunner`).
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

NUMBERS = "biuf"  # kinds of dtype: bool, whole numbers, floats
FLOAT32_MAX = float(np.finfo(np.float32).max)
_PLAIN = (float, int)
_TEXT = (str, bytes)


class UnusableRow(ValueError):
    """An environment gave an observation, a reward or a flag that cannot be used; the message begins with its name."""


def real_array(name: str, value: Any) -> np.ndarray:
    """An observation as an array; UnusableRow unless it is of real numbers."""
    array = value if type(value) is np.ndarray else np.asarray(value)
    if array.dtype.kind not in NUMBERS:
        raise UnusableRow(f"observation '{name}' has dtype {array.dtype}, which is not of real numbers")
    return array


def shaped_array(name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """`real_array` of this shape. Axes of length 1 may be missing or be too many: they change no order."""
    array = real_array(name, value)
    if array.shape != shape and [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
        raise UnusableRow(f"observation '{name}' has shape {array.shape}, not {shape}")
    return array


def whole_array(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Real numbers as an array of whole numbers; UnusableRow where this dtype has no place for one of them."""
    if array.dtype == dtype:
        return array
    limits = np.iinfo(dtype)
    if array.size and not (
        array.min() >= limits.min and array.max() <= limits.max
    ):  # nor is NaN between them
        raise UnusableRow(
            f"observation '{name}' has numbers that are not within {limits.min} to {limits.max}"
        )
    return array.astype(dtype)


def finite_number(name: str, value: Any) -> float:
    """A reward as a number that float32 can hold."""
    number = value
    if not isinstance(value, _PLAIN):
        array = np.asarray(value)
        number = array.item() if array.dtype.kind in NUMBERS and array.size == 1 else math.nan
    if not -FLOAT32_MAX <= number <= FLOAT32_MAX:
        raise UnusableRow(f"{name} is {reprlib.repr(value)}, not a finite float32 number")
    return float(number)


def flag(name: str, value: Any) -> bool:
    """`terminated` or `truncated`; text is refused, as any text is true to Python, "no" among them."""
    if isinstance(value, _TEXT):
        raise UnusableRow(f"{name} is {reprlib.repr(value)}, not true or false")
    return bool(value)


class ObservationCheck:
    """Checks one environment's observations, name -> array, against the arrays (N, …) that they are written to."""

    def __init__(self, targets: Mapping[str, np.ndarray]) -> None:
        self._columns = [
            (name, array.shape[1:], array.dtype, array.dtype.kind == "f") for name, array in targets.items()
        ]

    def __call__(self, obs: Mapping[str, Any]) -> list[np.ndarray]:
        """The values to write, in the order of the targets; UnusableRow names what cannot be."""
        values = []
        for name, shape, dtype, is_float in self._columns:
            if name not in obs:
                raise UnusableRow(f"observation '{name}' is missing")
            value = obs[name]
            if type(value) is not np.ndarray or value.dtype != dtype:
                value = real_array(name, value)
                value = value.astype(dtype) if is_float else whole_array(name, value, dtype)
            if value.shape != shape:
                raise UnusableRow(f"observation '{name}' has shape {value.shape}, not {shape}")
            # A finite sum of squares has finite terms only, and takes a third of the time of `isfinite`. Large numbers
            # overflow it, so the other way round it says nothing.
            if is_float and not math.isfinite(np.vdot(value, value)) and not np.isfinite(value).all():
                raise UnusableRow(f"observation '{name}' has NaN or infinity")
            values.append(value)
        return values
