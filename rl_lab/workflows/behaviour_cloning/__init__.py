"""Behaviour cloning: workflow, settings."""

from rl_lab.workflows.behaviour_cloning.workflow import BehaviourCloningWorkflow

__all__ = ["BehaviourCloningWorkflow"]
