"""Names that other projects use for the same tasks.

    atari_pong                  atari/pong              DreamerV3 and its ports
    atari100k_pong              atari100k/pong
    dmc_walker_walk             dmc/walker_walk
    crafter_reward              crafter/reward
    memmaze_9x9                 memory_maze/9x9
    BreakoutNoFrameskip-v4      atari100k/Breakout      IRIS and other Atari 100k code: no sticky actions, own actions
    MemoryMaze-9x9-v0           memory_maze/9x9
    CrafterReward-v1            crafter/reward
    MiniGrid-Empty-5x5-v0       minigrid/…              as registered, with the suite's observations
    popgym-CountRecallEasy-v0   popgym/…
    carracing                   carracing/continuous

Whatever the table does not know stays as it is.
"""

from __future__ import annotations

import re

ALIASES = (
    (r"(atari|atari100k|crafter|dmc|minigrid|popgym|carracing)_(\w+)", r"\1/\2"),
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
    """`suite/task` for a name that the table knows; any other name as it is."""
    for pattern, replacement in ALIASES:
        match = re.fullmatch(pattern, task)
        if match:
            return match.expand(replacement)
    return task


def with_suite(task: str, suite: str | None) -> str:
    """The task of a config file that belongs to a suite: `pong` is then `suite/pong`; full names stay."""
    named = canonical(task)
    if not suite or "/" in named or ":" in named:
        return named
    return f"{suite}/{named}"
