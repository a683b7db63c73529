"""The algorithms: one folder each, on one base class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_lab.utils import lazy_exports

if TYPE_CHECKING:
    from rl_lab.workflows.base import PhaseConfig, WorldModelWorkflow
    from rl_lab.workflows.context import WorkflowContext, WorldModelComponents
    from rl_lab.workflows.controllers import ControllerManager
    from rl_lab.workflows.dreamer import DreamerWorkflow
    from rl_lab.workflows.dreamer.mpc import DreamerMPCWorkflow
    from rl_lab.workflows.iris import IrisWorkflow
    from rl_lab.workflows.og_wm import OriginalWorldModelsWorkflow
    from rl_lab.workflows.random import RandomWorkflow
    from rl_lab.workflows.tdmpc import TDMPCWorkflow

__all__ = [
    "ControllerManager",
    "DreamerMPCWorkflow",
    "DreamerWorkflow",
    "IrisWorkflow",
    "OriginalWorldModelsWorkflow",
    "PhaseConfig",
    "RandomWorkflow",
    "TDMPCWorkflow",
    "WorkflowContext",
    "WorldModelComponents",
    "WorldModelWorkflow",
]

_MODULES = {
    "ControllerManager": "rl_lab.workflows.controllers",
    "DreamerMPCWorkflow": "rl_lab.workflows.dreamer.mpc",
    "DreamerWorkflow": "rl_lab.workflows.dreamer",
    "IrisWorkflow": "rl_lab.workflows.iris",
    "OriginalWorldModelsWorkflow": "rl_lab.workflows.og_wm",
    "PhaseConfig": "rl_lab.workflows.base",
    "RandomWorkflow": "rl_lab.workflows.random",
    "TDMPCWorkflow": "rl_lab.workflows.tdmpc",
    "WorkflowContext": "rl_lab.workflows.context",
    "WorldModelComponents": "rl_lab.workflows.context",
    "WorldModelWorkflow": "rl_lab.workflows.base",
}
__getattr__ = lazy_exports(__name__, _MODULES)
