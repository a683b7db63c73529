"""Hyperparameters of behaviour cloning: the keys of `algorithm.*`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl_lab.workflows.imitation import ImitationSettings
from rl_lab.workflows.settings import INTERPOLATED


@dataclass(frozen=True)
class Size:
    """Widths, which the parts in the config refer to."""

    units: tuple[int, ...]
    image_features: int
    keypoints: int
    encoder_width: int


@dataclass(frozen=True)
class BehaviourCloningSettings(ImitationSettings):
    """configs/algorithm/behaviour_cloning.yaml describes each field."""

    algorithm: ClassVar[str] = "behaviour_cloning"

    size: Size = INTERPOLATED
    weight_decay: float = INTERPOLATED
    crop: float = INTERPOLATED
    demonstration_steps: int = INTERPOLATED
