"""Hyperparameters of Dreamer, read from `algorithm.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_lab.errors import ConfigError
from rl_lab.workflows.settings import read_loss_scales, require_all

# Keys of `algorithm.loss_scales`; `reconstruction` applies to every observation.
LOSSES = (
    "reconstruction",
    "reward",
    "continue",
    "dynamics",
    "representation",
    "actor",
    "critic",
    "replay_value",
)


@dataclass(frozen=True)
class DreamerSettings:
    """configs/algorithm/dreamer.yaml describes each field and has the published values."""

    learning_rate: float
    batch_size: int
    batch_length: int
    replay_context: int
    sampler: str
    imagination_horizon: int
    imagination_last: int
    discount_horizon: float
    entropy: float
    free_nats: float
    slow_critic_rate: float
    max_grad_norm: float
    loss_scales: dict[str, float]

    @classmethod
    def from_config(cls, algorithm: Mapping[str, Any]) -> DreamerSettings:
        require_all(cls, algorithm, "dreamer")
        settings = cls(
            learning_rate=float(algorithm["learning_rate"]),
            batch_size=int(algorithm["batch_size"]),
            batch_length=int(algorithm["batch_length"]),
            replay_context=int(algorithm["replay_context"]),
            sampler=str(algorithm["sampler"]),
            imagination_horizon=int(algorithm["imagination_horizon"]),
            imagination_last=int(algorithm["imagination_last"]),
            discount_horizon=float(algorithm["discount_horizon"]),
            entropy=float(algorithm["entropy"]),
            free_nats=float(algorithm["free_nats"]),
            slow_critic_rate=float(algorithm["slow_critic_rate"]),
            max_grad_norm=float(algorithm["max_grad_norm"]),
            loss_scales=read_loss_scales(algorithm, LOSSES),
        )
        settings.check()
        return settings

    def check(self) -> None:
        if self.replay_context not in (0, 1):
            raise ConfigError(
                f"algorithm.replay_context is {self.replay_context}: set it to 0 or 1 (stored latents)"
            )
        if self.batch_length < 2:
            raise ConfigError("algorithm.batch_length must be at least 2: a return needs a next step")
        if not 0 <= self.imagination_last <= self.batch_length or self.imagination_last == 1:
            raise ConfigError(
                f"algorithm.imagination_last is {self.imagination_last}: set it to 0 (every step) "
                f"or to a value from 2 to batch_length ({self.batch_length})"
            )

    @property
    def discount(self) -> float:
        return 1.0 - 1.0 / self.discount_horizon

    @property
    def starts(self) -> int:
        """Number of last steps of each sequence from which imagination starts."""
        return self.imagination_last or self.batch_length
