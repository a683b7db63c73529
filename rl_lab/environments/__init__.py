"""Environments: one door (`make_env`), one vector environment, one adapter per suite."""

from rl_lab.environments.make import env_config_options, make_env, probe_spec, suites
from rl_lab.environments.vector import VectorEnv

__all__ = ["VectorEnv", "env_config_options", "make_env", "probe_spec", "suites"]
