"""Uniformly random actions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_lab.components.nn.policies import make_policy
from rl_lab.records import ActMode, Spec


class RandomPolicyController:
    """Every choice equally likely; continuous actions uniform in [-1, 1]. Has no weights."""

    def __init__(self, *, spec: Spec) -> None:
        self.policy = make_policy(spec.action)

    def act(self, obs: Mapping[str, torch.Tensor], mode: ActMode) -> torch.Tensor:
        """obs: name -> (N, …) -> actions (N, …)."""
        first = next(iter(obs.values()))
        noise = torch.rand(
            len(first), *self.policy.noise_shape, generator=mode.generator, device=first.device
        )
        return self.policy.random(noise)
