"""Composes overrides into one resolved config.

Hydra composes the files; this module adds the sizes that come from the environment (`_dims`), the spelling
`+experiment=`, the configs of other packages, and error messages with the closest known name.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.config.algorithm_keys import check_algorithm, unread_keys
from rl_lab.config.checks import CONFIG_FOLDER as CONFIG_FOLDER
from rl_lab.config.checks import check_config, check_present, check_types, root_keys
from rl_lab.errors import ConfigError, LabError, closest, one_line
from rl_lab.records import Spec

# A `key=value` override of a section whose keys depend on the algorithm.
OPEN_KEY = re.compile(r"\+{0,2}((?:algorithm|components|controllers|optimizers|buffers)\.[\w.]+)=")

# Hydra also logs the errors that it raises; they are printed once.
logging.getLogger("hydra").addHandler(logging.NullHandler())


def compose_config(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path | str] = ()) -> DictConfig:
    """Compose the config for these overrides. `_dims` is not filled in yet: see `fill_dims`."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    from rl_lab.config.choices import choices

    register_resolvers()
    items = with_search_path([normalise_override(override) for override in overrides], config_dirs)
    keys = {match[1]: item for item in items if (match := OPEN_KEY.match(item))}
    GlobalHydra.instance().clear()
    try:
        with choices(), initialize_config_module("rl_lab.configs", version_base="1.3"):
            config = compose("config", overrides=items)
            others = [item for item in items if item not in keys.values()]
            default = compose("config", overrides=others) if keys else config
        plain: Any = OmegaConf.to_container(config)
        plain_default: Any = OmegaConf.to_container(default)
        check_types(plain, plain_default, keys)
        check_present(plain)
    except LabError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, items, config_dirs)) from error
    except Exception as error:  # invalid YAML, an invalid path, or a bug in Hydra
        raise ConfigError(f"config: Hydra cannot compose it: {one_line(error)}") from error
    check_targets(config)
    return config


def normalise_override(override: str) -> str:
    """Return the spelling that Hydra needs.

    `+experiment=x` becomes `experiment=x`, because the group is always in our defaults list.
    `components/encoder@components.encoder=x`, the spelling of defaults lists, becomes `components/encoder=x`.
    `environment.eval.x=…` may set any key of `environment` (see checks.py), so it gets a `++`.
    """
    if override.startswith("tdmpc_size="):
        raise ConfigError(
            f"{override}: use {override.removeprefix('tdmpc_')}, the word for the sizes of every algorithm"
        )
    short = re.match(r"^\+{0,2}(env|task|steps|seed)=(.*)$", override)
    if short:
        from rl_lab.config.short_names import long_form

        raise ConfigError(f"{override}: {long_form(short[1], short[2], known_choices('environment'))}")
    override = re.sub(r"^(environment\.eval\.\w+=)", r"++\1", override)
    override = re.sub(r"^\+(experiment|size|debug)=", r"\1=", override)
    package = re.match(r"^(\+?)([\w/]+)@([\w.]+)=", override)
    if package and package[2].replace("/", ".") == package[3]:
        return f"{package[1]}{package[2]}={override[package.end() :]}"
    return override


def register_resolvers() -> None:
    """Register arithmetic for sizes: `${add:${_dims.observation},10}`, `${mul:…}`, `${div:…}`,
    `${floordiv:…}`, `${least:…}`.

    `least` ignores null, and `floordiv` of null is null, so that `training.total_timesteps` may be null.
    `${task_name:${environment.task}}` is the task's part of a run's name.
    """
    resolvers: dict[str, Callable[..., Any]] = {
        "add": lambda *numbers: sum(numbers),
        "mul": lambda first, second: first * second,
        "div": lambda first, second: first / second,
        "floordiv": lambda first, second: None if first is None else first // second,
        "least": lambda *numbers: min(number for number in numbers if number is not None),
        "task_name": task_name,
    }
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


def with_search_path(overrides: Sequence[str], config_dirs: Sequence[Path | str] = ()) -> list[str]:
    """Return the overrides with all additional config folders in `hydra.searchpath`.

    Search order, after our own configs: the user's `hydra.searchpath=[…]`, `--config-dir` folders, ./configs,
    and the configs of installed packages.
    """
    given: list[str] = []
    others: list[str] = []
    for override in overrides:
        path = re.fullmatch(r"\+{0,2}hydra\.searchpath=\[(.*)\]", override)
        if path:
            given += [item.strip() for item in path[1].split(",") if item.strip()]
        else:
            others.append(override)
    folders = [
        str(folder).replace("\\", "\\\\").replace("'", "\\'") for folder in search_folders(config_dirs)
    ]
    paths = given + [f"'file://{folder}'" for folder in folders]
    return [*others, f"hydra.searchpath=[{','.join(paths)}]"] if paths else others


def search_folders(config_dirs: Sequence[Path | str] = ()) -> list[Path]:
    """Return the additional config folders: `config_dirs`, ./configs, and those of installed packages."""
    folders = [Path(folder).expanduser().resolve() for folder in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: {folder} is not a folder")
    own = Path("configs").resolve()
    if own.is_dir() and own != CONFIG_FOLDER:
        folders.append(own)
    return list(dict.fromkeys([*folders, *config_folders()]))


# ---------------------------------------------------------------- configs of other packages


CONFIG_GROUP = "rl_lab.configs"


def config_folders() -> list[Path]:
    """Return the config folders of installed packages, sorted by the name of their entry point.

        [project.entry-points."rl_lab.environments"]
        corridor = "lab_extension.corridor"          # suite -> adapter module (see environments/make.py)

        [project.entry-points."rl_lab.configs"]
        lab_extension = "lab_extension.configs"      # any name -> package with YAML files in our groups

    Workflows, components and buffers need no entry point: a config names them by `_target_`.
    """
    folders: dict[Path, None] = {}
    for point in sorted(entry_points(group=CONFIG_GROUP), key=lambda point: point.name):
        try:
            spec = importlib.util.find_spec(point.value)
        except (ImportError, ValueError, AttributeError) as error:  # a broken package must not stop a run
            spec, reason = None, f" ({error})"
        else:
            reason = ""
        if spec is None or not spec.submodule_search_locations:
            warnings.warn(
                f"entry point '{point.name}' of group {CONFIG_GROUP}: the package '{point.value}' was not "
                f"found{reason}, so its configs are ignored",
                stacklevel=2,
            )
            continue
        folders |= dict.fromkeys(Path(path).resolve() for path in spec.submodule_search_locations)
    return list(folders)


# ---------------------------------------------------------------- names


def task_name(task: Any) -> str:
    """Return the last part of a task: "Reach" of my_env:Reach, "pong" of atari100k/pong."""
    return re.split(r"[:/]", str(task))[-1] or "unnamed"


def name_by_task(config: DictConfig, overrides: Sequence[str]) -> None:
    """Add the task to the run's name if the words chose another environment than the experiment's own.

    Without it a run of `environment=gym environment.task=Acrobot-v1` would be called dreamer_cartpole everywhere.
    """
    words = [override.lstrip("+") for override in overrides]
    chosen = any(word.startswith(("environment=", "environment.task=")) for word in words)
    if not chosen or any(word.startswith("experiment.name=") for word in words):
        return
    name, task = str(select(config, "experiment.name")), task_name(select(config, "environment.task"))
    if task.lower() not in name.lower():
        OmegaConf.update(config, "experiment.name", f"{name}_{task}")


# ---------------------------------------------------------------- dims


def dims_of(spec: Spec) -> dict[str, Any]:
    """Return `_dims`: `action`, and if there are such, `observation` (total vector width) and `image`."""
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
    """Write the sizes of the environment into `_dims`; a different value in the config is an error."""
    node = config._dims if "_dims" in config else {}
    stated = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if not isinstance(stated, dict):
        raise ConfigError(f"_dims must be a mapping, not {stated!r}")
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
                f"remove _dims.{key} to read it from the environment"
            )
    OmegaConf.update(
        config, "_dims", {**actual, **{k: v for k, v in stated.items() if k not in actual}}, force_add=True
    )


def resolve_config(config: DictConfig, spec: Spec) -> DictConfig:
    """Fill in `_dims`, resolve all interpolations and check the config; the result is read-only."""
    check_algorithm(_plain(config))
    try:
        fill_dims(config, spec)
        OmegaConf.resolve(config)
        missing = OmegaConf.missing_keys(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: an interpolation does not resolve: {_first_line(error)}") from error
    if missing:
        raise ConfigError(f"{', '.join(sorted(missing))} must be set: the config has no value for it")
    check_config(to_plain(config))
    OmegaConf.set_readonly(config, True)
    return config


def _plain(config: DictConfig) -> dict[str, Any]:
    """The config as dicts and lists, with its interpolations."""
    plain = OmegaConf.to_container(config)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def to_plain(config: Any) -> Any:
    """Return a config node as dicts and lists, with all interpolations resolved."""
    try:
        return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: an interpolation does not resolve: {_first_line(error)}") from error


def unread(config: DictConfig) -> str:
    """A sentence about keys of `algorithm` that nothing reads, or ""; before `resolve_config`."""
    keys = unread_keys(_plain(config))
    if not keys:
        return ""
    return (
        f"{', '.join(keys)}: neither the workflow's code nor an interpolation reads it; correct or remove it"
    )


def select(config: DictConfig, path: str) -> Any:
    """Return the resolved value at a path, or None if the config has none."""
    try:
        return OmegaConf.select(config, path)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path} does not resolve: {_first_line(error)}") from error


def change_key(config: DictConfig, path: str, value: str) -> None:
    """Set one key of a saved config from a string. The key may be new, if the run is of an older version."""
    import yaml

    keys = [*_paths(OmegaConf.to_container(config)), *_paths(root_keys())]
    if path not in keys:
        raise ConfigError(f"{path} is not a known key.{closest(path, keys)}")
    try:
        OmegaConf.update(config, path, yaml.safe_load(value) if value else None, force_add=True)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be set to '{value}': {one_line(error)}") from error


# ---------------------------------------------------------------- messages


def check_targets(config: Any, path: str = "") -> None:
    """Raise ConfigError for a `_target_` of the older layout (`src.…`) or of Python's standard library.

    A config names classes to build. One that names `os.system` is an attack or a mistake, and configs also
    come with run folders of other people.
    """
    if isinstance(config, DictConfig):
        for key in map(str, config):
            if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
                continue
            value = config[key]
            if key == "_target_" and isinstance(value, str) and value.startswith("src."):
                raise ConfigError(f"{path}_target_ is '{value}': use '{modern_target(value)}'")
            if key == "_target_" and str(value).partition(".")[0] in sys.stdlib_module_names:
                raise ConfigError(
                    f"{path}_target_ is '{value}', of Python's standard library: use a class of rl_lab, torch "
                    "or your own package"
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
    """Return the names of a config group, in our folder and in the user's."""
    names: set[str] = set()
    for folder in (CONFIG_FOLDER, Path("configs"), *map(Path, config_dirs), *config_folders()):
        names |= {
            file.relative_to(folder / group).with_suffix("").as_posix()
            for file in (folder / group).rglob("*.yaml")
        }
    return sorted(names)


def explain(error: Exception, overrides: Sequence[str], config_dirs: Sequence[Path | str]) -> str:
    """Return Hydra's error as one sentence with the closest known name."""
    from hydra.errors import OverrideParseException

    from rl_lab.config.short_names import SHORT, long_form, task_hint, word_hint

    text = str(error)
    if isinstance(error, OverrideParseException):
        if re.fullmatch(r"[\w./:@-]+", error.override):
            known = known_choices("environment", config_dirs)
            return (
                f"'{error.override}' cannot be read as key=value."
                f"{word_hint(error.override, known_choices('experiment', config_dirs), known)}"
            )
        return (
            f"'{error.override}' cannot be read as key=value: quote a value with spaces, commas, brackets or "
            f"signs twice, \"key='a, b'\" ({_first_line(error, 1)})"
        )
    missing = re.search(r"Could not (?:find|load) '([\w/]+)/([^'/]+)'", text)
    if missing:
        group, name = missing.groups()
        known = known_choices(group, config_dirs)
        if group == "recipe":
            return f"recipe={name} does not exist: use `- /algorithm: {name}`, whose file has all parts"
        if group in ("size", "tdmpc_size"):
            known = known_choices("size", config_dirs)
            near = [choice for choice in known if choice.rpartition("/")[2] == name]
            hint = (
                f" Did you mean {' or '.join(f'/size@algorithm.size: {choice}' for choice in near)}?"
                if near
                else ""
            )
            return f"{group}={name} does not exist.{hint or closest(name, known)}"
        if group == "environment":
            return f"environment={name}: no environment config has this name.{task_hint(name, known)}"
        return f"{group}={name} does not exist.{closest(name, known)}"
    key = re.search(r"Key '[^']+' is not in struct\s+full_key: ([\w.]+)", text)
    key = key or re.search(r"Could not override '([\w/@.]+)'", text)
    if key:
        path = key[1]
        if path in SHORT:
            value = next((word.partition("=")[2] for word in overrides if word.startswith(f"{path}=")), "…")
            return f"{path}={value}: {long_form(path, value, known_choices('environment', config_dirs))}"
        return f"{path} is not a known key.{_nearest_keys(path, overrides)} (+{path}=… adds a new key)"
    return _first_line(error)


# Keys of IRIS and Δ-IRIS that resemble none of ours (docs/howto/coming_from.md has all names).
OTHER_NAMES = {
    "env": "environment",
    "env.train.id": "environment.task",
    "env.test.id": "environment.eval.task",
    "params": "experiment",
    "common.device": "experiment.device",
    "common.seed": "experiment.seed",
}


def _nearest_keys(path: str, overrides: Sequence[str]) -> str:
    """Return `closest` for a key: the nearest of all keys, and the list of its siblings."""
    keys = _known_keys(overrides, path)
    near = closest(path, keys).partition(" Known:")[0]
    if path in OTHER_NAMES:
        near = f" Did you mean '{OTHER_NAMES[path]}'?"
    parents = [".".join(path.split(".")[:count]) for count in range(path.count("."), 0, -1)]
    parent = next((f"{parent}." for parent in parents if parent in keys), "")
    siblings = [key for key in keys if key.startswith(parent) and "." not in key.removeprefix(parent)]
    return near + closest("", siblings)


def _known_keys(overrides: Sequence[str], wrong: str) -> list[str]:
    """Return all paths of the config that is composed without the wrong override."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    from rl_lab.config.choices import choices

    GlobalHydra.instance().clear()
    # One value of a sweep (experiment.seed=0,1) is enough.
    good = [re.sub(r"=([\w.]+)(,[\w.]+)+$", r"=\1", override) for override in overrides]
    good = [override for override in good if not override.lstrip("+~").startswith(wrong)]
    groups = [item for item in good if item.startswith(("experiment=", "hydra.searchpath="))]
    for words in (good, groups, []):  # other overrides may be wrong, too
        try:
            with choices(), initialize_config_module("rl_lab.configs", version_base="1.3"):
                config = compose("config", overrides=words)
        except Exception:
            continue
        return list(_paths(OmegaConf.to_container(config, resolve=False)))
    return []


def _paths(node: Any, prefix: str = "") -> Iterable[str]:
    """Yield all dotted paths of a plain config."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield f"{prefix}{key}"
        yield from _paths(value, f"{prefix}{key}.")


def _first_line(error: BaseException, count: int = 3) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:count]) if lines else type(error).__name__
