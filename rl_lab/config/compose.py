"""From words on the command line to one resolved config.

Hydra composes; this file adds what Hydra does not know: the sizes that come from the environment, the
spelling `+experiment=`, and messages that say what would have been right.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.config.checks import CONFIG_FOLDER as CONFIG_FOLDER
from rl_lab.config.checks import check_config, check_kinds, check_size, root_keys
from rl_lab.errors import ConfigError, LabError, closest, one_line
from rl_lab.records import Spec

# --------------------
# What other packages add to the lab without a fork, found by their entry points.
#
#     [project.entry-points."rl_lab.environments"]
#     corridor = "lab_extension.corridor"          # suite -> adapter module (see environments/make.py)
#
#     [project.entry-points."rl_lab.configs"]
#     lab_extension = "lab_extension.configs"      # any name -> package with YAML files in our groups
#
# Workflows, components and buffers need none: a config names them by `_target_`.


CONFIG_GROUP = "rl_lab.configs"


def config_folders() -> list[Path]:
    """Folders of configs that installed packages offer, in the order of their names."""
    folders: dict[Path, None] = {}
    for point in sorted(entry_points(group=CONFIG_GROUP), key=lambda point: point.name):
        try:
            spec = importlib.util.find_spec(point.value)
        except (ImportError, ValueError, AttributeError) as error:  # another package's fault is not ours
            spec, reason = None, f" ({error})"
        else:
            reason = ""
        if spec is None or not spec.submodule_search_locations:
            warnings.warn(
                f"the entry point '{point.name}' of group {CONFIG_GROUP} names '{point.value}', which is no package "
                f"that can be found{reason}: its configs are left out",
                stacklevel=2,
            )
            continue
        folders |= dict.fromkeys(Path(place).resolve() for place in spec.submodule_search_locations)
    return list(folders)


# A word that sets one key of a section whose keys we do not know by heart.
OPEN_KEY = re.compile(r"\+{0,2}((?:algorithm|components|controllers|optimizers|buffers)\.[\w.]+)=")

# What Hydra logs about an error it also raises; we say it once.
logging.getLogger("hydra").addHandler(logging.NullHandler())


def compose_config(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path | str] = ()) -> DictConfig:
    """Compose the config for these overrides. `_dims` is not filled yet: see `fill_dims`."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    register_resolvers()
    words = with_search_path([normalise_override(word) for word in overrides], config_dirs)
    keys = {match[1]: word for word in words if (match := OPEN_KEY.match(word))}
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("rl_lab.configs", version_base="1.3"):
            config = compose("config", overrides=words)
            size = next((word for word in words if word.startswith("size=")), None)
            if size is not None:
                bare = [word for word in words if not word.startswith(("size=", "debug="))]
                check_size(size, compose("config", overrides=bare))
            others = [word for word in words if word not in keys.values()]
            usual = compose("config", overrides=others) if keys else config
        given: Any = OmegaConf.to_container(config)
        stated: Any = OmegaConf.to_container(usual)
        check_kinds(given, stated, keys)
    except LabError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, words, config_dirs)) from error
    except Exception as error:  # a config file that is no YAML, a path that is none, what Hydra trips over
        raise ConfigError(f"the config cannot be composed: {one_line(error)}") from error
    check_targets(config)
    return config


def normalise_override(word: str) -> str:
    """One spelling for what means the same to a user, though not to Hydra.

    `+experiment=x` is `experiment=x`, since the group is always in our defaults list; and
    `components/encoder@components.encoder=x`, as it stands in defaults lists, is `components/encoder=x`;
    `environment.eval.x=…` may set whatever `environment.x` may (checked in config_checks.py), listed there or not.
    """
    word = re.sub(r"^(environment\.eval\.\w+=)", r"++\1", word)
    word = re.sub(r"^\+(experiment|size|debug)=", r"\1=", word)
    place = re.match(r"^(\+?)([\w/]+)@([\w.]+)=", word)
    if place and place[2].replace("/", ".") == place[3]:
        return f"{place[1]}{place[2]}={word[place.end() :]}"
    return word


def register_resolvers() -> None:
    """Arithmetic for sizes: `${add:${_dims.observation},10}`, `${mul:…}`, `${floordiv:…}`."""
    resolvers = {
        "add": lambda *numbers: sum(numbers),
        "mul": lambda first, second: first * second,
        "floordiv": lambda first, second: first // second,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def with_search_path(words: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> list[str]:
    """The overrides, with every folder of configs beside ours in `hydra.searchpath`.

    Searched in this order: what the user gives as `hydra.searchpath=[…]`, `--config-dir` folders, ./configs of
    the user's own project, and the configs of installed packages (see extensions.py). Ours come first of all.
    """
    given: list[str] = []
    others: list[str] = []
    for word in words:
        path = re.fullmatch(r"\+{0,2}hydra\.searchpath=\[(.*)\]", word)
        if path:
            given += [item.strip() for item in path[1].split(",") if item.strip()]
        else:
            others.append(word)
    folders = [
        str(folder).replace("\\", "\\\\").replace("'", "\\'") for folder in search_folders(config_dirs)
    ]
    places = given + [f"'file://{folder}'" for folder in folders]
    return [*others, f"hydra.searchpath=[{','.join(places)}]"] if places else others


def search_folders(config_dirs: Sequence[Path | str] = ()) -> list[Path]:
    """Folders of configs beside ours: those given, ./configs, and those of installed packages."""
    folders = [Path(folder).expanduser().resolve() for folder in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"no such config folder: {folder}")
    own = Path("configs").resolve()
    if own.is_dir() and own != CONFIG_FOLDER:
        folders.append(own)
    return list(dict.fromkeys([*folders, *config_folders()]))


# ---------------------------------------------------------------- dims


def dims_of(spec: Spec) -> dict[str, Any]:
    """What `_dims` holds: `action`, and by observation: `observation` (total vector width), `image`."""
    dims: dict[str, Any] = {"action": spec.action.size}
    vectors = [s.shape for s in spec.observations.values() if len(s.shape) <= 1]
    images = [s.shape for s in spec.observations.values() if len(s.shape) == 3]
    if vectors:
        dims["observation"] = sum(shape[0] if shape else 1 for shape in vectors)
    if images:
        dims["image"] = list(images[0])
    if not vectors and images:
        dims["observation"] = list(images[0])
    return dims


def fill_dims(config: DictConfig, spec: Spec) -> None:
    """Write the environment's sizes into `_dims`; one that the config states wrongly is an error."""
    node = config._dims if "_dims" in config else {}
    stated = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if not isinstance(stated, dict):
        raise ConfigError(f"_dims must be a group of sizes, not {stated!r}")
    actual = dims_of(spec)
    for key, value in actual.items():
        if (
            key in stated
            and stated[key] is not None
            and not isinstance(stated[key], str)
            and stated[key] != value
        ):
            raise ConfigError(
                f"_dims.{key} is {stated[key]} in the config, but {spec.name} has {value}; "
                f"leave _dims.{key} out, and it is read from the environment"
            )
    OmegaConf.update(
        config, "_dims", {**actual, **{k: v for k, v in stated.items() if k not in actual}}, force_add=True
    )


def resolve_config(config: DictConfig, spec: Spec) -> DictConfig:
    """Fill `_dims` and resolve every interpolation; the result is plain and read-only."""
    try:
        fill_dims(config, spec)
        OmegaConf.resolve(config)
        missing = OmegaConf.missing_keys(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config does not resolve: {_first_line(error)}") from error
    if missing:
        raise ConfigError(f"the config needs a value for {', '.join(sorted(missing))}")
    check_config(to_plain(config))
    OmegaConf.set_readonly(config, True)
    return config


def to_plain(config: Any) -> Any:
    """A config node as dicts and lists, interpolations resolved; ConfigError where one does not resolve."""
    try:
        return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config does not resolve: {_first_line(error)}") from error


def select(config: DictConfig, path: str) -> Any:
    """The value at a path, its interpolation resolved; None where there is none."""
    try:
        return OmegaConf.select(config, path)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} does not resolve: {_first_line(error)}") from error


def change_key(config: DictConfig, path: str, value: str) -> None:
    """Set one key of a saved config, by words. A key of a later version of the lab may be new to it."""
    import yaml

    keys = [*_paths(OmegaConf.to_container(config)), *_paths(root_keys())]
    if path not in keys:
        raise ConfigError(f"the run's config has no key '{path}'.{closest(path, keys)}")
    try:
        OmegaConf.update(config, path, yaml.safe_load(value) if value else None, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"'{value}' cannot be a value of {path}: {one_line(error)}") from error


# ---------------------------------------------------------------- messages


def check_targets(config: Any, path: str = "") -> None:
    """Refuse a `_target_` that is no part: one of the older layout (`src.…`), or a function of Python itself.

    A config names classes to build. One that names `os.system` is an attack or a mistake; a run folder from
    elsewhere has a config too.
    """
    if isinstance(config, DictConfig):
        for key in map(str, config):
            if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
                continue
            value = config[key]
            if key == "_target_" and isinstance(value, str) and value.startswith("src."):
                raise ConfigError(f"{path}_target_ is '{value}': here it is '{modern_target(value)}'")
            if key == "_target_" and str(value).partition(".")[0] in sys.stdlib_module_names:
                raise ConfigError(
                    f"{path}_target_ is '{value}', of Python's standard library: a part is a class of rl_lab, torch "
                    "or a package of yours"
                )
            check_targets(value, f"{path}{key}.")
    elif isinstance(config, ListConfig):
        for index in range(len(config)):
            if not (OmegaConf.is_missing(config, index) or OmegaConf.is_interpolation(config, index)):
                check_targets(config[index], path)


def modern_target(target: str) -> str:
    """`src.workflows.utils.base.X` -> `rl_lab.workflows.base.X`."""
    return "rl_lab." + target.removeprefix("src.").replace("workflows.utils.", "workflows.")


def known_choices(group: str, config_dirs: Iterable[Path | str] = ()) -> list[str]:
    """Names that a config group offers, here and in the user's folders."""
    names: set[str] = set()
    for folder in (CONFIG_FOLDER, Path("configs"), *map(Path, config_dirs), *config_folders()):
        names |= {
            file.relative_to(folder / group).with_suffix("").as_posix()
            for file in (folder / group).rglob("*.yaml")
        }
    return sorted(names)


def explain(error: Exception, words: Sequence[str], config_dirs: Sequence[Path | str]) -> str:
    """Hydra's error as one sentence with the closest right spelling."""
    from hydra.errors import OverrideParseException

    text = str(error)
    if isinstance(error, OverrideParseException):
        return (
            f"'{error.override}' cannot be read as key=value. A value with spaces, commas, brackets or signs is quoted "
            f"twice: \"key='a, b'\" ({_first_line(error, 1)})"
        )
    missing = re.search(r"Could not (?:find|load) '([\w/]+)/([^'/]+)'", text)
    if missing:
        group, name = missing.groups()
        return f"no {group} is called '{name}'.{closest(name, known_choices(group, config_dirs))}"
    key = re.search(r"Key '[^']+' is not in struct\s+full_key: ([\w.]+)", text)
    key = key or re.search(r"Could not override '([\w/@.]+)'", text)
    if key:
        path = key[1]
        return f"the config has no key '{path}'.{_nearest_keys(path, words)} (+{path}=… adds a new one)"
    return _first_line(error)


def _nearest_keys(path: str, words: Sequence[str]) -> str:
    """`closest` for a key: the nearest of all, and the list of those beside it (or at the root)."""
    keys = _known_keys(words, path)
    near = closest(path, keys).partition(" Known:")[0]
    parents = [".".join(path.split(".")[:count]) for count in range(path.count("."), 0, -1)]
    parent = next((f"{parent}." for parent in parents if parent in keys), "")
    beside = [key for key in keys if key.startswith(parent) and "." not in key.removeprefix(parent)]
    return near + closest("", beside)


def _known_keys(words: Sequence[str], wrong: str) -> list[str]:
    """Every path of the config without the wrong word, for suggestions."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    # Of a sweep (experiment.seed=0,1) one value will do.
    good = [re.sub(r"=([\w.]+)(,[\w.]+)+$", r"=\1", word) for word in words]
    good = [word for word in good if not word.lstrip("+~").startswith(wrong)]
    try:
        with initialize_config_module("rl_lab.configs", version_base="1.3"):
            config = compose("config", overrides=good)
    except Exception:
        return []
    return list(_paths(OmegaConf.to_container(config, resolve=False)))


def _paths(node: Any, prefix: str = "") -> Iterable[str]:
    """Every dotted path of a plain config."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield f"{prefix}{key}"
        yield from _paths(value, f"{prefix}{key}.")


def _first_line(error: BaseException, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]) if lines else type(error).__name__
