"""The algorithms: one folder each, on one base class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_lab.utils import lazy_exports

if TYPE_CHECKING:
    from rl_lab.workflows.base import PhaseConfig, WorldModelWorkflow
    from rl_lab.workflows.behaviour_cloning import BehaviourCloningWorkflow
    from rl_lab.workflows.context import ControllerManager, WorkflowContext, WorldModelComponents
    from rl_lab.workflows.diffusion_policy import DiffusionPolicyWorkflow
    from rl_lab.workflows.dreamer import DreamerWorkflow
    from rl_lab.workflows.dreamer.mpc import DreamerMPCWorkflow
    from rl_lab.workflows.iris import IrisWorkflow
    from rl_lab.workflows.og_wm import OriginalWorldModelsWorkflow
    from rl_lab.workflows.random import RandomWorkflow
    from rl_lab.workflows.settings import Settings, read_settings
    from rl_lab.workflows.tdmpc import TDMPCWorkflow

__all__ = [
    "BehaviourCloningWorkflow",
    "ControllerManager",
    "DiffusionPolicyWorkflow",
    "DreamerMPCWorkflow",
    "DreamerWorkflow",
    "IrisWorkflow",
    "OriginalWorldModelsWorkflow",
    "PhaseConfig",
    "RandomWorkflow",
    "Settings",
    "TDMPCWorkflow",
    "WorkflowContext",
    "WorldModelComponents",
    "WorldModelWorkflow",
    "read_settings",
]

_MODULES = {
    "BehaviourCloningWorkflow": "rl_lab.workflows.behaviour_cloning",
    "ControllerManager": "rl_lab.workflows.context",
    "DiffusionPolicyWorkflow": "rl_lab.workflows.diffusion_policy",
    "DreamerMPCWorkflow": "rl_lab.workflows.dreamer.mpc",
    "DreamerWorkflow": "rl_lab.workflows.dreamer",
    "IrisWorkflow": "rl_lab.workflows.iris",
    "OriginalWorldModelsWorkflow": "rl_lab.workflows.og_wm",
    "PhaseConfig": "rl_lab.workflows.base",
    "RandomWorkflow": "rl_lab.workflows.random",
    "Settings": "rl_lab.workflows.settings",
    "TDMPCWorkflow": "rl_lab.workflows.tdmpc",
    "WorkflowContext": "rl_lab.workflows.context",
    "WorldModelComponents": "rl_lab.workflows.context",
    "WorldModelWorkflow": "rl_lab.workflows.base",
    "read_settings": "rl_lab.workflows.settings",
}
__getattr__ = lazy_exports(__name__, _MODULES)
