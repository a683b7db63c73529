"""Configs of strangers: what a saved config may name, and which run folders were made here.

A config names classes (`_target_`) and environments (`environment.task`). The config that a user trains with is the
user's own. The config in a run folder may be anybody's, so it may only name registered parts, unless the folder has
a signature with the key of this user, or the user says `--trust` (`trust=True`).

Registered parts are, by object and not by the beginning of their name:
- the `_target_`s in the YAML files of this package and of packages with the entry point `rl_lab.configs`
- the optimizers of torch.optim
- the suites of this package and of packages with the entry point `rl_lab.environments`, and Gymnasium's registered ids

Nothing is imported to decide it, except modules of registered parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rl_lab.config.checks import CONFIG_FOLDER
from rl_lab.errors import ConfigError
from rl_lab.run_folder import SIGNATURE
from rl_lab.utils.files import write_json_atomic
from rl_lab.utils.untrusted import control_characters, read_bytes, strings

TRUST = (
    "this run was not made here, so only parts of RL Lab, of installed packages that extend it, and of torch.optim "
    "are allowed; if you trust its author, add --trust (trust=True in Python)"
)


class UntrustedError(ConfigError):
    """The config of a run that was not made here names something that is not registered."""


# --- Every saved config ---


def check_saved(config: Any) -> None:
    """Raise ConfigError for content that no saved config has: interpolations, missing values, odd keys, control codes.

    config: plain, not resolved. A saved config is resolved: an interpolation in it would read this machine's
    environment variables, or hide what the config names.
    """
    _check_keys(config, "")
    for path, text in strings(config):
        if "${" in text:
            raise ConfigError(f"{_shown(path)} is {_shown(text)}: a saved config has no interpolations")
        if text == "???":
            raise ConfigError(f"{_shown(path)} has no value")
        if control_characters(text):
            raise ConfigError(f"{_shown(path)} has control characters: {_shown(text)}")


def _check_keys(node: Any, path: str) -> None:
    if isinstance(node, Mapping):
        for key, value in node.items():
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise ConfigError(f"{path or 'the config'} has the key {_shown(key)}: keys are names")
            _check_keys(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for item in node:
            _check_keys(item, path)


def _shown(value: Any) -> str:
    """At most 100 characters, without control characters."""
    text = repr(value) if not isinstance(value, str) else ascii(value)
    return text if len(text) <= 100 else text[:99] + "…"


# --- Registered parts ---

_TARGET = re.compile(r"""_target_["']?\s*:\s*["']?([A-Za-z_][\w.]*)""")


@cache
def registered_targets() -> frozenset[str]:
    """Return the dotted names that YAML files of this package and of installed packages give to `_target_`."""
    from rl_lab.config.compose import config_folders

    names: set[str] = set()
    for folder in (CONFIG_FOLDER, *config_folders()):
        for file in folder.rglob("*.yaml"):
            for line in file.read_text(encoding="utf-8").splitlines():
                if not line.lstrip().startswith("#"):
                    names.update(_TARGET.findall(line))
    return frozenset(names)


def is_registered(target: str) -> bool:
    """Return whether a `_target_` names a registered part, also by the module that defines it."""
    names = registered_targets()
    return target in names or _is_optimizer(target) or _is_definition(target, names)


def _is_definition(target: str, names: frozenset[str]) -> bool:
    """Whether `a.b.C` is where a registered part, such as `a.C`, is defined. Only registered names are imported."""
    from hydra.utils import get_object

    for name in names:
        if name.rpartition(".")[2] == target.rpartition(".")[2]:
            try:
                part = get_object(name)
            except Exception:  # of a package that is not installed completely
                continue
            if f"{getattr(part, '__module__', '')}.{getattr(part, '__qualname__', '')}" == target:
                return True
    return False


def _is_optimizer(target: str) -> bool:
    found = re.fullmatch(r"(torch\.optim(?:\.[a-z_]+)?)\.([A-Z]\w*)", target)
    if not found:
        return False
    import torch

    part = getattr(torch.optim, found[2], None)
    if not isinstance(part, type) or not issubclass(part, torch.optim.Optimizer):
        return False
    return part is not torch.optim.Optimizer and found[1] in ("torch.optim", part.__module__)


# --- Configs that were not made here ---

# Keys of `environment` that make_env handles, for all suites.
_ENVIRONMENT_KEY_NAMES = (
    "task suite tasks num_envs workers size action_repeat time_limit pixels observations wrappers timeout restarts "
    "normalize_observations normalize_clip history_limit video_every batched eval"
)
ENVIRONMENT_KEYS = frozenset(_ENVIRONMENT_KEY_NAMES.split())
FORBIDDEN_ENVIRONMENT_KEYS = ("video_folder", "observation_statistics", "render", "copy", "infos", "seed")
WRITTEN_FOLDERS = ("log_files", "level_cache")  # options of suites
MOST_PROCESSES = {"num_envs": 10_000, "workers": 256}
_TASK = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")
_WORD = re.compile(r"[A-Za-z0-9_ +-]*")
CALLBACKS = "callbacks"
UNDERSCORE_KEYS = ("_target_", "_partial_", "_dims")


def check_parts(config: Mapping[str, Any]) -> None:
    """Raise UntrustedError if a config names a part that is not registered. config: plain, after `check_saved`."""
    # Callbacks are built for training only: `check_training` checks them.
    read = {key: value for key, value in config.items() if key != CALLBACKS}
    for path, node in _mappings(read, ""):
        for key, value in node.items():
            where = f"{path}.{key}" if path else str(key)
            if key == "_target_":
                if not isinstance(value, str) or not is_registered(value):
                    raise UntrustedError(f"{_shown(where)[1:-1]} is {_shown(value)}: {TRUST}")
            elif str(key).startswith("_") and (
                key not in UNDERSCORE_KEYS or (key == "_dims") != (path == "")
            ):
                raise UntrustedError(f"{_shown(where)[1:-1]} is not a key of a part: {TRUST}")
            elif path.startswith(PARTS) and ".environment" not in path and _is_file(key, value):
                raise UntrustedError(
                    f"{_shown(where)[1:-1]} is {_shown(value)}, a file or a model elsewhere: {TRUST}"
                )
        if str(node.get("_target_", "")).rpartition(".")[2] == "make_configured_env":
            _check_environment_part(node, path)


def _check_environment_part(node: Mapping[Any, Any], path: str) -> None:
    """Check a part that is an environment, as the environment of the run is checked."""
    given = node.get("environment")
    if not isinstance(given, Mapping):
        raise UntrustedError(f"{_shown(path)[1:-1]}.environment is {_shown(given)}: {TRUST}")
    _check_environment(given, f"{path}.environment")
    evaluation = given.get("eval")
    if isinstance(evaluation, Mapping):
        _check_environment({"suite": given.get("suite"), **evaluation}, f"{path}.environment.eval")
    changes = {key: value for key, value in node.items() if key != "environment" and str(key)[:1] != "_"}
    if isinstance(changes.get("seed"), int):
        del changes["seed"]
    _check_environment(changes, path)


PARTS = ("components.", "controllers.", "optimizers.", "workflow")


def _is_file(key: Any, value: Any) -> bool:
    """Whether an argument of a part is a path, or the name of a model on a hub."""
    texts = value if isinstance(value, list) else [value]
    return (key in ("path", "linear", "revision") and bool(value)) or any(
        isinstance(text, str) and (text.startswith((".", "~")) or "/" in text or "\\" in text)
        for text in texts
    )


def check_environment(config: Mapping[str, Any]) -> None:
    """Raise UntrustedError if `environment` names anything but tasks of installed suites. config: plain."""
    environment = config.get("environment")
    if isinstance(environment, Mapping):
        _check_environment(environment, "environment")


def check_training(config: Mapping[str, Any]) -> None:
    """Raise UntrustedError for settings with which a resumed run reaches out of its folder. config: plain."""
    if config.get(CALLBACKS):
        raise UntrustedError(
            f"{CALLBACKS} names code of its own, and this run was not made here: set callbacks=null, or add --trust"
        )
    buffers = config.get("buffers")
    for name, node in (buffers if isinstance(buffers, Mapping) else {}).items():
        if isinstance(node, Mapping) and node.get("folder"):
            raise UntrustedError(
                f"buffers.{_shown(str(name))[1:-1]}.folder is {_shown(node['folder'])}, and this run was not made here: "
                f"set it to null, or add --trust"
            )
    wandb = config.get("wandb")
    if isinstance(wandb, Mapping) and wandb.get("mode") == "online":
        raise UntrustedError(
            "wandb.mode is online, and this run was not made here: set wandb.mode=disabled, or add --trust"
        )
    launch = config.get("launch")
    if isinstance(launch, Mapping) and launch.get("name") not in (None, "single"):
        raise UntrustedError(
            f"launch.name is {_shown(launch['name'])}, and this run was not made here: set launch.name=single, or add "
            "--trust"
        )


def _mappings(node: Any, path: str) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    if isinstance(node, Mapping):
        yield path, node
        for key, value in node.items():
            yield from _mappings(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, item in enumerate(node):
            yield from _mappings(item, f"{path}[{index}]")


def _check_environment(node: Mapping[Any, Any], path: str) -> None:
    for key, value in node.items():
        where = f"{path}.{key}"
        if key == "task":
            _check_task(value, node.get("suite"), where)
        elif key == "tasks":
            for task in value if isinstance(value, list) else [value]:
                _check_task(task, None, where)
        elif key == "suite":
            from rl_lab.environments.task_names import suites

            if value is not None and value not in suites():
                raise UntrustedError(f"{where} is {_shown(value)}, which is no installed suite: {TRUST}")
        elif key == "eval" and path == "environment":
            if isinstance(value, Mapping):
                _check_environment({"suite": node.get("suite"), **value}, where)
        elif key in FORBIDDEN_ENVIRONMENT_KEYS or (key in WRITTEN_FOLDERS and value is not None):
            raise UntrustedError(f"{where} is {_shown(value)}, and a config does not set it: {TRUST}")
        elif key in MOST_PROCESSES and isinstance(value, int) and value > MOST_PROCESSES[key]:
            raise UntrustedError(f"{where} is {value}, more than {MOST_PROCESSES[key]}: {TRUST}")
        elif key not in ENVIRONMENT_KEYS:
            _check_option(value, where)


def _check_task(task: Any, suite: Any, where: str) -> None:
    """Allow `suite/task` of an installed suite and ids that Gymnasium knows, but no import paths."""
    import gymnasium

    from rl_lab.environments.task_names import canonical, suites, with_suite

    if isinstance(task, str) and _TASK.fullmatch(task) and ".." not in task:
        named = canonical(with_suite(task, suite if isinstance(suite, str) else None))
        if named in gymnasium.registry or named.partition("/")[0] in suites():
            return
    raise UntrustedError(
        f"{where} is {_shown(task)}, which is not an environment of an installed suite: {TRUST}"
    )


def _check_option(value: Any, where: str) -> None:
    """Options of a suite go to constructors of any package: numbers, words and lists of them, but no paths."""
    if value is None or isinstance(value, bool | int | float):
        return
    if isinstance(value, str) and _WORD.fullmatch(value):
        return
    if isinstance(value, list) and len(value) <= 1000:
        for item in value:
            _check_option(item, where)
        return
    raise UntrustedError(f"{where} is {_shown(value)}, which is not a number or a word: {TRUST}")


# --- Runs that were made here ---

KEY_VARIABLE = "RL_LAB_KEY_FILE"
KEY_BYTES = 32
_DOMAIN = b"rl-lab run config v1\0"


def key_file() -> Path:
    """Return the file of this user's key: $RL_LAB_KEY_FILE, or rl_lab/run.key in the user's config folder."""
    if os.environ.get(KEY_VARIABLE):
        return Path(os.environ[KEY_VARIABLE]).expanduser()
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "rl_lab" / "run.key"


def sign(folder: Path, text: bytes) -> bool:
    """Sign the text of a run's config.yaml; return whether this user has a key. folder: config/ of the run.

    Call it before config.yaml is replaced: the signature of the former text is kept beside the new one.
    """
    key = _key(create=True)
    if key is None:
        return False
    former = _signatures(folder)[:1]
    signatures = list(dict.fromkeys([_sign(key, text), *former]))
    with contextlib.suppress(OSError):
        write_json_atomic(
            folder / SIGNATURE, {"about": "made on this machine, see SECURITY.md", "config": signatures}
        )
        return True
    return False


def is_signed(folder: Path, text: bytes) -> bool:
    """Return whether the text of config.yaml was written with this user's key. folder: config/ of the run."""
    key = _key(create=False)
    if key is None:
        return False
    wanted = _sign(key, text)
    return any(hmac.compare_digest(wanted, signature) for signature in _signatures(folder))


def _sign(key: bytes, text: bytes) -> str:
    return hmac.new(key, _DOMAIN + text, hashlib.sha256).hexdigest()


def _signatures(folder: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        data = json.loads(read_bytes(folder / SIGNATURE, 1 << 16))
        found = data.get("config") if isinstance(data, dict) else None
        if isinstance(found, list):
            return [item for item in found[:8] if isinstance(item, str) and item.isascii()]
    return []


def _key(*, create: bool) -> bytes | None:
    """Return the key, or None if there is none, if it cannot be made, or if others can read or change it."""
    try:
        path = key_file()
        if create and not path.exists():
            _make_key(path)
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o077 or status.st_uid != os.geteuid():
            return None
        key = read_bytes(path, 1024)
        return key if len(key) >= KEY_BYTES else None
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None


def _make_key(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass  # another process was faster: its key counts
        except OSError:  # no hard links here
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
