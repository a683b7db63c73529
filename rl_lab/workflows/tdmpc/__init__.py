"""TD-MPC2, and TD-MPC by config: workflow, losses, settings, and the model that the planner searches."""

from rl_lab.workflows.tdmpc.workflow import TDMPCWorkflow

__all__ = ["TDMPCWorkflow"]
