"""One module for each suite of environments; `rl_lab.environments.make` finds them by name."""
