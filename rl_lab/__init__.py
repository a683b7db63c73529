"""RL Lab: world-model reinforcement learning on one loop, one replay and one set of environments.

    import rl_lab

    run = rl_lab.train("dreamer_cartpole", ["training.total_timesteps=2000"])
    scores = rl_lab.evaluate(run.path, episodes=20)
    agent = rl_lab.load_agent(run.path)
    action = agent.act(obs)

Importing this package loads no torch; the names below are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_lab.utils import lazy_exports

if TYPE_CHECKING:
    from rl_lab.agent import Agent, load_agent
    from rl_lab.environments.make import make_env
    from rl_lab.environments.world_model_env import WorldModelEnv
    from rl_lab.orchestration.callbacks import Callback
    from rl_lab.tools.check_env import EnvCheck, check_env
    from rl_lab.tools.evaluate import evaluate
    from rl_lab.tools.export.command import export
    from rl_lab.training import RunResult, resume, train

__version__ = "0.1.0"
__all__ = [
    "Agent",
    "Callback",
    "EnvCheck",
    "RunResult",
    "WorldModelEnv",
    "check_env",
    "evaluate",
    "export",
    "load_agent",
    "make_env",
    "resume",
    "train",
]

_MODULES = {
    "Agent": "rl_lab.agent",
    "Callback": "rl_lab.orchestration.callbacks",
    "EnvCheck": "rl_lab.tools.check_env",
    "RunResult": "rl_lab.training",
    "WorldModelEnv": "rl_lab.environments.world_model_env",
    "check_env": "rl_lab.tools.check_env",
    "evaluate": "rl_lab.tools.evaluate",
    "export": "rl_lab.tools.export.command",
    "load_agent": "rl_lab.agent",
    "make_env": "rl_lab.environments.make",
    "resume": "rl_lab.training",
    "train": "rl_lab.training",
}
__getattr__ = lazy_exports(__name__, _MODULES)
