"""RL Lab: one laboratory for world-model reinforcement learning.

    import rl_lab
    run = rl_lab.train("dreamer_cartpole", ["training.total_timesteps=2000"])
    agent = rl_lab.load_agent(run.path)
    action = agent.act(obs)

Importing this package loads no torch; the functions below do when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_lab.agent import load_agent
    from rl_lab.environments.make import make_env
    from rl_lab.training import train

__version__ = "0.1.0"
__all__ = ["load_agent", "make_env", "train"]

_HOMES = {"train": "rl_lab.training", "load_agent": "rl_lab.agent", "make_env": "rl_lab.environments.make"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'rl_lab' has no attribute '{name}'")
