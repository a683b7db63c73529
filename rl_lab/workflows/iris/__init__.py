"""IRIS and Δ-IRIS: workflow, policy loss, report, settings."""

from rl_lab.workflows.iris.workflow import IrisWorkflow

__all__ = ["IrisWorkflow"]
