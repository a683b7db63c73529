"""The tokenizer of IRIS, which maps frames to tokens and back (`protocols.Tokenizer`), and helpers for frames.

Frames are float with pixels in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.losses import (
    LossWithIntermediateLosses,
    check_image_side,
    masked_mean,
    weighted_losses,
)
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.residual_conv import (
    Downsample,
    ImageAttention,
    ImageNorm,
    ImageSequential,
    ResidualConv,
    Upsample,
)
from rl_lab.components.representation_learners.encoders import image_keys
from rl_lab.errors import ConfigError
from rl_lab.records import Batch, Spec


def frame_key(spec: Spec) -> str:
    """Key of the only observation, an image."""
    keys = image_keys(spec)
    if not keys:
        raise ConfigError(
            f"{spec.name} must have one image for a token world model, but observes {sorted(spec.observations)}: "
            "choose an environment with a single image"
        )
    if len(spec.observations) > 1:
        raise ConfigError(
            f"environment.observations must be one image for a token world model, not {sorted(spec.observations)}: set "
            f"environment.observations=[{keys[0]}]"
        )
    return keys[0]


def frame_shape(spec: Spec) -> tuple[int, int]:
    """Channels and side of the image."""
    channels, height, width = spec.observations[frame_key(spec)].shape
    if height != width:
        raise ConfigError(
            f"images of {height}×{width} must be square for a token world model: set environment.size"
        )
    return channels, height


def action_count(spec: Spec) -> int:
    if spec.action.kind != "discrete":
        raise ConfigError(
            f"{spec.name} has {spec.action.kind} actions, but a token world model has one token per action: "
            "choose an environment with discrete actions"
        )
    return spec.action.choices[0]


def to_frames(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 -> float in [0, 1]."""
    return pixels.float() / 255.0


def to_pixels(frames: torch.Tensor) -> torch.Tensor:
    """Float in [0, 1] -> uint8."""
    return (frames.float().clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)


def rounded(frames: torch.Tensor) -> torch.Tensor:
    """Round to the values of 8-bit images."""
    return (frames.float().clamp(0.0, 1.0) * 255.0).round() / 255.0


# --- The tokenizer of IRIS (Micheli, Alonso, Fleuret 2023) ---
# Widths, depths and the resolutions with attention are from the paper.

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
    """`levels` resolutions with `blocks` residual blocks each, and downsampling between them."""

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
                layers.append(Downsample(width, 3))
        self.layers = ImageSequential(*layers, _middle(width))
        self.norm, self.out = ImageNorm(width, eps=EPS), nn.Conv2d(width, latent, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) in [-1, 1] -> (M, latent, H / 2^(levels-1), …)."""
        return self.out(self.norm(*self.layers.pending(x)))


class IrisDecoder(nn.Module):
    """The reverse of the encoder, with one more residual block at each resolution."""

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
                layers.append(Upsample(width))
        self.layers = ImageSequential(*layers)
        self.norm, self.out = ImageNorm(width, eps=EPS), nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(M, latent, h, w) -> (M, C, H, W), approximately in [-1, 1]."""
        return self.out(self.norm(*self.layers.pending(x)))


class FrameTokenizer(nn.Module):
    """Discrete autoencoder of single frames: 64×64 images -> 4×4 tokens with the default 5 levels.

    quantizer: maps vectors to tokens; its `dim` may differ from `latent`
    losses:    reconstruction losses by name
    attention: resolutions with attention
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
                f"levels={levels} must be lower for images of {side}×{side}, which cannot be downsampled "
                f"{levels - 1} times"
            )
        self.key, self.grid = frame_key(spec), side >> (levels - 1)
        self.num_tokens, self.vocab = self.grid**2, quantizer.vocab
        shape = {"channels": channels, "side": side, "width": width, "levels": levels}
        self.encoder = IrisEncoder(**shape, latent=latent, attention=attention)
        self.decoder = IrisDecoder(**shape, latent=latent, attention=attention)
        self.before, self.after = nn.Linear(latent, quantizer.dim), nn.Linear(quantizer.dim, latent)
        self.quantizer = quantizer
        check_image_side(losses, side)
        self.losses = nn.ModuleDict(losses)
        exempt_from_decay(self)

    def noise_size(self, sequences: int, rows: int) -> int:
        return self.quantizer.noise_size(sequences * rows * self.num_tokens)

    def _vectors(self, frame: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> (M · tokens, quantizer.dim)."""
        grid = self.encoder(frame * 2.0 - 1.0)
        return self.before(grid.flatten(2).transpose(1, 2)).flatten(0, 1)

    def _reconstruct(self, vectors: torch.Tensor) -> torch.Tensor:
        """(M, tokens, quantizer.dim) -> (M, C, H, W), not clipped to [0, 1]."""
        grid = self.after(vectors).transpose(1, 2).unflatten(2, (self.grid, self.grid))
        return (self.decoder(grid).float() + 1.0) / 2.0

    def encode(
        self, frame: torch.Tensor, previous: torch.Tensor | None = None, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.quantizer(self._vectors(frame)).tokens.unflatten(0, (-1, self.num_tokens))

    def frame_features(self, frame: torch.Tensor) -> None:
        """None: the previous frame is not needed."""

    def decode(
        self,
        tokens: torch.Tensor,
        previous: torch.Tensor | None = None,
        action: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._reconstruct(self.quantizer.embed(tokens)).clamp(0.0, 1.0)

    def policy_view(self, frame: torch.Tensor) -> torch.Tensor:
        """The reconstruction, so that real and imagined frames have the same distribution."""
        return self.decode(self.encode(frame))

    def compute_loss(
        self, batch: Batch, noise: torch.Tensor | None = None, *, learn: bool = True
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """Loss over all valid rows (B, T) of a batch. noise: (…, noise_size) uniform, for `learn`."""
        frames = to_frames(batch.obs[self.key].flatten(0, 1))
        mask = batch.mask.flatten() if batch.mask is not None else None
        token_mask = mask.repeat_interleave(self.num_tokens) if mask is not None else None
        vectors = self._vectors(frames)
        quantized = self.quantizer(vectors, token_mask)
        reconstruction = self._reconstruct(quantized.vectors.unflatten(0, (-1, self.num_tokens)))
        losses = weighted_losses(self.losses, reconstruction, frames, mask)
        losses["quantizer"] = masked_mean(quantized.loss, token_mask)
        if learn and self.quantizer.noise_size(len(vectors)):
            assert noise is not None
            valid = torch.ones_like(quantized.tokens, dtype=torch.bool) if token_mask is None else token_mask
            self.quantizer.learn(vectors.detach(), quantized.tokens, valid, noise.flatten())
        with torch.no_grad():
            error = masked_mean((reconstruction - frames).square(), mask)
        return LossWithIntermediateLosses.of(**losses), {"pixel_error": error, **quantized.metrics}
