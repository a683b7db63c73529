"""DreamerV3: workflow, losses, report, settings, and the variant that acts by planning."""

from rl_lab.workflows.dreamer.workflow import DreamerWorkflow

__all__ = ["DreamerWorkflow"]
