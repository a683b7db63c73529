"""What a token world model asks of the network that turns frames into tokens, and what such networks share.

Frames are float, pixels in [0, 1]. A *contextual* tokenizer describes a frame by what changed since the one before it, so
it is also given that frame and the action between the two; another one ignores both.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from rl_lab.components.nn.component_loss import LossWithIntermediateLosses
from rl_lab.components.representation_learners.observations import image_keys
from rl_lab.errors import ConfigError
from rl_lab.records import Batch, Spec


class Tokenizer(Protocol):
    num_tokens: int  # of one frame
    vocab: int
    contextual: bool
    noise: int  # uniform numbers that one training step wants

    def encode(
        self, frame: torch.Tensor, previous: torch.Tensor | None = None, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(M, C, H, W), the frame before and the action between -> (M, num_tokens)."""

    def look(self, frame: torch.Tensor) -> torch.Tensor | None:
        """(M, C, H, W) -> what `decode` will want of it when it is the frame before, so that this can be done early."""

    def decode(
        self,
        tokens: torch.Tensor,
        previous: torch.Tensor | None = None,
        action: torch.Tensor | None = None,
        looked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(M, num_tokens) -> (M, C, H, W), as pictures are: in [0, 1], in steps of 1/255 where the original rounds."""

    def policy_view(self, frame: torch.Tensor) -> torch.Tensor:
        """What an actor is shown of a real frame: its reconstruction, or the frame itself."""

    def compute_loss(
        self, batch: Batch, noise: torch.Tensor | None = None, *, learn: bool = True
    ) -> tuple[LossWithIntermediateLosses, dict[str, Any]]:
        """learn: False leaves what is learned without a gradient (an averaged codebook) as it is."""


def frame_key(spec: Spec) -> str:
    """The one picture that is observed."""
    keys = image_keys(spec)
    if len(keys) != 1:
        raise ConfigError(
            f"a token world model sees one picture, and {spec.name} observes {sorted(spec.observations)}: "
            "choose an environment with a single image"
        )
    return keys[0]


def frame_shape(spec: Spec) -> tuple[int, int]:
    """Channels and side of the picture."""
    channels, height, width = spec.observations[frame_key(spec)].shape
    if height != width:
        raise ConfigError(
            f"a token world model wants square pictures, not {height}×{width}: set environment.size"
        )
    return channels, height


def action_count(spec: Spec) -> int:
    if spec.action.kind != "discrete":
        raise ConfigError(
            f"a token world model has one token for each action, and {spec.name} has {spec.action.kind} actions: "
            "choose an environment with discrete ones"
        )
    return spec.action.choices[0]


def to_frames(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 -> float in [0, 1]."""
    return pixels.float() / 255.0


def to_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Float in [0, 1] -> uint8."""
    return (frames.float().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


def rounded(frames: torch.Tensor) -> torch.Tensor:
    """Only what a picture of 8 bits can show."""
    return (frames.float().clamp(0.0, 1.0) * 255.0).round() / 255.0
