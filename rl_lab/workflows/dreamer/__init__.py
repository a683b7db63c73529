"""Dreamer: workflow, losses, report, settings; variants that act by planning (mpc.py) and that explore (explore.py)."""

from rl_lab.workflows.dreamer.workflow import DreamerWorkflow

__all__ = ["DreamerWorkflow"]
