"""DreamerV3: workflow, losses, report, settings, and a variant that acts by planning (mpc.py)."""

from rl_lab.workflows.dreamer.workflow import DreamerWorkflow

__all__ = ["DreamerWorkflow"]
