"""What a sweep searches: a YAML file or words of the command line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from rl_lab.errors import ConfigError, one_line, reject_unknown, require_choice

# A file has the same settings as the command line:
#
#   overrides: [+experiment=dreamer_cartpole, training.total_timesteps=6000]
#   search:
#     algorithm.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
#     algorithm.train_ratio: {low: 16, high: 64, step: 16}
#     algorithm.entropy: [1.0e-4, 1.0e-3, 1.0e-2]
#   trials: 40
#   metric: eval/return_mean
#   direction: maximize              # maximize | minimize
#   value: last                      # of a trial: last | best
#   pruner: median                   # median | hyperband | none
#   startup: 10                      # random trials before the search; the median needs half as many to compare with
#   seed: 0                          # of the search; the seed of the runs is experiment.seed

DIRECTIONS = ("maximize", "minimize")
VALUES = ("last", "best")
PRUNERS = ("median", "hyperband", "none")
# Words that the sweep sets for each run.
OWN_WORDS = ("run_dir", "output_root", "logging.progress", "hydra/", "hydra.", "launch")


@dataclass(frozen=True)
class Parameter:
    """One key of the config that is searched. kind: float, int or choice."""

    name: str
    kind: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()

    def suggest(self, trial: Any) -> Any:
        """Ask Optuna's trial for a value."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.name, list(self.choices))
        if self.kind == "int":
            step = {} if self.step is None else {"step": int(self.step)}
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.log, **step)
        return trial.suggest_float(self.name, self.low, self.high, log=self.log, step=self.step)

    def first(self) -> Any:
        """Return one valid value, to check the config with."""
        if self.kind == "choice":
            return self.choices[0]
        return int(self.low) if self.kind == "int" else self.low

    def describe(self) -> str:
        if self.kind == "choice":
            return ", ".join(word_of(choice) for choice in self.choices)
        text = f"{self.low:g} to {self.high:g}"
        text += f" in steps of {self.step:g}" if self.step is not None else ""
        return text + (", integers" if self.kind == "int" else "") + (", logarithmic" if self.log else "")


@dataclass(frozen=True)
class Definition:
    """A sweep: what is run, what is searched, and how."""

    overrides: tuple[str, ...] = ()
    search: tuple[Parameter, ...] = ()
    trials: int = 20
    metric: str = "eval/return_mean"
    direction: str = "maximize"
    value: str = "last"
    pruner: str = "median"
    startup: int = 10
    seed: int = 0
    config_dirs: tuple[str, ...] = field(default=())

    def words(self, values: Mapping[str, Any]) -> list[str]:
        """Return the overrides of a trial with these values."""
        return [*self.overrides, *(f"{name}={word_of(value)}" for name, value in values.items())]

    def to_dict(self) -> dict[str, Any]:
        plain = asdict(self) | {"search": {item.name: _plain(item) for item in self.search}}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


# Settings that a continued sweep may change: they do not change what a trial's value means.
MAY_CHANGE = ("trials", "pruner", "startup", "config_dirs")


def word_of(value: Any) -> str:
    """Return a value as the command line has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, float) else str(value)


def read_definition(file: Path) -> dict[str, Any]:
    """Return the settings of a YAML file."""
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must have keys such as overrides and search, not {found!r:.60}")
    reject_unknown(str(file), found, [item.name for item in fields(Definition)])
    return found


def definition_from(settings: Mapping[str, Any], where: str = "sweep") -> Definition:
    """Check settings and return the Definition. where: what errors start with."""
    values = dict(settings)
    search = values.pop("search", None) or {}
    if not isinstance(search, Mapping):
        raise ConfigError(f"{where}: search must be a mapping from keys to ranges, not {search!r}")
    parameters = tuple(parameter_from(str(name), node) for name, node in search.items())
    if not parameters:
        raise ConfigError(
            f"{where}: search is empty: name a range, such as 'algorithm.learning_rate=tag(log,interval(1e-4,1e-2))'"
        )
    for name in ("overrides", "config_dirs"):
        node = values.get(name) or ()
        if isinstance(node, str) or not all(isinstance(item, str) for item in node):
            raise ConfigError(f"{where}: {name} must be a list of words, not {node!r}")
        values[name] = tuple(node)
    for name, least in (("trials", 1), ("startup", 0), ("seed", 0)):
        number = values.get(name, getattr(Definition, name))
        if not isinstance(number, int) or isinstance(number, bool) or number < least:
            raise ConfigError(f"{where}: {name} must be an integer of at least {least}, not {number!r}")
    for name, allowed in (("direction", DIRECTIONS), ("value", VALUES), ("pruner", PRUNERS)):
        require_choice(f"{where}: {name}", values.get(name, getattr(Definition, name)), allowed)
    definition = Definition(search=parameters, **values)
    searched = {item.name for item in parameters}
    for word in definition.overrides:
        key = word.lstrip("+").partition("=")[0]
        if key in searched:
            raise ConfigError(f"{key} is both set and searched: remove {word}")
        if key.startswith(OWN_WORDS):
            raise ConfigError(f"{word}: the sweep sets {key} for each run; remove it")
    return definition


def parameter_from(name: str, node: Any) -> Parameter:
    """Return the parameter of an entry of `search`: a list of choices, or {low, high, log, step}."""
    where = f"search.{name}"
    if isinstance(node, list | tuple):
        if len(node) < 2:
            raise ConfigError(f"{where} has {len(node)} values: a search needs two or more")
        for value in node:
            if not (value is None or isinstance(value, str | int | float)):
                raise ConfigError(f"{where}: {value!r} is not text, a number, true, false or null")
        return Parameter(name, "choice", choices=tuple(node))
    if not isinstance(node, Mapping):
        raise ConfigError(f"{where} must be a list of values or {{low: …, high: …}}, not {node!r}")
    reject_unknown(where, node, ("low", "high", "log", "step"))
    numbers = {}
    for key in ("low", "high", "step"):
        value = node.get(key)
        if key == "step" and value is None:
            continue
        if isinstance(value, str):  # YAML reads 1e-3 as text
            value = _number(value)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ConfigError(f"{where}.{key} must be a number, not {node.get(key)!r}")
        numbers[key] = value
    low, high, step = numbers["low"], numbers["high"], numbers.get("step")
    log = bool(node.get("log", False))
    if low >= high:
        raise ConfigError(f"{where}: low={low:g} must be below high={high:g}")
    if log and low <= 0:
        raise ConfigError(f"{where}: log needs low above 0, not {low:g}")
    if step is not None and (log or step <= 0 or step > high - low):
        raise ConfigError(
            f"{where}: step={step:g} must be above 0 and fit into the range, and needs log: false"
        )
    whole = all(isinstance(value, int) for value in numbers.values())
    return Parameter(name, "int" if whole else "float", float(low), float(high), log, step)


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def _plain(item: Parameter) -> Any:
    """Return the node that `parameter_from` reads."""
    if item.kind == "choice":
        return list(item.choices)
    number: Callable[[float], float] = int if item.kind == "int" else float
    node: dict[str, Any] = {"low": number(item.low), "high": number(item.high)}
    node |= {"log": True} if item.log else {}
    return node | ({"step": number(item.step)} if item.step is not None else {})


# --- Words of the command line ---


def split_words(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Split words into fixed overrides and nodes of `search`, by Hydra's grammar for sweeps.

    key=1,2,3   key=choice(1,2,3)   key=range(1,9,2)   key=interval(1,8)   key=int(interval(1,8))
    key=tag(log,interval(1e-4,1e-2))
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    fixed: list[str] = []
    search: dict[str, Any] = {}
    for word in words:
        try:
            (override,) = OverridesParser.create().parse_overrides([word])
        except HydraException:
            fixed.append(word)  # the message comes from composing the config
            continue
        if not override.is_sweep_override():
            fixed.append(word)
            continue
        search[word.partition("=")[0]] = _node(override)
    return fixed, search


def _node(override: Any) -> Any:
    sweep = override.value()
    if override.is_choice_sweep():
        return [_text(item) for item in sweep.list]
    if override.is_range_sweep():
        return [_text(item) for item in sweep.range()]
    return {"low": sweep.start, "high": sweep.end, "log": "log" in (sweep.tags or ())}


def _text(item: Any) -> Any:
    if item is None or isinstance(item, bool | int | float | str):
        return item
    text = getattr(item, "text", None)  # a quoted string
    return text if isinstance(text, str) else str(item)
