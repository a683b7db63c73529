"""Checks a config for unknown keys and values of the wrong type, before anything is built.

Without these checks `logging.tensorboard=flase` would be a string, which counts as true, and
`total_timestep:` in an experiment would be a new key that nothing reads. algorithm_keys.py checks `algorithm`; keys of
a suite are checked where they are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rl_lab.errors import ConfigError, closest

CONFIG_FOLDER = Path(__file__).parents[1] / "configs"
ROOT_FILE = CONFIG_FOLDER / "config.yaml"
# Sections whose keys are all in the root config.
CLOSED_SECTIONS = ("experiment", "training", "logging", "wandb", "load")
SECTIONS = (*CLOSED_SECTIONS, "algorithm", "components", "controllers", "buffers", "optimizers")
GROUPS = ("environment", "workflow", "launch", "hydra")  # root keys that a group adds
SIMILAR = 0.75  # a new root key this close to a known one is a typo; other keys belong to the user

Rule = tuple[str, Callable[[Any], bool]]  # description of valid values, and a test


def integer(least: int, *more: Any) -> Rule:
    """Rule for an integer of at least `least` (YAML reads 1e6 as a float), or one of `more`."""
    text = f"an integer of at least {least}" + "".join(f" or {_shown(value)}" for value in more)
    return text, lambda value: _among(value, more) or (_is_number(value) and value == int(value) >= least)


def positive(*more: Any) -> Rule:
    text = "a number above 0" + "".join(f" or {_shown(value)}" for value in more)
    return text, lambda value: _among(value, more) or (_is_number(value) and value > 0)


def at_least(least: float) -> Rule:
    return f"a number of at least {least:g}", lambda value: _is_number(value) and value >= least


def one_of(*names: Any) -> Rule:
    return " or ".join(map(_shown, names)), lambda value: _among(value, names)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _among(value: Any, options: tuple[Any, ...]) -> bool:
    return any(type(value) is type(option) and value == option for option in options)


def _shown(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


FLAG: Rule = one_of(True, False)
TEXT: Rule = ("a string", lambda value: isinstance(value, str) and bool(value))
PATH: Rule = ("a path or null", lambda value: value is None or (isinstance(value, str) and "\0" not in value))
SECTION: Rule = ("a mapping", lambda value: isinstance(value, Mapping))
NAMES: Rule = (
    "a list of names, all or null",
    lambda value: (
        value is None
        or isinstance(value, str)
        or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    ),
)
LINES: Rule = (
    "a list of strings",
    lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
)
EVERY: Rule = integer(1, None)
OPTIONAL: Rule = ("a mapping or null", lambda value: value is None or isinstance(value, Mapping))
NUMBER: Rule = ("a number or null", lambda value: value is None or _is_number(value))
STOP: Rule = one_of("stop", "continue")

RULES: dict[str, Rule] = {
    "experiment.name": ("a name", lambda value: isinstance(value, str | int) and value != ""),
    "experiment.seed": (
        "an integer",
        lambda value: isinstance(value, int) and not isinstance(value, bool),
    ),
    "experiment.device": TEXT,
    "algorithm.batch_size": integer(1),
    "algorithm.batch_length": integer(1),
    "algorithm.train_ratio": positive(None),
    "algorithm.learning_rate": positive(),
    "algorithm.discount_horizon": at_least(1),
    "algorithm.free_nats": at_least(0),
    **{
        f"environment.{name}{key}": rule
        for name in ("", "eval.")
        for key, rule in (
            ("timeout", positive(None)),
            ("normalize_observations", FLAG),
            ("normalize_clip", positive(None)),
            ("history_limit", integer(0)),
        )
    },
    "training.total_timesteps": integer(1, None),
    "training.phases": ("a list", lambda value: isinstance(value, list)),
    "training.precision": TEXT,
    "training.capture": FLAG,
    "training.prefetch": integer(0, "auto"),
    "training.threads": integer(1),
    "training.resume_path": PATH,
    **{f"training.{name}": SECTION for name in ("log", "collect", "evaluate", "report", "checkpoint")},
    **{
        f"training.{name}.every_{counter}": EVERY
        for name in ("log", "evaluate", "report", "checkpoint")
        for counter in ("env_steps", "updates", "cycles")
    },
    "training.evaluate.episodes": integer(1),
    "training.evaluate.sample": FLAG,
    "training.evaluate.temperature": positive(),
    "training.collect.temperature": positive(),
    "training.evaluate.video": FLAG,
    "training.checkpoint.keep": integer(1),
    "training.checkpoint.keep_weights": integer(-1),
    "training.checkpoint.epoch_weights": integer(0),
    "training.on_nonfinite": STOP,
    "training.on_save_failure": STOP,
    "training.on_side_failure": STOP,
    "training.on_damaged_replay": one_of("older", "skip", "stop"),
    "training.profile": integer(0),
    "training.stop_when": OPTIONAL,
    "training.stop_when.metric": ("the name of a metric, such as eval/return_mean", TEXT[1]),
    "training.stop_when.at_least": NUMBER,
    "training.stop_when.at_most": NUMBER,
    "training.stop_when.times": integer(1),
    "training.stop_when.patience": integer(1, None),
    "training.stop_when.better": one_of("larger", "smaller"),
    "training.stop_when.after_env_steps": integer(0),
    "callbacks": OPTIONAL,
    "load.path": PATH,
    "load.components": NAMES,
    "load.controllers": NAMES,
    "logging.tensorboard": FLAG,
    "logging.progress": one_of("auto", "live", "notebook", "plain", "off"),
    "logging.trackio": ("a name or null", PATH[1]),
    "wandb.mode": one_of("online", "offline", "disabled"),
    "launch.name": one_of("single", "pack", "slurm", "ray"),
    "launch.cluster": one_of("slurm", "local"),
    **{
        f"launch.{name}": ("a name or null", PATH[1])
        for name in ("partition", "account", "qos", "constraint")
    },
    **{f"launch.{name}": integer(1) for name in ("time", "memory_gb", "grace")},
    "launch.cpus": positive(),
    **{f"launch.{name}": integer(0) for name in ("gpus", "requeues")},
    "launch.at_once": integer(1, None),
    "launch.address": ("an address or null", PATH[1]),
    **{f"launch.{name}": integer(1) for name in ("collectors", "chunk")},
    "launch.max_staleness": integer(0, None),
    "launch.timeout": positive(),
    "launch.restarts": integer(0),
    **{f"launch.{name}": one_of("cluster", "local") for name in ("evaluation", "population")},
    "launch.setup": LINES,
    "launch.extra": SECTION,
    "launch.wait": FLAG,
    "launch.per_gpu": integer(1),
    "launch.threads": integer(1),
    "launch.mps": one_of("auto", "on", "off"),
    "run_dir": PATH,
    "output_root": PATH,
    **{name: SECTION for name in (*SECTIONS, "environment", "workflow")},
}


OPTIMIZER_RULES: dict[str, Rule] = {
    "lr": at_least(0),
    "modules": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
}


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown key or a value of the wrong type. config: plain and resolved."""
    check_keys(config)
    check_values(config)


def check_values(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for a missing section or a value of the wrong type. config: plain and resolved."""
    for section in (*SECTIONS, *GROUPS[:2]):
        if section not in config:
            raise ConfigError(f"{section} is missing from the config: add this section")
    check_rules(config)


# Keys that every saved config has since 2026-11-15; newer ones have a default where they are read.
_REQUIRED = (
    "experiment.name experiment.seed experiment.device training.total_timesteps training.phases "
    "training.precision training.capture training.fast_path training.prefetch training.threads "
    "training.resume_path training.log.every_env_steps training.log.every_updates "
    "training.evaluate.every_env_steps training.evaluate.every_updates training.evaluate.episodes "
    "training.evaluate.sample training.evaluate.video training.report.every_env_steps "
    "training.report.every_updates training.checkpoint.every_env_steps training.checkpoint.every_updates "
    "training.checkpoint.keep training.checkpoint.keep_weights training.checkpoint.epoch_weights "
    "training.on_nonfinite training.on_save_failure training.profile load.path load.components "
    "load.controllers logging.tensorboard logging.progress wandb.mode wandb.project "
)


def check_complete(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a saved config lacks a key that every run has. config: plain."""
    for path in _REQUIRED.split():
        if not list(_values(config, path)):
            raise ConfigError(f"{path} is missing")


def check_present(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if overrides removed a key of the root config, or replaced a section. config: not resolved."""
    for section in (*SECTIONS, "environment", "workflow"):
        node = config.get(section, {})
        if not isinstance(node, Mapping) and not str(node).startswith("${"):
            raise ConfigError(f"{section} must be {SECTION[0]}, not {node!r}")
    for section in CLOSED_SECTIONS:
        for path in _leaf_paths(root_keys()[section], section):
            if not list(_values(config, path)) and not _replaced(config, path):
                raise ConfigError(f"{path} is missing: leave out ~{path}, or set it to a value")


def _leaf_paths(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _leaf_paths(value, f"{path}.{key}")
    else:
        yield path


def _replaced(config: Mapping[str, Any], path: str) -> bool:
    """Whether a part of the path is no mapping, such as `training=3`: `check_rules` names it."""
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping):
            return True
        node = node.get(key, {})
    return False


def check_rules(config: Mapping[str, Any], prefix: str = "") -> None:
    """Raise ConfigError for a value of the wrong type at a path that starts with `prefix`."""
    for path, (expected, fits) in RULES.items():
        for value in _values(config, path) if path.startswith(prefix) else ():
            if not fits(value):
                hint = closest(str(value), expected.split(" or ")) if isinstance(value, str) else ""
                near = hint.partition(" Known:")[0] if "Did you mean" in hint else ""
                raise ConfigError(f"{path} must be {expected}, not {value!r}.{near}")
    optimizers = config.get("optimizers")
    for name, node in optimizers.items() if isinstance(optimizers, Mapping) else ():
        for key, (expected, fits) in OPTIMIZER_RULES.items() if isinstance(node, Mapping) else ():
            path = f"optimizers.{name}.{key}"
            if key in node and path.startswith(prefix) and not fits(node[key]):
                raise ConfigError(f"{path} must be {expected}, not {node[key]!r}")


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ConfigError for unknown keys in closed sections, and for root keys that look like a typo."""
    import difflib

    known = root_keys()
    for section in CLOSED_SECTIONS:
        node = config.get(section)
        for key in node if isinstance(node, Mapping) else ():
            if key not in known[section]:
                raise ConfigError(f"{section}.{key} is not a known key.{closest(str(key), known[section])}")
    environment = config.get("environment")
    environment = environment if isinstance(environment, Mapping) else {}
    evaluation = environment.get("eval")
    for key in evaluation if isinstance(evaluation, Mapping) else ():
        if key not in environment:
            raise ConfigError(
                f"environment.eval.{key} is not a known key.{closest(str(key), [k for k in environment if k != 'eval'])}"
            )
    roots = (*known, *GROUPS)
    for key in config:
        if key not in roots and difflib.get_close_matches(str(key), roots, n=1, cutoff=SIMILAR):
            raise ConfigError(f"{key} is not a known key.{closest(str(key), roots)}")


@cache
def root_keys() -> dict[str, Any]:
    """Return the root config file as a dict, without its defaults list."""
    import yaml

    content: dict[str, Any] = yaml.safe_load(ROOT_FILE.read_text(encoding="utf-8"))
    return {key: node for key, node in content.items() if key != "defaults"}


def check_types(config: Mapping[str, Any], default: Mapping[str, Any], paths: Iterable[str]) -> None:
    """Check that overrides have the type of the value in the config files: a number stays a number.

    config, default: plain configs with and without the overrides; paths: the keys that they set. Null and
    interpolations are allowed, and a value that is null or a string in the files may get any type.
    """
    for path in paths:
        for new, old in zip(_values(config, path), _values(default, path)):
            if new is None or old is None or isinstance(old, str) or str(new).startswith("${"):
                continue
            if _type_name(new) != _type_name(old):
                raise ConfigError(f"{path} must be {_type_name(old)}, such as {old!r}, not {new!r}")


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, Mapping):
        return "a mapping"
    return "a list" if isinstance(value, list) else "a string"


def _values(config: Mapping[str, Any], path: str) -> Iterator[Any]:
    """Yield the value at a path, if the config has one."""
    node: Any = config
    for key in path.split("."):
        if not isinstance(node, Mapping) or key not in node:
            return
        node = node[key]
    yield node
