"""The tokenizer of IRIS, which maps frames to tokens and back (`protocols.Tokenizer`), and helpers for frames.

Frames are float with pixels in [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_lab.components.nn.losses import (
    LossWithIntermediateLosses,
    check_image_side,
    frames_before,
    masked_mean,
    needs_previous,
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

if TYPE_CHECKING:
    from rl_lab.components.nn.return_critic import ReturnCritic


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


class ActionLayer(nn.Linear):
    """Embedding of continuous actions (…, d), limited to [-1, 1] as the environment limits them -> (…, width)."""

    def forward(self, action: torch.Tensor) -> torch.Tensor:
        return super().forward(action.clamp(-1.0, 1.0))


def action_table(spec: Spec, width: int) -> nn.Embedding | ActionLayer:
    """Maps actions to vectors of `width`: a table for discrete ones, a linear layer for continuous ones."""
    if spec.action.kind == "discrete":
        return nn.Embedding(spec.action.choices[0], width)
    if spec.action.kind == "continuous":
        return ActionLayer(spec.action.size, width)
    raise ConfigError(
        f"{spec.name} has {spec.action.kind} actions, but a token world model embeds one discrete or one continuous "
        "action: choose another environment"
    )


def no_action(spec: Spec, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Zeros in the format of stored actions, (*shape) or (*shape, d)."""
    dtype = torch.float32 if spec.action.kind == "continuous" else torch.int64
    return torch.zeros(*shape, *spec.action.shape, dtype=dtype, device=device)


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
    critic:    builds a critic on the codes, `critic(features)` (nn/return_critic.py); None: there is none
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
        critic: Callable[[int], ReturnCritic] | None = None,
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
        self.critic = None if critic is None else critic(self.num_tokens * quantizer.dim)
        exempt_from_decay(self)

    @property
    def least_rows(self) -> int:
        """Rows of a sequence that `compute_loss` needs."""
        return max(1 + needs_previous(self.losses), 1 if self.critic is None else 1 + self.critic.horizon)

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
        tokens: torch.Tensor = self.quantizer(self._vectors(frame)).tokens
        return tokens.unflatten(0, (-1, self.num_tokens))

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
        previous = None
        if needs_previous(self.losses):
            previous = frames_before(frames.unflatten(0, batch.reward.shape), batch.mask).flatten(0, 1)
        losses = weighted_losses(self.losses, reconstruction, frames, mask, previous)
        losses["quantizer"] = masked_mean(quantized.loss, token_mask)
        if self.critic is not None:
            codes = quantized.vectors.view(*batch.reward.shape, -1)
            losses["return"] = self.critic.loss(codes, batch.reward, batch.terminated, batch.mask)
        if learn and self.quantizer.noise_size(len(vectors)):
            assert noise is not None
            valid = torch.ones_like(vectors[:, 0], dtype=torch.bool) if token_mask is None else token_mask
            self.quantizer.learn(vectors.detach(), quantized.tokens, valid, noise.flatten())
        with torch.no_grad():
            error = masked_mean((reconstruction - frames).square(), mask)
        return LossWithIntermediateLosses.of(**losses), {"pixel_error": error, **quantized.metrics}
