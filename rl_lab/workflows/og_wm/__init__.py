"""World Models (2018): workflow, report, settings."""

from rl_lab.workflows.og_wm.workflow import OriginalWorldModelsWorkflow

__all__ = ["OriginalWorldModelsWorkflow"]
