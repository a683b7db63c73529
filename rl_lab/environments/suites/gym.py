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
from rl_lab.utils.untrusted import in_run_folder

EXTRA = "classic"  # most registered ids need it
PYTHON = "python"  # module of the tasks that a program passed as objects: "python:MyEnv"

_given: dict[str, Callable[..., Any]] = {}  # name -> class or factory that this program passed


def tasks() -> list[str]:
    """Return the ids that are registered now; importing packages can register more."""
    return sorted(gymnasium.registry)


def name_task(env: Any) -> str:
    """Return the task of an environment that a program passes: a name, a class, or a function that creates one.

    A class or function of a module becomes its import path. One of a notebook, of the running script or of another
    function has none: it is remembered under "python:NAME", which only this program can look up.
    """
    if isinstance(env, str):
        return env
    if isinstance(env, gymnasium.envs.registration.EnvSpec):
        return env.id
    if isinstance(env, gymnasium.Env) or not callable(env):
        raise ConfigError(
            f"env is a {type(env).__name__}, and a run needs several environments: pass a class, a function that "
            "creates one (lambda: MyEnv(size=3)), a Gymnasium id or an import path ('my_env:MyEnv')"
        )
    module, name = getattr(env, "__module__", None), getattr(env, "__qualname__", type(env).__name__)
    if module and module != "__main__" and _attribute(sys.modules.get(module), name) is env:
        return f"{module}:{name}"
    name = "lambda" if "<lambda>" in name else name.rpartition(".")[2]
    remember(name, env)
    return f"{PYTHON}:{name}"


def remember(name: str, env: Callable[..., Any]) -> None:
    """Make `env` the environment "python:NAME" of this program."""
    _given[name] = env


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
    if module_name == PYTHON:
        return _given_or_defined(name)
    if os.getcwd() not in sys.path and "" not in sys.path and not in_run_folder(os.getcwd()):
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
    found = _attribute(module, name)
    if callable(found):
        return found
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise ConfigError(f"module '{module_name}' has no environment '{name}'.{nearest(name, public)}")


def _given_or_defined(name: str) -> Any:
    """Return the environment "python:NAME": one that was passed, or a class or function of the running program."""
    found = _given.get(name) or _attribute(sys.modules.get("__main__"), name)
    if callable(found):
        return found
    raise ConfigError(
        f"environment.task={PYTHON}:{name} was a Python object of the program that started the run: pass it again, as "
        f"in rl_lab.resume(run, env={name}) or rl_lab.evaluate(run, env={name}); for the command line, put it into a "
        f"file and train with environment.task=my_file:{name}"
    )


def _attribute(module: Any, name: str) -> Any:
    """Return the object at a dotted name in a module, or None."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _accepts(factory: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
