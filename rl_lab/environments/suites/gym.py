"""Suite `gym`: registered Gymnasium ids, classes and functions by import path, and factory functions."""

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

from rl_lab.errors import ConfigError, MissingPackageError

EXTRA = "classic"  # most registered ids need it


def tasks() -> list[str]:
    """Return the ids that are registered now; importing packages can register more."""
    return sorted(gymnasium.registry)


def resolve(task: Any) -> Any:
    """Return the EnvSpec of an id, or the object of an import path: workers do not need the registry."""
    if not isinstance(task, str):
        return task
    if ":" in task:
        return _import(task)
    if task not in gymnasium.registry:
        raise ConfigError(
            f"no Gymnasium environment '{task}' is registered.{nearest(task, tasks())} For your own "
            "package, add the module: 'my_package:MyEnv-v0'"
        )
    return gymnasium.registry[task]


def make(task: Any, *, render: bool = False, **options: Any) -> gymnasium.Env:
    """Create one environment, without the lab's wrappers; `options` are passed to its constructor."""
    # Only if needed: not every constructor accepts this argument.
    frames: dict[str, Any] = {"render_mode": "rgb_array"} if render else {}
    if render and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame renders to memory, without a display
    if isinstance(task, gymnasium.envs.registration.EnvSpec):
        if render and str(task.entry_point).startswith("gymnasium.envs.mujoco"):
            from rl_lab.environments.rendering import choose_renderer

            choose_renderer(needed=True)  # Gymnasium would need a display
        spec = copy.deepcopy(task)
        spec.order_enforce = False  # EnvRunner keeps the order, so the check is not needed
        try:
            return gymnasium.make(spec, disable_env_checker=True, **frames, **options)
        except gymnasium.error.DependencyNotInstalled as error:
            raise MissingPackageError(
                f"{task.id} needs a package that is not installed: {_first_line(error)}"
            ) from error
    env = task(**options, **(frames if _accepts(task, "render_mode") else {}))
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{task} returned a {type(env).__name__}: it must return a gymnasium.Env")
    return env


def step_seconds(task: Any) -> float | None:
    """Gymnasium's classic control and toy text environments are fast; others are unknown."""
    entry = getattr(task, "entry_point", None)
    fast = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text")
    return 20e-6 if isinstance(entry, str) and entry.startswith(fast) else None


def nearest(name: str, known: list[str]) -> str:
    """Return a sentence with the closest known ids, or ""; ignores case and version."""
    newest = {_plain(item): item for item in sorted(known)}  # the last version wins
    near = difflib.get_close_matches(_plain(name), newest, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(newest[item]) for item in near)}?" if near else ""


def load_old_gym() -> None:
    """Import the package `gym`, if installed, without its deprecation message: some suites import it."""
    with contextlib.suppress(ModuleNotFoundError), contextlib.redirect_stderr(io.StringIO()):
        import gym  # noqa: F401


def _plain(name: str) -> str:
    return re.sub(r"-v\d+$", "", name).lower()


def _import(path: str) -> Any:
    """Import `module:name`, where the name is a class, a function, or an id that the module registers."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # an installed command does not search the current folder
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"environment '{path}': cannot import '{error.name}'; run from the folder of {module_name}.py, or install "
            "the package"
        ) from error
    except SystemExit as error:  # it would stop the trainer without a message
        raise ConfigError(
            f"module '{module_name}' calls sys.exit({error.code!r}) when it is imported: move the code of the script "
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
    raise ConfigError(f"module '{module_name}' has no environment '{name}'.{nearest(name, public)}")


def _accepts(factory: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
