"""The way back from actions as networks see them: the reverse of ActionEncoder."""

from __future__ import annotations

import torch

from rl_lab.records import ActionSpec


def stored_action(action: torch.Tensor, spec: ActionSpec) -> torch.Tensor:
    """(…, A) numbers or one-hot choices -> as stored and sent: (…, d) floats, (…, k) or (…) integers."""
    if spec.kind == "continuous":
        return action
    chosen = [part.argmax(-1) for part in action.split(spec.choices, -1)]
    return chosen[0] if spec.kind == "discrete" else torch.stack(chosen, -1)
