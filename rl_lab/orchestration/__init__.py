"""The training loop: orchestrator, phases, collecting, updates, evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_lab.utils import lazy_exports

if TYPE_CHECKING:
    from rl_lab.orchestration.collector import Collector
    from rl_lab.orchestration.evaluator import Evaluator
    from rl_lab.orchestration.orchestrator import Orchestrator
    from rl_lab.orchestration.phase_scheduler import PhaseScheduler
    from rl_lab.orchestration.phases import PhaseDefinition

__all__ = [
    "Collector",
    "Evaluator",
    "Orchestrator",
    "PhaseDefinition",
    "PhaseScheduler",
]

_MODULES = {
    "Collector": "rl_lab.orchestration.collector",
    "Evaluator": "rl_lab.orchestration.evaluator",
    "Orchestrator": "rl_lab.orchestration.orchestrator",
    "PhaseDefinition": "rl_lab.orchestration.phases",
    "PhaseScheduler": "rl_lab.orchestration.phase_scheduler",
}
__getattr__ = lazy_exports(__name__, _MODULES)
