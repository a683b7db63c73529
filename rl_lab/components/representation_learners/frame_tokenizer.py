"""IRIS' tokenizer: a discrete autoencoder of single frames (Micheli, Alonso, Fleuret 2023)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.component_loss import LossWithIntermediateLosses, masked_mean
from rl_lab.components.nn.reconstruction_losses import weighted_losses
from rl_lab.components.nn.weight_decay import exempt_from_decay
from rl_lab.components.representation_learners.iris_convnet import IrisDecoder, IrisEncoder
from rl_lab.components.representation_learners.tokenizer import frame_key, frame_shape, to_frames
from rl_lab.errors import ConfigError
from rl_lab.records import Batch, Spec


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
