"""What a token world model asks of the network that turns frames into tokens, and what such networks share.

Frames are float, pixels in [0, 1]. A *contextual* tokenizer describes a frame by what changed since the one before it, so
it is also given that frame and the action between the two; another one ignores both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from rl_lab.components.nn.losses import LossWithIntermediateLosses, masked_mean, weighted_losses
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.residual_conv import (
    Double,
    Halve,
    ImageAttention,
    PictureNet,
    PictureNorm,
    ResidualConv,
)
from rl_lab.components.representation_learners.encoders import image_keys
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


# --------------------
# The convolutional nets of IRIS' tokenizer: a picture to a grid of features, and back.
#
# Written from the facts of the paper (Micheli, Alonso, Fleuret 2023): widths, depths and where attention stands.


EPS = 1e-6  # of the norms


def _middle(width: int) -> nn.Sequential:
    return nn.Sequential(
        ResidualConv(width, width, eps=EPS),
        ImageAttention(width, eps=EPS),
        ResidualConv(width, width, eps=EPS),
    )


def _level(width: int, blocks: int, attends: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for _ in range(blocks):
        layers.append(ResidualConv(width, width, eps=EPS))
        if attends:
            layers.append(ImageAttention(width, eps=EPS))
    return layers


class IrisEncoder(nn.Module):
    """`levels` resolutions of `blocks` residual blocks each, halved between them."""

    def __init__(
        self,
        *,
        channels: int,
        side: int,
        width: int,
        levels: int,
        latent: int,
        attention: Sequence[int],
        blocks: int = 2,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1)]
        for level in range(levels):
            layers += _level(width, blocks, side >> level in attention)
            if level + 1 < levels:
                layers.append(Halve(width, 3))
        self.layers = PictureNet(*layers, _middle(width))
        self.norm, self.out = PictureNorm(width, eps=EPS), nn.Conv2d(width, latent, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) in [-1, 1] -> (M, latent, H / 2^(levels-1), …)."""
        return self.out(self.norm(*self.layers.pending(x)))


class IrisDecoder(nn.Module):
    """The encoder's mirror, with one residual block more at each resolution."""

    def __init__(
        self,
        *,
        channels: int,
        side: int,
        width: int,
        levels: int,
        latent: int,
        attention: Sequence[int],
        blocks: int = 3,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(latent, width, 3, padding=1), _middle(width)]
        for level in reversed(range(levels)):
            layers += _level(width, blocks, side >> level in attention)
            if level:
                layers.append(Double(width))
        self.layers = PictureNet(*layers)
        self.norm, self.out = PictureNorm(width, eps=EPS), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, latent, h, w) -> (M, C, H, W), about in [-1, 1]."""
        return self.out(self.norm(*self.layers.pending(x)))


# --------------------
# IRIS' tokenizer: a discrete autoencoder of single frames (Micheli, Alonso, Fleuret 2023).


class FrameTokenizer(nn.Module):
    """64×64 pictures -> 4×4 tokens, with the default 5 levels.

    quantizer: what makes tokens of vectors; its width may differ from the nets' `latent`
    losses:    reconstruction losses by name
    attention: sides of the grids at which there is attention
    """

    contextual = False

    def __init__(
        self,
        spec: Spec,
        quantizer: Any,
        losses: Mapping[str, nn.Module],
        *,
        width: int = 64,
        levels: int = 5,
        latent: int = 512,
        attention: Sequence[int] = (16, 8),
    ) -> None:
        super().__init__()
        channels, side = frame_shape(spec)
        if side % 2 ** (levels - 1):
            raise ConfigError(
                f"pictures with sides of {side} cannot be halved {levels - 1} times: lower `levels`"
            )
        self.key, self.grid = frame_key(spec), side >> (levels - 1)
        self.num_tokens, self.vocab = self.grid**2, quantizer.vocab
        shape = {"channels": channels, "side": side, "width": width, "levels": levels}
        self.encoder = IrisEncoder(**shape, latent=latent, attention=attention)
        self.decoder = IrisDecoder(**shape, latent=latent, attention=attention)
        self.before, self.after = nn.Linear(latent, quantizer.dim), nn.Linear(quantizer.dim, latent)
        self.quantizer, self.noise = quantizer, quantizer.noise
        self.losses = nn.ModuleDict(losses)
        exempt_from_decay(self)

    def _vectors(self, frame: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> (M · tokens, quantizer's width)."""
        grid = self.encoder(frame * 2.0 - 1.0)
        return self.before(grid.flatten(2).transpose(1, 2)).flatten(0, 1)

    def _picture(self, vectors: torch.Tensor) -> torch.Tensor:
        """(M, tokens, quantizer's width) -> (M, C, H, W), not cut to [0, 1]."""
        grid = self.after(vectors).transpose(1, 2).unflatten(2, (self.grid, self.grid))
        return (self.decoder(grid).float() + 1.0) / 2.0

    def encode(
        self, frame: torch.Tensor, previous: torch.Tensor | None = None, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.quantizer(self._vectors(frame)).tokens.unflatten(0, (-1, self.num_tokens))

    def look(self, frame: torch.Tensor) -> None:
        """Nothing of the frame before is needed."""

    def decode(
        self,
        tokens: torch.Tensor,
        previous: torch.Tensor | None = None,
        action: torch.Tensor | None = None,
        looked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._picture(self.quantizer.embed(tokens)).clamp(0.0, 1.0)

    def policy_view(self, frame: torch.Tensor) -> torch.Tensor:
        """The policy always sees reconstructions, so that real and imagined frames look alike."""
        return self.decode(self.encode(frame))

    def compute_loss(
        self, batch: Batch, noise: torch.Tensor | None = None, *, learn: bool = True
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """Every row (B, T) of the batch that is real. noise: (…, self.noise) uniform, where `learn` needs it."""
        frames = to_frames(batch.obs[self.key].flatten(0, 1))
        mask = batch.mask.flatten() if batch.mask is not None else None
        spread = mask.repeat_interleave(self.num_tokens) if mask is not None else None
        vectors = self._vectors(frames)
        quantized = self.quantizer(vectors, spread)
        shown = self._picture(quantized.vectors.unflatten(0, (-1, self.num_tokens)))
        losses = weighted_losses(self.losses, shown, frames, mask)
        losses["quantizer"] = masked_mean(quantized.loss, spread)
        if learn and self.noise:
            assert noise is not None
            real = torch.ones_like(quantized.tokens, dtype=torch.bool) if spread is None else spread
            self.quantizer.learn(vectors.detach(), quantized.tokens, real, noise.flatten()[: self.noise])
        with torch.no_grad():
            error = masked_mean((shown - frames).square(), mask)
        return LossWithIntermediateLosses.of(**losses), {"pixel_error": error, **quantized.metrics}
