"""Suite `gym`: registered Gymnasium ids, classes and functions by import path, and factories."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import gymnasium

from rl_lab.environments.rendering import choose_renderer
from rl_lab.errors import ConfigError, MissingPackageError

EXTRA = "classic"  # what most registered ids need


def tasks() -> list[str]:
    """Ids registered now. Packages register more when they are imported."""
    return sorted(gymnasium.registry)


def resolve(task: Any) -> Any:
    """An id becomes its registration and a path its object, so that a worker needs no registry of its own."""
    if not isinstance(task, str):
        return task
    if ":" in task:
        return _import(task)
    if task not in gymnasium.registry:
        raise ConfigError(
            f"no Gymnasium environment '{task}' is registered.{nearest(task, tasks())} A package of your own is "
            "named with its module: 'my_package:MyEnv-v0'"
        )
    return gymnasium.registry[task]


def make(task: Any, *, render: bool = False, **options: Any) -> gymnasium.Env:
    """One environment, as its author made it. `options` go to its constructor."""
    # Only where it is asked for: not every constructor knows the keyword.
    frames: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    if render and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault(
            "SDL_VIDEODRIVER", "dummy"
        )  # pygame draws into memory, and does not look for a screen
    if isinstance(task, gymnasium.envs.registration.EnvSpec):
        if render and str(task.entry_point).startswith("gymnasium.envs.mujoco"):
            choose_renderer(needed=True)  # Gymnasium would look for a screen
        spec = copy.deepcopy(task)
        spec.order_enforce = False  # the runner keeps the order, so the check would only cost time
        try:
            return gymnasium.make(spec, disable_env_checker=True, **frames, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingPackageError(
                f"{task.id} needs a package that is not installed: {_first_line(error)}"
            ) from error
    env = task(**options, **(frames if _takes(task, "render_mode") else {}))
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{task} gave a {type(env).__name__}, not a gymnasium.Env")
    return env


def step_seconds(task: Any) -> float | None:
    """Gymnasium's classic control and toy text are known to be quick."""
    entry = getattr(task, "entry_point", None)
    quick = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
    return 20e-6 if isinstance(entry, str) and entry.startswith(quick) else None


def nearest(name: str, known: list[str]) -> str:
    """The closest known ids as a sentence, or nothing; letter case and versions do not count."""
    newest = {_plain(item): item for item in sorted(known)}  # of several versions the last one stays
    near = difflib.get_close_matches(_plain(name), newest, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(newest[item]) for item in near)}?" if near else ""


def load_old_gym() -> None:
    """Import the package `gym` where it is installed: some suites do, and it would lecture on every start."""
    with contextlib.suppress(ModuleNotFoundError), contextlib.redirect_stderr(io.StringIO()):
        import gym  # noqa: F401


def _plain(name: str) -> str:
    return re.sub(r"-v\d+$", "", name).lower()


def _import(path: str) -> Any:
    """`module:name`: a class or function, or an id that importing the module registers."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not look into the folder it is called in
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"cannot import '{error.name}' for the environment '{path}': run from the folder that has {module_name}.py, "
            "or install the package"
        ) from error
    except SystemExit as error:  # it would end the trainer without a word
        raise ConfigError(
            f"the module '{module_name}' calls sys.exit({error.code!r}) when it is imported: put what runs as a script "
            'below if __name__ == "__main__"'
        ) from error
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return found
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise ConfigError(f"the module '{module_name}' has no environment '{name}'.{nearest(name, public)}")


def _takes(factory: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
