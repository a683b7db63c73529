"""No representation learning: the observation is the state."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Observation = TypeVar("Observation")  # a tensor, or a dict of tensors


class IdentityRepresentation(nn.Module):
    """Passes observations through unchanged, one step (B, …) or a sequence (B, T, …)."""

    def observe(self, obs: Observation) -> Observation:
        return obs

    def observe_sequence(self, obs: Observation) -> Observation:
        return obs

    def decode(self, state: Observation) -> Observation:
        return state
