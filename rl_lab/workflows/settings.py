"""Dataclasses as schemas of config sections: values are checked by their annotations, and wrong keys are errors.

    @dataclass(frozen=True)
    class MySettings:
        batch_size: int
        discount: float | Literal["auto"]
        horizons: tuple[int, ...] = (1, 5)
        warmup: int = INTERPOLATED       # for `${algorithm.warmup}` in the config; the code does not read it

    read_settings(MySettings, config.algorithm, "algorithm")

Annotations: bool, int, float, str, Any, Literal, `X | None`, `X | Y`, tuple, dict[str, X], TypedDict, and dataclasses;
`Annotated[dict[str, float], MyTypedDict]` is a dict with the keys of MyTypedDict.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, ClassVar, Literal, Self, TypeVar, Union

from rl_lab.errors import ConfigError, closest, reject_unknown

T = TypeVar("T")


class _Interpolated:
    def __repr__(self) -> str:
        return "INTERPOLATED"


# Default of a field that only interpolations of the config read: a known key that the code does not need.
INTERPOLATED: Any = _Interpolated()


def read_settings(schema: type[T], node: Mapping[str, Any], path: str) -> T:
    """Create the dataclass from a config section. Keys that it lacks are left to `unknown_keys`.

    path: where the section is in the config, for messages
    """
    absent = missing_keys(schema, node)
    if absent:
        raise ConfigError(f"{path}.{f', {path}.'.join(absent)} must be set: the config has no value for it")
    hints: dict[str, Any] = _hints(schema)  # type: ignore[arg-type]
    values = {
        item.name: _value(hints[item.name], node[item.name], f"{path}.{item.name}")
        for item in fields(schema)  # type: ignore[arg-type]
        if item.name in node and item.default is not INTERPOLATED
    }
    return schema(**values)


def missing_keys(schema: type, node: Mapping[str, Any]) -> list[str]:
    """Names of the fields without a default that the section does not have."""
    return [
        item.name
        for item in fields(schema)
        if item.default is MISSING and item.default_factory is MISSING and item.name not in node
    ]


def unknown_keys(schema: Any, node: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each key that the schema lacks, in all levels, and the names that are known there."""
    section = _section(schema, node)
    if section is None:
        return
    hints = _hints(section)
    for key, value in node.items():
        if key not in hints:
            yield f"{path}.{key}", list(hints)
        else:
            yield from unknown_keys(hints[key], value, f"{path}.{key}")


@cache
def _hints(schema: Any) -> dict[str, Any]:
    """Name -> annotation of each key of a dataclass or TypedDict."""
    hints = {name: _plain(hint) for name, hint in typing.get_type_hints(schema, include_extras=True).items()}
    return {item.name: hints[item.name] for item in fields(schema)} if is_dataclass(schema) else hints


def _plain(hint: Any) -> Any:
    """`Annotated[X, Y]` -> Y."""
    return typing.get_args(hint)[1] if typing.get_origin(hint) is typing.Annotated else hint


def _section(annotation: Any, node: Any) -> Any:
    """The dataclass or TypedDict that an annotation gives for a mapping: of several the one that fits best."""
    if not isinstance(node, Mapping):
        return None
    options = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    sections = [option for option in options if is_dataclass(option) or typing.is_typeddict(option)]
    return max(sections, key=lambda section: len(set(node) & set(_hints(section))), default=None)


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def _value(annotation: Any, value: Any, path: str) -> Any:
    """The value of one key as its annotation says, or ConfigError."""
    if annotation is Any:
        return value
    if annotation in _SIMPLE:
        words, fits = _SIMPLE[annotation]
        if not fits(value):
            raise ConfigError(f"{path} must be {words}, not {value!r}")
        return annotation(value)
    if _is_union(annotation):
        return _union(annotation, value, path)
    section = _section(annotation, {} if value is None else value)
    if section is not None:
        return _read_section(section, {} if value is None else value, path)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        if value not in inner:
            raise ConfigError(f"{path} is '{value}'.{closest(str(value), map(str, inner))}")
        return value
    if origin is tuple:
        return _tuple(inner, value, path)
    if origin is dict and isinstance(value, Mapping):
        return {str(key): _value(inner[1], item, f"{path}.{key}") for key, item in value.items()}
    raise ConfigError(f"{path} must be a mapping, not {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_SIMPLE: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", lambda value: isinstance(value, bool)),
    # YAML reads 1e6 as a float.
    int: ("an integer", lambda value: _is_number(value) and math.isfinite(value) and value == int(value)),
    float: ("a number", _is_number),
    str: ("a string", lambda value: isinstance(value, str)),
}


def _union(annotation: Any, value: Any, path: str) -> Any:
    options = typing.get_args(annotation)
    if value is None and type(None) in options:
        return None
    section = _section(annotation, value)
    if section is not None:
        return _read_section(section, value, path)
    reasons = []
    for option in options:
        try:
            return _value(option, value, path)
        except ConfigError as error:
            reasons.append(error)
    raise reasons[0]


def _read_section(section: type, node: Any, path: str) -> Any:
    if not isinstance(node, Mapping):
        raise ConfigError(f"{path} must be a mapping, not {node!r}")
    hints = _hints(section)
    reject_unknown(path, node, hints)
    if is_dataclass(section):
        settings: Any = read_settings(section, node, path)
        return settings
    required: frozenset[str] = getattr(section, "__required_keys__", frozenset())
    absent = sorted(key for key in required if key not in node)
    if absent:
        raise ConfigError(f"{path} has no value for {', '.join(absent)}: add one")
    return {str(key): _value(hints[key], value, f"{path}.{key}") for key, value in node.items()}


def _tuple(inner: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigError(f"{path} must be a list, not {value!r}")
    kinds = [inner[0]] * len(value) if inner[1:] == (...,) else list(inner)
    if len(kinds) != len(value):
        raise ConfigError(f"{path} must have {len(kinds)} values, not {len(value)}")
    return tuple(_value(kind, item, path) for kind, item in zip(kinds, value))


# ---------------------------------------------------------------- of a workflow


class Settings:
    """Subclasses are frozen dataclasses; a workflow names its own as `settings_type`.

    Keys of `algorithm` that are not fields are refused when a config is composed.
    """

    algorithm: ClassVar[str] = ""  # the file configs/algorithm/<algorithm>.yaml has every field

    @classmethod
    def from_config(cls, section: Mapping[str, Any]) -> Self:
        absent = missing_keys(cls, section)
        if absent:
            raise ConfigError(
                f"algorithm.{', algorithm.'.join(absent)}: not in the config; "
                f"add `- /algorithm: {cls.algorithm}` to the experiment's defaults, which sets all of them"
            )
        settings = read_settings(cls, section, "algorithm")
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ConfigError for a value that its type allows and the algorithm does not."""


def check_parts(steps: int, batch_size: int) -> None:
    """Raise ConfigError unless a batch has `algorithm.grad_acc_steps` equal parts."""
    if steps < 1 or batch_size % steps:
        raise ConfigError(
            f"algorithm.grad_acc_steps is {steps}: choose a divisor of algorithm.batch_size ({batch_size})"
        )


@dataclass(frozen=True)
class NoSettings(Settings):
    """Of a workflow that reads nothing from `algorithm`."""
