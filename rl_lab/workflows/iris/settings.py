"""Hyperparameters of IRIS and Δ-IRIS: the keys of `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_lab.errors import ConfigError
from rl_lab.workflows.settings import INTERPOLATED, Settings


@dataclass(frozen=True)
class PartSettings:
    """Batches and gradient steps of one of the three parts."""

    batch_size: int
    batch_length: int  # tokenizer: rows; world model: blocks; actor-critic: burn-in rows
    sampler: str
    pad: Literal["right", "left", "both"]
    max_grad_norm: float
    grad_acc_steps: int


@dataclass(frozen=True)
class IrisSize:
    """Widths of IRIS, which the parts in the config refer to."""

    depth: int
    levels: int
    latent: int
    code: int
    codes: int
    tokens: int
    dim: int
    layers: int
    heads: int
    dropout: float
    trunk: tuple[int, ...]
    units: int


@dataclass(frozen=True)
class DeltaIrisSize:
    """Widths of Δ-IRIS."""

    depth: int
    latent: int
    frame_depth: int
    frame_latent: int
    code: int
    codes: int
    tokens_side: int
    image_depth: int
    image_latent: int
    layers: int
    heads: int
    trunk_depth: int
    trunk_latent: int
    units: int
    bins: int
    bin_limit: float
    reward_bins: int


@dataclass(frozen=True)
class Epochs:
    """Epochs of each phase, and the work of an epoch; the phases refer to it."""

    collect: int
    tokenizer: int
    world_model: int
    actor_critic: int
    last: int
    collect_steps: int
    tokenizer_updates: int
    world_model_updates: int
    actor_critic_updates: int


@dataclass(frozen=True)
class DeltaIrisEpochs(Epochs):
    """With the first epoch, which is different."""

    first_steps: int
    first_tokenizer_updates: int
    first_world_model_updates: int


@dataclass(frozen=True)
class WeightDecay:
    tokenizer: float
    world_model: float


@dataclass(frozen=True)
class LossWeights:
    tokens: float
    reward: float
    end: float


@dataclass(frozen=True)
class IrisSettings(Settings):
    """configs/algorithm/iris.yaml and delta_iris.yaml describe each field and have the published values."""

    algorithm: ClassVar[str] = "iris"

    tokenizer: PartSettings
    world_model: PartSettings
    actor_critic: PartSettings
    imagination_horizon: int
    discount: float
    entropy: float
    mask_ended: bool
    target_rate: float  # of the moving average that provides the targets; 0: none
    collect_epsilon: float
    learning_rate: float
    model_precision: str  # of tokenizer and world model
    # The defaults are what runs did that were saved before these settings existed.
    policy_precision: str = "float32"  # of the actor-critic's convolutions
    bootstrap_frame: bool = False  # whether one more frame is imagined, whose value bootstraps
    # For the parts, optimizers and phases in the config.
    size: IrisSize | DeltaIrisSize = INTERPOLATED
    epochs: Epochs | DeltaIrisEpochs = INTERPOLATED
    blocks: int = INTERPOLATED
    reward: str = INTERPOLATED
    weight_decay: WeightDecay = INTERPOLATED
    loss_weights: LossWeights = INTERPOLATED
    revive_updates: int = INTERPOLATED

    def check(self) -> None:
        for name in ("tokenizer", "world_model", "actor_critic"):
            part: PartSettings = getattr(self, name)
            if part.grad_acc_steps < 1 or part.batch_size % part.grad_acc_steps:
                raise ConfigError(
                    f"algorithm.{name}.grad_acc_steps is {part.grad_acc_steps}: "
                    f"choose a divisor of batch_size ({part.batch_size})"
                )
        if self.imagined_frames < 2:
            least = 2 - self.bootstrap_frame
            raise ConfigError(
                f"algorithm.imagination_horizon must be at least {least}: the last frame is only used to "
                "bootstrap"
            )

    @property
    def imagined_frames(self) -> int:
        """Frames of an imagined trajectory, with the real one it starts from; the last only bootstraps."""
        return self.imagination_horizon + self.bootstrap_frame
