"""Hyperparameters of World Models: the keys of `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, TypedDict

from rl_lab.errors import ConfigError
from rl_lab.records import EarlyStop
from rl_lab.workflows.settings import INTERPOLATED, Settings, check_parts


class LossScales(TypedDict, total=False):
    """Factors of M's losses."""

    latent: float
    reward: float
    done: float


@dataclass(frozen=True)
class Size:
    """Widths, which the parts in the config refer to."""

    latent: int
    depth: int
    hidden: int
    mixtures: int


@dataclass(frozen=True)
class EvolutionSettings:
    """How the fitness of candidates is evaluated."""

    episodes: int  # per candidate and generation
    num_envs: int  # run in parallel
    common_episodes: bool
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    # For the controller cma_es in the config.
    population: int = INTERPOLATED
    sigma: float = INTERPOLATED
    diagonal: bool = INTERPOLATED


@dataclass(frozen=True)
class Stages:
    """Lengths of the phases, which refer to it."""

    collect_steps: int
    vae_updates: int
    mdn_updates: int
    generations: int
    evaluate_every: int
    start_steps: int
    score_steps: int
    time_limit: int | None


@dataclass(frozen=True)
class WorldModelsSettings(Settings):
    """configs/algorithm/og_wm.yaml describes each field and has the published values."""

    algorithm: ClassVar[str] = "og_wm"

    batch_size: int
    batch_length: int
    gradient_limit: float
    loss_scales: Annotated[dict[str, float], LossScales]
    done_weight: float
    memory: Literal["h", "hc", "none"]
    temperature: float
    imagination_horizon: int
    dream_context: int
    evolution: EvolutionSettings
    grad_acc_steps: int = 1
    sequences: Literal["start", "anywhere"] = "anywhere"  # as in runs from before the key
    # For the parts and phases in the config.
    size: Size = INTERPOLATED
    kl_tolerance: float = INTERPOLATED
    stages: Stages = INTERPOLATED

    def check(self) -> None:
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
        check_parts(self.grad_acc_steps, self.batch_size)
