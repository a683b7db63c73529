"""Hyperparameters of Diffusion Policy: the keys of `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_lab.errors import ConfigError
from rl_lab.workflows.imitation import ImitationSettings
from rl_lab.workflows.settings import INTERPOLATED


@dataclass(frozen=True)
class Size:
    """Widths, which the parts in the config refer to."""

    widths: tuple[int, ...]
    step_width: int
    image_features: int
    keypoints: int
    encoder_width: int
    observation_units: tuple[int, ...] = ()


@dataclass(frozen=True)
class DiffusionPolicySettings(ImitationSettings):
    """configs/algorithm/diffusion_policy.yaml describes each field and has the published values."""

    algorithm: ClassVar[str] = "diffusion_policy"

    denoising_steps: int
    sampler: Literal["ddpm", "ddim"]
    sampling_steps: int
    size: Size = INTERPOLATED
    betas: tuple[float, float] = INTERPOLATED
    weight_decay: float = INTERPOLATED
    crop: float = INTERPOLATED
    demonstration_steps: int = INTERPOLATED

    def check(self) -> None:
        super().check()
        if not 1 <= self.sampling_steps <= self.denoising_steps:
            raise ConfigError(
                f"algorithm.sampling_steps is {self.sampling_steps}: it must be from 1 to "
                f"denoising_steps={self.denoising_steps}"
            )
