"""A dataclass is the schema of a config section: types, missing keys, unknown keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

import pytest
from omegaconf import OmegaConf

from rl_lab.errors import ConfigError
from rl_lab.workflows.settings import INTERPOLATED, read_settings, unknown_keys


class Scales(TypedDict):
    reward: float
    value: float


class Partial(TypedDict, total=False):
    one: float
    two: float


@dataclass(frozen=True)
class Stop:
    patience: int = 0
    above: float = 0.0


@dataclass(frozen=True)
class Small:
    width: int


@dataclass(frozen=True)
class Large:
    width: int
    depth: int


@dataclass(frozen=True)
class Example:
    count: int
    rate: float
    flag: bool
    name: str
    pad: Literal["left", "right"]
    discount: float | Literal["auto"]
    limit: int | None
    lengths: int | tuple[int, ...]
    pair: tuple[float, int]
    scales: Annotated[dict[str, float], Scales]
    some: Annotated[dict[str, float], Partial]
    free: dict[str, float]
    stop: Stop = field(default_factory=Stop)
    size: Small | Large = INTERPOLATED
    warmup: int = INTERPOLATED


VALID: dict[str, Any] = {
    "count": 1e3,  # YAML reads 1e3 as a float
    "rate": 1,
    "flag": True,
    "name": "x",
    "pad": "left",
    "discount": "auto",
    "limit": None,
    "lengths": [5, 6],
    "pair": [1, 2],
    "scales": {"reward": 1, "value": 2.5},
    "some": {"two": 3},
    "free": {"a": 1},
    "stop": None,
    "size": {"width": "anything"},
}


def read(**changes: Any) -> Example:
    return read_settings(Example, OmegaConf.create(VALID | changes), "algorithm")  # type: ignore[arg-type]


def test_values_have_the_types_of_the_annotations():
    assert read() == Example(
        count=1000,
        rate=1.0,
        flag=True,
        name="x",
        pad="left",
        discount="auto",
        limit=None,
        lengths=(5, 6),
        pair=(1.0, 2),
        scales={"reward": 1.0, "value": 2.5},
        some={"two": 3.0},
        free={"a": 1.0},
        stop=Stop(),
    )
    settings = read()
    assert type(settings.count) is int and type(settings.rate) is float
    assert (read(discount=0.5).discount, read(lengths=7).lengths, read(limit=3).limit) == (0.5, 7, 3)
    assert read(stop={"patience": 2}).stop == Stop(patience=2)
    assert settings.size is INTERPOLATED


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"count": 1.5}, r"algorithm\.count must be an integer, not 1.5"),
        ({"count": True}, r"algorithm\.count must be an integer, not True"),
        ({"rate": "fast"}, r"algorithm\.rate must be a number, not 'fast'"),
        ({"flag": "false"}, r"algorithm\.flag must be true or false, not 'false'"),
        ({"name": None}, r"algorithm\.name must be a string, not None"),
        ({"pad": "lift"}, r"algorithm\.pad is 'lift'. Did you mean 'left'"),
        ({"discount": "aut"}, r"algorithm\.discount must be a number, not 'aut'"),
        ({"lengths": "long"}, r"algorithm\.lengths must be an integer, not 'long'"),
        ({"pair": [1]}, r"algorithm\.pair must have 2 values, not 1"),
        ({"pair": 3}, r"algorithm\.pair must be a list, not 3"),
        ({"scales": {"reward": 1}}, r"algorithm\.scales has no value for value: add one"),
        ({"scales": {"reward": 1, "value": 1, "rewards": 2}}, r"algorithm\.scales .*Did you mean 'reward'"),
        ({"some": {"on": 2}}, r"algorithm\.some .*Did you mean 'one'"),
        ({"free": 3}, r"algorithm\.free must be a mapping, not 3"),
        ({"stop": {"patient": 2}}, r"algorithm\.stop .*Did you mean 'patience'"),
        ({"stop": 4}, r"algorithm\.stop must be a mapping, not 4"),
    ],
)
def test_wrong_values_are_errors(changes: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        read(**changes)


def test_missing_keys_are_errors():
    node = {key: value for key, value in VALID.items() if key not in ("rate", "pad", "stop", "size")}
    with pytest.raises(ConfigError, match=r"algorithm\.rate, algorithm\.pad must be set"):
        read_settings(Example, node, "algorithm")


def test_unknown_keys_in_all_levels():
    node = VALID | {
        "cuont": 1,
        "stop": {"abov": 1},
        "scales": {"x": 1},
        "size": {"width": 1, "depth": 2, "units": 3},
    }
    found = dict(unknown_keys(Example, node, "algorithm"))
    assert list(found) == [
        "algorithm.scales.x",
        "algorithm.stop.abov",
        "algorithm.size.units",
        "algorithm.cuont",
    ]
    assert found["algorithm.stop.abov"] == ["patience", "above"]
    assert found["algorithm.size.units"] == ["width", "depth"]  # Large has more of the keys than Small
    assert list(unknown_keys(Example, VALID | {"size": {"width": 1}}, "algorithm")) == []
