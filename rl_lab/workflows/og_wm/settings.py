"""Hyperparameters of World Models, read from `algorithm.*`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rl_lab.errors import ConfigError, reject_unknown, require_choice
from rl_lab.records import EarlyStop
from rl_lab.workflows.settings import read_loss_scales, require_all

MEMORIES = ("h", "hc", "none")
LOSSES = ("latent", "reward", "done")


@dataclass(frozen=True)
class EvolutionSettings:
    """How the fitness of candidates is evaluated."""

    episodes: int  # per candidate and generation
    num_envs: int  # run in parallel
    common_episodes: bool
    early_stop: EarlyStop

    @classmethod
    def from_config(cls, node: Mapping[str, Any]) -> EvolutionSettings:
        stop = {str(key): value for key, value in (node["early_stop"] or {}).items()}
        reject_unknown("algorithm.evolution.early_stop", stop, [item.name for item in fields(EarlyStop)])
        return cls(
            episodes=int(node["episodes"]),
            num_envs=int(node["num_envs"]),
            common_episodes=bool(node["common_episodes"]),
            early_stop=EarlyStop(**stop),
        )


@dataclass(frozen=True)
class WorldModelsSettings:
    """configs/algorithm/og_wm.yaml describes each field and has the published values."""

    batch_size: int
    batch_length: int
    gradient_limit: float
    loss_scales: dict[str, float]
    done_weight: float
    memory: str
    temperature: float
    imagination_horizon: int
    dream_context: int
    evolution: EvolutionSettings

    @classmethod
    def from_config(cls, algorithm: Mapping[str, Any]) -> WorldModelsSettings:
        require_all(cls, algorithm, "og_wm")
        settings = cls(
            batch_size=int(algorithm["batch_size"]),
            batch_length=int(algorithm["batch_length"]),
            gradient_limit=float(algorithm["gradient_limit"]),
            loss_scales=read_loss_scales(algorithm, LOSSES, complete=False),
            done_weight=float(algorithm["done_weight"]),
            memory=str(algorithm["memory"]),
            temperature=float(algorithm["temperature"]),
            imagination_horizon=int(algorithm["imagination_horizon"]),
            dream_context=int(algorithm["dream_context"]),
            evolution=EvolutionSettings.from_config(algorithm["evolution"]),
        )
        settings.check()
        return settings

    def check(self) -> None:
        require_choice("algorithm.memory", self.memory, MEMORIES)
        for name, value in (("temperature", self.temperature), ("done_weight", self.done_weight)):
            if not value > 0.0:
                raise ConfigError(f"algorithm.{name} must be above 0, not {value}")
        counts = {
            "batch_size": self.batch_size,
            "batch_length": self.batch_length,
            "imagination_horizon": self.imagination_horizon,
            "dream_context": self.dream_context,
            "evolution.episodes": self.evolution.episodes,
            "evolution.num_envs": self.evolution.num_envs,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"algorithm.{name} must be at least 1, not {value}")
