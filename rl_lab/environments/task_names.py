"""What a task's name means: suites and their modules, names of other projects, the words for the command line."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import gymnasium

from rl_lab.environments.suites.gym import name_task, nearest
from rl_lab.errors import ConfigError

if TYPE_CHECKING:
    from rl_lab.environments.interpreters.places import Place

Task = str | Callable[..., gymnasium.Env]

SUITES = {
    "gym": "rl_lab.environments.suites.gym",
    "dummy": "rl_lab.environments.suites.dummy",
    "atari": "rl_lab.environments.suites.atari",
    "atari100k": "rl_lab.environments.suites.atari100k",
    "dmc": "rl_lab.environments.suites.dmc",
    "crafter": "rl_lab.environments.suites.crafter",
    "minigrid": "rl_lab.environments.suites.minigrid",
    "carracing": "rl_lab.environments.suites.carracing",
    "pusht": "rl_lab.environments.suites.pusht",
    "popgym": "rl_lab.environments.suites.popgym",
    "memory_maze": "rl_lab.environments.suites.memory_maze",
    "minecraft": "rl_lab.environments.suites.minecraft",
    "dmlab": "rl_lab.environments.suites.dmlab",
    "vizdoom": "rl_lab.environments.suites.vizdoom",
    "bsuite": "rl_lab.environments.suites.bsuite",
    "procgen": "rl_lab.environments.suites.procgen",
    "metaworld": "rl_lab.environments.suites.metaworld",
    "loconav": "rl_lab.environments.suites.loconav",
    "pinpad": "rl_lab.environments.suites.pinpad",
    "tensor": "rl_lab.environments.suites.tensor",
    "multitask": "rl_lab.environments.suites.multitask",
}
ENTRY_POINTS = "rl_lab.environments"


def suites() -> dict[str, str]:
    """Return suite -> adapter module, including the suites of other packages."""
    others = {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    return {**others, **SUITES}


def task_words(name: str) -> str:
    """Return the words that choose a task by any of its names, or "" for an unknown one."""
    suite, slash, task = canonical(name).partition("/")
    if ":" in name or name in gymnasium.registry:
        return f"environment=gym environment.task={name}"
    if slash and suite in suites():
        return f"environment={suite} environment.task={task}"
    others = {
        known: importlib.import_module(module).tasks() for known, module in SUITES.items() if known != "gym"
    }
    return " or ".join(
        f"environment={known} environment.task={name}" for known in others if name in others[known]
    )


def split(task: Task) -> tuple[str, str, Any]:
    """Return name, adapter module, and the task for the adapter."""
    gym = SUITES["gym"]
    if callable(task):
        return getattr(task, "__name__", type(task).__name__), gym, task
    if not isinstance(task, str):
        name_task(task)  # says what it must be
    task = canonical(task)
    if task in gymnasium.registry:
        return task, gym, task
    if ":" in task:
        return task, gym, task.removeprefix("gym:")
    suite, slash, remainder = task.partition("/")
    known = SUITES if suite in SUITES else suites()
    if slash and suite in known:
        return task, known[suite], remainder
    if slash:
        raise ConfigError(
            f"no suite '{suite}' and no registered environment '{task}'.{nearest(task, all_tasks())} "
            f"Suites: {', '.join(sorted(known))}"
        )
    raise ConfigError(
        f"no environment '{task}'.{nearest(task, all_tasks())} Use the task of a suite ('suite/task'; suites: "
        f"{', '.join(sorted(known))}), a registered Gymnasium id, or an import path ('my_module:MyEnv')"
    )


def split_far(task: Task, place: Place) -> tuple[str, str, str]:
    """Like `split`; an id may be registered in the other interpreter only."""
    if not isinstance(task, str):
        raise ConfigError(
            f"{place.key} needs an environment by its name, such as 'my_module:MyEnv', not a Python object"
        )
    task = canonical(task)
    suite, slash, remainder = task.partition("/")
    if slash and ":" not in suite and suite in suites():
        if suite == "multitask":
            raise ConfigError(
                f"{place.key}: give each of environment.tasks its own: [{{task: …, python: …}}]"
            )
        return task, suites()[suite], remainder
    return task, SUITES["gym"], task.removeprefix("gym:")


def all_tasks() -> list[str]:
    names = list(gymnasium.registry)
    for suite, module in SUITES.items():
        if suite != "gym":
            names += [f"{suite}/{task}" for task in importlib.import_module(module).tasks()]
    return names


# --- Task names of other projects ------------------------------------------------------------------------
#
#     atari_pong                  atari/pong              DreamerV3 and its ports
#     atari100k_pong              atari100k/pong
#     dmc_walker_walk             dmc/walker_walk
#     crafter_reward              crafter/reward
#     memmaze_9x9                 memory_maze/9x9
#     BreakoutNoFrameskip-v4      atari100k/Breakout      IRIS and others: not sticky, minimal action set
#                                                         (with environment=atari or atari100k, that suite)
#     MemoryMaze-9x9-v0           memory_maze/9x9
#     CrafterReward-v1            crafter/reward
#     MiniGrid-Empty-5x5-v0       minigrid/…              as registered, with the suite's observations
#     popgym-CountRecallEasy-v0   popgym/…
#     carracing                   carracing/continuous
#     minecraft_diamond           minecraft/diamond       DreamerV3; also dmlab_…, procgen_…, loconav_…, pinpad_…
#     bsuite_catch/3              bsuite/catch/3
#     dmc_rodent_rodent_run_gaps  dmc/rodent_run_gaps
#     mw-push                     metaworld/push          TD-MPC2
#     DoomTakeCover-v0            vizdoom/take_cover      World Models
#
# Other names are not changed.

ALIASES = (
    (r"dmc_rodent_rodent_(\w+)", r"dmc/rodent_\1"),
    (r"(atari|atari100k|crafter|dmc|minigrid|popgym|carracing)_(\w+)", r"\1/\2"),
    (r"(minecraft|dmlab|procgen|loconav|pinpad|vizdoom)_(\w+)", r"\1/\2"),
    (r"bsuite_(\w+(?:/\d+)?)", r"bsuite/\1"),
    (r"mw-([a-z-]+)", r"metaworld/\1"),
    (r"DoomTakeCover-v0", r"vizdoom/take_cover"),
    (r"(?:memmaze|memorymaze|memory_maze)_(\d+x\d+)", r"memory_maze/\1"),
    (r"MemoryMaze-(\d+x\d+)-v0", r"memory_maze/\1"),
    (r"(\w+)NoFrameskip-v4", r"atari100k/\1"),
    (r"CrafterReward-v1|crafter", "crafter/reward"),
    (r"CrafterNoReward-v1", "crafter/noreward"),
    (r"((?:MiniGrid|BabyAI)-.+)", r"minigrid/\1"),
    (r"popgym-(.+)-v0", r"popgym/\1"),
    (r"carracing", "carracing/continuous"),
)


def canonical(task: str) -> str:
    """Return `suite/task` for a name in the table; any other name is returned unchanged."""
    for pattern, replacement in ALIASES:
        match = re.fullmatch(pattern, task)
        if match:
            return match.expand(replacement)
    return task


# Suites of the same games: the config's suite decides, because DreamerV3's name atari_pong is used with both.
SAME_GAMES = ("atari", "atari100k")


def with_suite(task: str, suite: str | None) -> str:
    """Return `suite/pong` for the task `pong` in the config file of a suite; full names are not changed."""
    named = canonical(task)
    given, _, game = named.partition("/")
    if suite in SAME_GAMES and given in SAME_GAMES and "/" not in task:
        return f"{suite}/{game}"
    if not suite or "/" in named or ":" in named:
        return named
    return f"{suite}/{named}"
