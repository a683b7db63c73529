"""Environments: `make_env`, the vector environment, wrappers, one module for each suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_lab.utils import lazy_exports

if TYPE_CHECKING:
    from rl_lab.environments.make import env_config_options, make_env, probe_spec
    from rl_lab.environments.vector import VectorEnv
    from rl_lab.environments.world_model_env import WorldModelEnv, WorldModelVectorEnv

__all__ = [
    "VectorEnv",
    "WorldModelEnv",
    "WorldModelVectorEnv",
    "env_config_options",
    "make_env",
    "probe_spec",
]

_MODULES = {
    "VectorEnv": "rl_lab.environments.vector",
    "WorldModelEnv": "rl_lab.environments.world_model_env",
    "WorldModelVectorEnv": "rl_lab.environments.world_model_env",
    "env_config_options": "rl_lab.environments.make",
    "make_env": "rl_lab.environments.make",
    "probe_spec": "rl_lab.environments.make",
}
__getattr__ = lazy_exports(__name__, _MODULES)
