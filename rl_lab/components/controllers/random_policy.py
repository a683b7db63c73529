"""Random actions: independent in each step, or correlated over time for exploration."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_lab.components.nn.actions import make_policy
from rl_lab.errors import ConfigError, closest
from rl_lab.records import ActMode, Spec


class RandomPolicyController:
    """Uniformly random discrete actions; continuous actions uniform in [-1, 1]. Has no weights."""

    def __init__(self, *, spec: Spec) -> None:
        self.policy = make_policy(spec.action)

    def act(self, obs: Mapping[str, torch.Tensor], mode: ActMode) -> torch.Tensor:
        """obs: name -> (N, …) -> actions (N, …)."""
        first = next(iter(obs.values()))
        noise = torch.rand(
            len(first), *self.policy.noise_shape, generator=mode.generator, device=first.device
        )
        return self.policy.random(noise)


KINDS = ("uniform", "held", "brownian")

State = dict[str, torch.Tensor]


class Explorer:
    """Random actions that persist over time: independent actions in each frame hardly move a car.

    uniform:  a new action in every step
    held:     a uniformly random action, repeated for 1 to `hold` steps (World Models' Doom,
              hardmaru/WorldModelsExperiments)
    brownian: a random walk of continuous actions with standard deviation sqrt(`step`) from a uniform start
              (ctallec/world-models, with 1/50)
    """

    def __init__(self, *, spec: Spec, kind: str = "uniform", hold: int = 10, step: float = 0.02) -> None:
        if kind not in KINDS:
            raise ConfigError(f"explorer kind is '{kind}'.{closest(kind, KINDS)}")
        if kind == "brownian" and spec.action.kind != "continuous":
            raise ConfigError(
                f"explorer kind=brownian needs continuous actions, not the {spec.action.kind} ones of {spec.name}: "
                "use kind=held"
            )
        self.kind = kind
        self.hold = hold
        self.deviation = step**0.5
        self.action = spec.action
        self.policy = make_policy(spec.action)

    def initial_state(self, size: int, device: torch.device | str = "cpu") -> State:
        """explored: the last action (size, …); left: steps for which it is still repeated (size,)."""
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
            renew = is_first | (left == 0)
            length = torch.randint(self.hold, (size,), generator=generator, device=device)
            action = torch.where(renew.view(-1, *[1] * (last.ndim - 1)), fresh, last)
            left = torch.where(renew, length, left - 1)
        else:
            action = fresh
        return action, {"explored": action, "left": left}
