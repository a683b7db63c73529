"""Adapters, one module for each suite of environments; `rl_lab.environments.make` imports them by name."""
