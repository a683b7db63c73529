"""Uniformly random actions."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_lab.components.nn.actions import make_policy
from rl_lab.errors import ConfigError, closest
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


# --------------------
# Exploration without learning whose actions last: a car that steers anew in every frame goes nowhere.


KINDS = ("uniform", "held", "brownian")

State = dict[str, torch.Tensor]


class Explorer:
    """Random actions with memory.

    uniform:  another action in every step
    held:     a uniformly random action, kept for 1 to `hold` steps (World Models' Doom, hardmaru/WorldModelsExperiments)
    brownian: continuous actions on a random walk of deviation sqrt(`step`), begun anywhere in their range
              (ctallec/world-models, there 1/50)
    """

    def __init__(self, *, spec: Spec, kind: str = "uniform", hold: int = 10, step: float = 0.02) -> None:
        if kind not in KINDS:
            raise ConfigError(f"an explorer cannot be '{kind}'.{closest(kind, KINDS)}")
        if kind == "brownian" and spec.action.kind != "continuous":
            raise ConfigError(
                f"a brownian explorer needs continuous actions, and {spec.name} has {spec.action.kind} ones: use held"
            )
        self.kind = kind
        self.hold = hold
        self.deviation = step**0.5
        self.action = spec.action
        self.policy = make_policy(spec.action)

    def initial_state(self, size: int, device: torch.device | str = "cpu") -> State:
        """explored: the last action (size, …); left: steps that it is still held (size,)."""
        dtype = torch.float32 if self.action.kind == "continuous" else torch.int64
        return {
            "explored": torch.zeros(size, *self.action.shape, dtype=dtype, device=device),
            "left": torch.zeros(size, dtype=torch.int64, device=device),
        }

    def act(
        self, state: State, is_first: torch.Tensor, generator: torch.Generator | None = None
    ) -> tuple[torch.Tensor, State]:
        """Actions (N, …) as stored, continuous ones in [-1, 1], and the next state. is_first: (N,) bool."""
        size, device = len(is_first), is_first.device
        noise = torch.rand(size, *self.policy.noise_shape, generator=generator, device=device)
        fresh = self.policy.random(noise)
        last, left = state["explored"], state["left"]
        if self.kind == "brownian":
            step = self.deviation * torch.randn(last.shape, generator=generator, device=device)
            action = torch.where(is_first[:, None], fresh, (last + step).clamp(-1.0, 1.0))
        elif self.kind == "held":
            again = is_first | (left == 0)
            length = torch.randint(self.hold, (size,), generator=generator, device=device)
            action = torch.where(again.view(-1, *[1] * (last.ndim - 1)), fresh, last)
            left = torch.where(again, length, left - 1)
        else:
            action = fresh
        return action, {"explored": action, "left": left}
