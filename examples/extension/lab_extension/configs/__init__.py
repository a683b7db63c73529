"""YAML files in the lab's groups; the entry point `rl_lab.configs` names this package."""
