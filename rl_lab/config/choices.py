"""Choices of config groups: Hydra's loader, with parts that are replaced and sizes that belong to an algorithm.

An algorithm's file has all its parts; the groups have the alternatives. Hydra would merge a choice with the part that
is already there, and would refuse a choice of a group that no defaults list names. Here

- a choice of a part (`components/encoder=mlp`) replaces the part, on the command line and in defaults lists, with or
  without `override`;
- `size=12m` is the file `size/<algorithm>/12m`, of the algorithm or of the one that it is based on;
- `debug=tiny` adds the algorithm's size of that name, if it has one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra._internal.hydra as hydra_main
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra.core.default_element import GroupDefault, InputDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException

from rl_lab.errors import ConfigError, closest

# Groups whose choice replaces what is at its place in the config.
PARTS = ("workflow", "components", "controller", "optimizers", "buffer")
# Groups that may be chosen although no defaults list names them: the algorithm's file has what they replace.
OPTIONAL = (*PARTS, "phases", "size")
NO_MATCH = re.compile(r"^In '([^']+)': Could not override '([^']+)'")


@contextmanager
def choices() -> Iterator[None]:
    """Hydra composes with `ChoiceLoader` inside this context."""
    before = hydra_main.ConfigLoaderImpl
    hydra_main.ConfigLoaderImpl = ChoiceLoader  # type: ignore[misc]
    try:
        yield
    finally:
        hydra_main.ConfigLoaderImpl = before  # type: ignore[misc]


class ChoiceLoader(ConfigLoaderImpl):
    """Hydra's config loader with the rules of this module."""

    def __init__(self, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self._start()

    def _start(self) -> None:
        self._plain: dict[
            str, str
        ] = {}  # key of a choice -> the file whose `override` of it is read without the word
        self._superseded: set[tuple[str, str]] = set()  # (file, key): an `override` that a later file repeats
        self._placed: set[str] = set()  # keys of choices whose place must exist
        self._files: dict[
            str, ConfigResult | None
        ] = {}  # what was read: the defaults list is computed several times

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        self._start()
        words = self._complete(config_name, list(overrides), run_mode)
        config = super().load_configuration(
            config_name, words, run_mode, from_shell, validate_sweep_overrides
        )
        # A sweep composes each of its runs from these, which may be of other algorithms: keep what was typed.
        typed = [item for item in _parsed(list(overrides)) if not item.is_hydra_override()]
        with open_dict(config.hydra):
            config.hydra.overrides.task = [item.input_line for item in typed]
        return config

    # ---------------------------------------------------------------- words

    def _complete(self, config_name: str | None, typed: list[str], run_mode: RunMode) -> list[str]:
        """The words that Hydra needs: `+` before choices that no defaults list names, files of sizes."""
        _, repository = self._parse_overrides_and_create_caching_repo(config_name, typed)
        items = list(zip(_parsed(typed), typed))
        sizes = [item for item in items if _is_choice(item[0]) and item[0].key_or_group in ("size", "debug")]
        parts = [
            item
            for item in items
            if _is_choice(item[0]) and _is_optional(item[0].key_or_group) and item not in sizes
            if repository.group_exists(item[0].key_or_group)
        ]
        words = [word for item in items if item not in sizes and item not in parts for word in item[1:]]
        found = self._settle(config_name, words, run_mode)
        # The outer part first: its own file may name the parts inside it.
        for parsed, word in sorted(parts, key=lambda item: str(item[0].package or "").count(".")):
            key = parsed.get_key_element()
            if key not in found.overrides.known_choices:
                self._placed.add(key)
                word = f"+{word}"
            words.append(word)
            found = self._settle(config_name, words, run_mode)
        paths = [str(default.config_path) for default in found.defaults]
        names = [path.removeprefix("algorithm/") for path in paths if path.startswith("algorithm/")]
        algorithms = list(dict.fromkeys(reversed(names)))  # an algorithm, then the one that it is based on
        last: list[str] = []
        for parsed, word in sizes:
            name = str(parsed.value())
            folder = next((a for a in algorithms if repository.config_exists(f"size/{a}/{name}")), None)
            if parsed.key_or_group == "debug":
                words.append(word)
                last += [] if folder is None else [f"+size@_global_={folder}/{name}"]
            elif folder is not None:
                words.append(f"size={folder}/{name}")
            elif parsed.value() is None or repository.config_exists(f"size/{name}"):
                words.append(word)
            elif run_mode == RunMode.RUN:  # in a sweep the experiments may have other algorithms
                groups = ["size", *(f"size/{algorithm}" for algorithm in algorithms)]
                known = [option for group in groups for option in repository.get_group_options(group)]
                owner = f" for {algorithms[0]}" if algorithms else ""
                raise ConfigError(f"size={name} does not exist{owner}.{closest(name, known)}")
        return words + last

    def _settle(self, config_name: str | None, words: list[str], run_mode: RunMode) -> DefaultsList:
        """The defaults list; an `override` of what no defaults list names is read without the word."""
        while True:
            try:
                return self.compute_defaults_list(config_name, words, run_mode)
            except ConfigCompositionException as error:
                match = NO_MATCH.match(str(error))
                if match is None or not _is_optional(match[2]):
                    raise
                file, key = match.groups()
                self._placed.add(key)
                if key not in self._plain:
                    self._plain[key] = file
                elif self._plain[key] != file and (file, key) not in self._superseded:
                    self._superseded.add((file, key))
                else:
                    raise

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        parsed = _parsed(overrides)
        repository = _Repository(self.repository, self._files, self._plain, self._superseded)
        self._process_config_searchpath(config_name, parsed, repository)
        return parsed, repository

    # ---------------------------------------------------------------- parts

    def _compose_config_from_defaults_list(
        self, defaults: list[ResultDefault], repo: IConfigRepository
    ) -> DictConfig:
        """Merge the files in order; what is at the place of a part is removed before the part is merged."""
        config = OmegaConf.create()
        starts = part_starts(defaults)
        with flag_override(config, "no_deepcopy_set_nodes", True):
            for index, default in enumerate(defaults):
                if index in starts:
                    place = str(starts[index].package)
                    there = OmegaConf.select(config, place, throw_on_resolution_failure=False)
                    if there:
                        OmegaConf.update(
                            config, place, {}, merge=False
                        )  # keeps its position: parts are built in order
                    elif starts[index].override_key in self._placed:
                        raise ConfigCompositionException(
                            f"Could not override '{starts[index].override_key}'."
                        )
                loaded = super()._compose_config_from_defaults_list([default], repo)
                try:
                    config.merge_with(loaded)
                except OmegaConfBaseException as error:
                    raise ConfigCompositionException(f"In '{default.config_path}': {error}") from error
        return config


class _Repository(CachingConfigRepository):
    """The config files, with `override` removed from choices that have nothing in a defaults list to override."""

    def __init__(
        self,
        delegate: IConfigRepository,
        files: dict[str, ConfigResult | None],
        plain: dict[str, str],
        superseded: set[tuple[str, str]],
    ) -> None:
        super().__init__(delegate)
        self.files = files
        self.plain = plain
        self.superseded = superseded

    def load_config(self, config_path: str) -> ConfigResult | None:
        key = f"config_path={config_path}"
        if key not in self.cache:
            if config_path not in self.files:
                self.files[config_path] = self.delegate.load_config(config_path)
            self.cache[key] = self._changed(config_path, self.files[config_path])
        return self.cache[key]

    def _changed(self, config_path: str, file: ConfigResult | None) -> ConfigResult | None:
        if file is None:
            return None
        result = copy.copy(file)
        kept: list[InputDefault] = []
        for default in copy.deepcopy(file.defaults_list or []):
            key = _key(default) if isinstance(default, GroupDefault) and default.override else ""
            if (config_path, key) in self.superseded:
                continue
            if isinstance(default, GroupDefault) and key and self.plain.get(key) == config_path:
                default.override = False
                # Hydra wants every `override` after all other choices.
                first = next((i for i, other in enumerate(kept) if other.is_override()), len(kept))
                kept.insert(first, default)
            else:
                kept.append(default)
        result.defaults_list = kept
        return result


def part_starts(defaults: list[ResultDefault]) -> dict[int, ResultDefault]:
    """Index of the first file of each chosen part -> the part. The files of its own parts may come before it."""
    starts: dict[int, ResultDefault] = {}
    own: list[int] = []  # files chosen by the file of a part
    last: ResultDefault | None = None
    for index, default in enumerate(defaults):
        if not _is_part(default.config_path):
            own, last = [], None
        elif not _is_part(default.parent):
            starts[own[0] if own else index] = default
            own, last = [], default
        elif last is None or default.parent != last.config_path:
            own.append(index)
    return starts


def _is_part(path: str | None) -> bool:
    return str(path).partition("/")[0] in PARTS and "/" in str(path)


def _parsed(words: list[str]) -> list[Override]:
    return OverridesParser.create().parse_overrides(words)


def _is_optional(group: str) -> bool:
    return group.partition("@")[0].partition("/")[0] in OPTIONAL


def _is_choice(override: Override) -> bool:
    """Whether the word is KEY=VALUE with one value; only a value of a group is a choice."""
    return not (
        override.is_delete() or override.is_add() or override.is_force_add() or override.is_sweep_override()
    )


def _key(default: GroupDefault) -> str:
    """The key of a choice in a defaults list, as Hydra prints it."""
    group = str(default.group).lstrip("/")
    package = default.package
    return group if package is None or package == group.replace("/", ".") else f"{group}@{package}"
