"""The path of `ControllerManager` in the founding documents; it is defined in `context.py`."""

from rl_lab.workflows.context import ControllerManager

__all__ = ["ControllerManager"]
