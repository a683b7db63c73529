"""Values of a config that would otherwise fail late, or worse, mean something else than was written.

`logging.tensorboard=flase` is text, and text counts as true; `total_timestep:` in an experiment's file is a new key
that nobody reads. Both are said here, before anything is built. What belongs to an algorithm or a suite is checked
where it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl_lab.errors import ConfigError, closest

CONFIG_FOLDER = Path(__file__).parents[1] / "configs"
ROOT_FILE = CONFIG_FOLDER / "config.yaml"
# Sections whose keys are all in the root config.
CLOSED = ("experiment", "training", "logging", "wandb", "load")
SECTIONS = (*CLOSED, "algorithm", "components", "controllers", "buffers", "optimizers")
GROUPS = ("environment", "workflow", "hydra")  # root keys that come with a group
SIMILAR = 0.75  # a new root key so close to a known one is a slip of the pen; others are the user's own

Rule = tuple[str, Callable[[Any], bool]]  # what the value must be, in words and as a test


def whole(least: int, *more: Any) -> Rule:
    """A whole number of at least `least` (YAML reads 1e6 as a float), or one of `more`."""
    words = f"a whole number of at least {least}" + "".join(f" or {_shown(value)}" for value in more)
    return words, lambda value: _among(value, more) or (_is_number(value) and value == int(value) >= least)


def positive(*more: Any) -> Rule:
    words = "a number above 0" + "".join(f" or {_shown(value)}" for value in more)
    return words, lambda value: _among(value, more) or (_is_number(value) and value > 0)


def one_of(*names: Any) -> Rule:
    return " or ".join(map(_shown, names)), lambda value: _among(value, names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _among(value: Any, options: tuple[Any, ...]) -> bool:
    return any(type(value) is type(option) and value == option for option in options)


def _shown(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


FLAG: Rule = one_of(True, False)
TEXT: Rule = ("text", lambda value: isinstance(value, str) and bool(value))
PATH: Rule = ("a path or null", lambda value: value is None or (isinstance(value, str) and "\0" not in value))
SECTION: Rule = ("a group of keys", lambda value: isinstance(value, Mapping))
NAMES: Rule = (
    "a list of names, all or null",
    lambda value: (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    ),
)
EVERY: Rule = whole(1, None)
STOP: Rule = one_of("stop", "continue")

RULES: dict[str, Rule] = {
    "experiment.name": ("a name", lambda value: isinstance(value, str | int) and value != ""),
    "experiment.seed": (
        "a whole number",
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    ),
    "experiment.device": TEXT,
    "algorithm.batch_size": whole(1),
    "algorithm.batch_length": whole(1),
    "algorithm.train_ratio": positive(None),
    "training.total_timesteps": whole(1, None),
    "training.phases": ("a list", lambda value: isinstance(value, list)),
    "training.precision": TEXT,
    "training.capture": FLAG,
    "training.prefetch": whole(0, "auto"),
    "training.threads": whole(1),
    "training.resume_path": PATH,
    **{f"training.{name}": SECTION for name in ("log", "evaluate", "report", "checkpoint")},
    **{
        f"training.{name}.every_{counter}": EVERY
        for name in ("log", "evaluate", "report", "checkpoint")
        for counter in ("env_steps", "updates", "cycles")
    },
    "training.evaluate.episodes": whole(1),
    "training.evaluate.sample": FLAG,
    "training.evaluate.video": FLAG,
    "training.checkpoint.keep": whole(1),
    "training.checkpoint.keep_weights": whole(-1),
    "training.checkpoint.epoch_weights": whole(0),
    "training.on_nonfinite": STOP,
    "training.on_save_failure": STOP,
    "training.on_damaged_replay": one_of("older", "skip", "stop"),
    "training.profile": whole(0),
    "load.path": PATH,
    "load.components": NAMES,
    "load.controllers": NAMES,
    "logging.tensorboard": FLAG,
    "logging.progress": one_of("auto", "live", "plain", "off"),
    "wandb.mode": one_of("online", "offline", "disabled"),
    "run_dir": PATH,
    "output_root": PATH,
    **{name: SECTION for name in (*SECTIONS, "environment", "workflow")},
}


def check_config(config: Mapping[str, Any]) -> None:
    """ConfigError for the first key that is unknown or has a value of the wrong kind. config: plain and resolved."""
    check_keys(config)
    check_values(config)


def check_values(config: Mapping[str, Any]) -> None:
    """ConfigError for the first section that is missing, or value of the wrong kind. config: plain and resolved."""
    for section in (*SECTIONS, *GROUPS[:2]):
        if section not in config:
            raise ConfigError(f"the config has no '{section}'")
    for path, (expected, fits) in RULES.items():
        for value in _values(config, path):
            if not fits(value):
                hint = closest(str(value), expected.split(" or ")) if isinstance(value, str) else ""
                near = hint.partition(" Known:")[0] if "Did you mean" in hint else ""
                raise ConfigError(f"{path} must be {expected}, not {value!r}.{near}")


def check_keys(config: Mapping[str, Any]) -> None:
    """Unknown keys in sections that are ours, and root keys that look like a misspelt one."""
    import difflib

    known = root_keys()
    for section in CLOSED:
        node = config.get(section)
        for key in node if isinstance(node, Mapping) else ():
            if key not in known[section]:
                raise ConfigError(
                    f"the config has no key '{section}.{key}'.{closest(str(key), known[section])}"
                )
    environment = config.get("environment")
    environment = environment if isinstance(environment, Mapping) else {}
    evaluation = environment.get("eval")
    for key in evaluation if isinstance(evaluation, Mapping) else ():
        if key not in environment:
            raise ConfigError(
                f"the config has no key 'environment.eval.{key}'.{closest(str(key), [k for k in environment if k != 'eval'])}"
            )
    roots = (*known, *GROUPS)
    for key in config:
        if key not in roots and difflib.get_close_matches(str(key), roots, n=1, cutoff=SIMILAR):
            raise ConfigError(f"the config has no key '{key}'.{closest(str(key), roots)}")


@cache
def root_keys() -> dict[str, Any]:
    """The root config as it stands in its file: every key that it has, by section."""
    import yaml

    content: dict[str, Any] = yaml.safe_load(ROOT_FILE.read_text())
    return {key: node for key, node in content.items() if key != "defaults"}


def check_kinds(config: Mapping[str, Any], usual: Mapping[str, Any], paths: Iterable[str]) -> None:
    """Values given on the command line are of the kind that the files state: a number stays a number.

    config, usual: plain, with and without those words; paths: the keys that they set. Null, interpolations and what
    is null or text in the files may be anything here.
    """
    for path in paths:
        for now, then in zip(_values(config, path), _values(usual, path)):
            if now is None or then is None or isinstance(then, str) or str(now).startswith("${"):
                continue
            if _kind(now) != _kind(then):
                raise ConfigError(f"{path} must be {_kind(then)}, such as {then!r}, not {now!r}")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, Mapping):
        return "a group of keys"
    return "a list" if isinstance(value, list) else "text"


def _values(config: Mapping[str, Any], path: str) -> Iterator[Any]:
    """The value at a path, if the config has one."""
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return
        node = node[key]
    yield node


def check_size(word: str, config: DictConfig) -> None:
    """`size=NAME` composes with any experiment. Where most of its widths are new they are of other networks.

    config: without that word
    """
    stated = config.algorithm.get("size")
    file = CONFIG_FOLDER / "size" / f"{word.removeprefix('size=')}.yaml"
    if stated is None or not file.exists():
        return
    widths = _keys(file)
    foreign = [key for key in widths if key not in stated]
    if 2 * len(foreign) <= len(widths):
        return
    fitting = [folder.name for folder in CONFIG_FOLDER.glob("*_size") if _fits(folder, stated)]
    advice = f"use {fitting[0]}=NAME" if fitting else "set algorithm.size.KEY=NUMBER"
    raise ConfigError(
        f"{word} is made for other networks: {config.experiment.name} has no {', '.join(foreign[:3])}; {advice}"
    )


def _fits(folder: Path, stated: Iterable[Any]) -> bool:
    return all(key in stated for file in folder.glob("*.yaml") for key in _keys(file))


def _keys(file: Path) -> list[str]:
    return [str(key) for key in OmegaConf.load(file)]
