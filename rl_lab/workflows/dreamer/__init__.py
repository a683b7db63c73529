"""Dreamer: workflow, acting, losses, report, settings; planning (mpc.py) and exploration (explore.py)."""

from rl_lab.workflows.dreamer.workflow import DreamerWorkflow

__all__ = ["DreamerWorkflow"]
