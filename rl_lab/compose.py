"""From words on the command line to one resolved config.

Hydra composes; this file adds what Hydra does not know: the sizes that come from the environment, the
spelling `+experiment=`, and messages that say what would have been right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl_lab.errors import ConfigError, closest
from rl_lab.records import Spec

CONFIG_FOLDER = Path(__file__).parent / "configs"


def compose_config(overrides: Sequence[str] = (), *, config_dirs: Sequence[Path | str] = ()) -> DictConfig:
    """Compose the config for these overrides. `_dims` is not filled yet: see `fill_dims`."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException

    register_resolvers()
    words = [normalise_override(word) for word in overrides]
    words += _search_path(config_dirs, words)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("rl_lab.configs", version_base="1.3"):
            config = compose("config", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, words, config_dirs)) from error
    check_targets(config)
    return config


def normalise_override(word: str) -> str:
    """One spelling for what means the same to a user, though not to Hydra.

    `+experiment=x` is `experiment=x`, since the group is always in our defaults list; and
    `components/encoder@components.encoder=x`, as it stands in defaults lists, is `components/encoder=x`.
    """
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


def _search_path(config_dirs: Sequence[Path | str], words: list[str]) -> list[str]:
    """Folders searched beside ours: those given, and ./configs of a user's own project."""
    folders = [Path(folder).expanduser().resolve() for folder in config_dirs]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"no such config folder: {folder}")
    own = Path("configs").resolve()
    if own.is_dir() and own != CONFIG_FOLDER:
        folders.append(own)
    if not folders or any(word.lstrip("+").startswith("hydra.searchpath") for word in words):
        return []
    return ["hydra.searchpath=[" + ",".join(f"file://{folder}" for folder in folders) + "]"]


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
    stated = OmegaConf.to_container(config._dims, resolve=False) if "_dims" in config else {}
    assert isinstance(stated, dict)
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
    fill_dims(config, spec)
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config does not resolve: {_first_line(error)}") from error
    missing = OmegaConf.missing_keys(config)
    if missing:
        raise ConfigError(f"the config needs a value for {', '.join(sorted(missing))}")
    OmegaConf.set_readonly(config, True)
    return config


# ---------------------------------------------------------------- messages


def check_targets(config: Any, path: str = "") -> None:
    """A `_target_` of the older layout (`src.…`) is answered with the path it has here."""
    if isinstance(config, DictConfig):
        for key in map(str, config):
            if OmegaConf.is_missing(config, key) or OmegaConf.is_interpolation(config, key):
                continue
            value = config[key]
            if key == "_target_" and isinstance(value, str) and value.startswith("src."):
                raise ConfigError(f"{path}_target_ is '{value}': here it is '{modern_target(value)}'")
            check_targets(value, f"{path}{key}.")
    elif isinstance(config, ListConfig):
        for item in config:
            check_targets(item, path)


def modern_target(target: str) -> str:
    """`src.workflows.utils.base.X` -> `rl_lab.workflows.base.X`."""
    return "rl_lab." + target.removeprefix("src.").replace("workflows.utils.", "workflows.")


def known_choices(group: str, config_dirs: Iterable[Path | str] = ()) -> list[str]:
    """Names that a config group offers, here and in the user's folders."""
    names: set[str] = set()
    for folder in (CONFIG_FOLDER, Path("configs"), *map(Path, config_dirs)):
        names |= {
            file.relative_to(folder / group).with_suffix("").as_posix()
            for file in (folder / group).rglob("*.yaml")
        }
    return sorted(names)


def explain(error: Exception, words: Sequence[str], config_dirs: Sequence[Path | str]) -> str:
    """Hydra's error as one sentence with the closest right spelling."""
    text = str(error)
    missing = re.search(r"Could not (?:find|load) '([\w/]+)/([^'/]+)'", text)
    if missing:
        group, name = missing.groups()
        return f"no {group} is called '{name}'.{closest(name, known_choices(group, config_dirs))}"
    key = re.search(r"Key '([^']+)' is not in struct\s+full_key: ([\w.]+)", text)
    if key:
        path = key.group(2)
        return f"the config has no key '{path}'.{closest(path, _known_keys(words, path))} (+{path}=… adds a new one)"
    group_match = re.search(r"Could not override '([\w/@.]+)'", text)
    if group_match:
        path = group_match.group(1)
        return f"cannot set '{path}'.{closest(path, _known_keys(words, path))} (+{path}=… adds a new one)"
    return _first_line(error)


def _known_keys(words: Sequence[str], wrong: str) -> list[str]:
    """Every path of the config without the wrong word, for suggestions."""
    from hydra import compose, initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    good = [word for word in words if not word.lstrip("+~").startswith(wrong)]
    try:
        with initialize_config_module("rl_lab.configs", version_base="1.3"):
            config = compose("config", overrides=good)
    except Exception:
        return []
    return list(_paths(OmegaConf.to_container(config, resolve=False)))


def _paths(node: Any, prefix: str = "") -> Iterable[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _paths(value, f"{prefix}{key}.")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) if lines else type(error).__name__
