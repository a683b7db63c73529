"""Diffusion Policy: workflow, noise schedule, settings."""

from rl_lab.workflows.diffusion_policy.workflow import DiffusionPolicyWorkflow

__all__ = ["DiffusionPolicyWorkflow"]
