"""TD-MPC2 and, as a config, TD-MPC: workflow, losses, settings, and the model that the planner searches."""

from rl_lab.workflows.tdmpc.workflow import TDMPCWorkflow

__all__ = ["TDMPCWorkflow"]
