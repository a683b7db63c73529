"""Δ-IRIS' context-aware tokenizer: the change from one frame to the next, given the action (Micheli, Alonso, Fleuret 2024).

The decoder is given the frame before and the action too, so that tokens need to say only what these two do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.nn.losses import LossWithIntermediateLosses, masked_mean, weighted_losses
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.residual_conv import Double, Halve, PictureNet, PictureNorm, ResidualConv
from rl_lab.components.representation_learners.tokenizer import (
    action_count,
    frame_key,
    frame_shape,
    rounded,
    to_frames,
)
from rl_lab.errors import ConfigError
from rl_lab.records import Batch, Spec

# --------------------
# Δ-IRIS' convolutional nets: residual blocks that widen while the picture shrinks, and the mirror of that.
#
# Written from the facts of the paper (Micheli, Alonso, Fleuret 2024): `widths` are multiples of `width`, and `halve` says
# after which blocks the picture is halved.


WIDTHS, HALVE = (1, 1, 2, 2, 4), (True, False, True, True, False)  # vmicheli/delta-iris


def latent_side(side: int, halve: Sequence[bool] = HALVE) -> int:
    return side // 2 ** sum(bool(item) for item in halve)


class FrameEncoder(nn.Module):
    """(M, channels, H, W) -> (M, latent, H/8, W/8) with the default widths."""

    def __init__(
        self,
        *,
        channels: int,
        latent: int,
        width: int,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1)]
        here = width
        for multiple, half in zip(widths, halve, strict=True):
            layers.append(ResidualConv(here, multiple * width))
            here = multiple * width
            if half:
                layers.append(Halve(here, 2))
        layers += [PictureNorm(here), nn.Conv2d(here, latent, 3, padding=1)]
        self.layers = PictureNet(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class FrameDecoder(nn.Module):
    """(M, latent, h, w) -> (M, channels, 8·h, 8·w) with the default widths: the encoder's blocks in reverse order."""

    def __init__(
        self,
        *,
        channels: int,
        latent: int,
        width: int,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
    ) -> None:
        super().__init__()
        before = [1, *widths[:-1]]  # width of what each of the encoder's blocks is given
        layers: list[nn.Module] = [nn.Conv2d(latent, widths[-1] * width, 3, padding=1)]
        for multiple, smaller, half in reversed(list(zip(widths, before, halve, strict=True))):
            if half:
                layers.append(Double(multiple * width))
            layers.append(ResidualConv(multiple * width, smaller * width))
        layers += [PictureNorm(width), nn.Conv2d(width, channels, 3, padding=1)]
        self.layers = PictureNet(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class DeltaTokenizer(nn.Module):
    """Two 64×64 pictures and an action -> tokens_side² tokens.

    width, latent:             of encoder and decoder
    frame_width, frame_latent: of the net that shows the decoder the frame before
    action_channels:           of the action, beside the two in the decoder's input
    """

    contextual = True

    def __init__(
        self,
        spec: Spec,
        quantizer: Any,
        losses: Mapping[str, nn.Module],
        *,
        width: int = 64,
        latent: int = 64,
        frame_width: int = 64,
        frame_latent: int = 8,
        tokens_side: int = 2,
        action_channels: int = 4,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
    ) -> None:
        super().__init__()
        self.channels, self.side = frame_shape(spec)
        self.key, actions = frame_key(spec), action_count(spec)
        self.grid, self.tokens_side = latent_side(self.side, halve), tokens_side
        if self.grid < 1 or self.grid % tokens_side:
            raise ConfigError(
                f"pictures with sides of {self.side} become a grid of {self.grid}, which {tokens_side}×{tokens_side} "
                "tokens cannot share: change tokens_side or environment.size"
            )
        self.patch = self.grid // tokens_side
        self.num_tokens, self.vocab = tokens_side**2, quantizer.vocab
        net: dict[str, Any] = {"widths": tuple(widths), "halve": tuple(halve)}
        self.encoder = FrameEncoder(channels=2 * self.channels + 1, latent=latent, width=width, **net)
        self.frame_net = FrameEncoder(channels=self.channels, latent=frame_latent, width=frame_width, **net)
        given = frame_latent + action_channels + latent
        self.decoder = FrameDecoder(channels=self.channels, latent=given, width=width, **net)
        self.action_plane = nn.Embedding(actions, self.side**2)
        self.action_grid = nn.Embedding(actions, action_channels * self.grid**2)
        patch_width = latent * self.patch**2
        self.before, self.after = nn.Linear(patch_width, quantizer.dim), nn.Linear(quantizer.dim, patch_width)
        self.quantizer, self.noise = quantizer, quantizer.noise
        self.losses = nn.ModuleDict(losses)
        exempt_from_decay(self)

    def _vectors(self, frame: torch.Tensor, previous: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """-> (M · tokens, quantizer's width)."""
        plane = self.action_plane(action).view(-1, 1, self.side, self.side)
        grid = self.encoder(torch.cat([previous, plane.to(previous.dtype), frame], 1))
        n, p = self.tokens_side, self.patch
        patches = grid.unflatten(3, (n, p)).unflatten(2, (n, p))  # (M, latent, n, p, n, p)
        return self.before(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2))

    def _picture(self, vectors: torch.Tensor, seen: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """vectors: (M, tokens, quantizer's width), seen: `look` at the frame before -> (M, C, H, W), not cut to [0, 1]."""
        n, p = self.tokens_side, self.patch
        patches = self.after(vectors).unflatten(2, (-1, p, p)).unflatten(1, (n, n))  # (M, n, n, latent, p, p)
        grid = patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        planes = self.action_grid(action).view(
            -1, self.action_grid.embedding_dim // self.grid**2, self.grid, self.grid
        )
        return self.decoder(torch.cat([seen, planes.to(seen.dtype), grid.to(seen.dtype)], 1)).float()

    def encode(
        self, frame: torch.Tensor, previous: torch.Tensor | None = None, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert previous is not None and action is not None
        vectors = self._vectors(frame, previous, action)
        return self.quantizer(vectors).tokens.unflatten(0, (-1, self.num_tokens))

    def look(self, frame: torch.Tensor) -> torch.Tensor:
        return self.frame_net(frame)

    def decode(
        self,
        tokens: torch.Tensor,
        previous: torch.Tensor | None = None,
        action: torch.Tensor | None = None,
        looked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert previous is not None and action is not None
        seen = self.look(previous) if looked is None else looked
        return rounded(self._picture(self.quantizer.embed(tokens), seen, action))

    def policy_view(self, frame: torch.Tensor) -> torch.Tensor:
        """Reconstructions are so close that the policy is shown real frames."""
        return frame

    def compute_loss(
        self, batch: Batch, noise: torch.Tensor | None = None, *, learn: bool = True
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """Every pair of neighbouring real rows of a batch (B, T). noise: (…, self.noise) uniform, for `learn`."""
        frames = to_frames(batch.obs[self.key])
        previous, following = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
        action = batch.action[:, :-1].flatten()
        mask = (
            (batch.mask[:, :-1] & batch.mask[:, 1:]).flatten()
            if batch.mask is not None
            else torch.ones_like(action, dtype=torch.bool)
        )
        spread = mask.repeat_interleave(self.num_tokens)
        vectors = self._vectors(following, previous, action)
        quantized = self.quantizer(vectors, spread)
        drawn = quantized.vectors.unflatten(0, (-1, self.num_tokens))
        shown = self._picture(drawn, self.look(previous), action)
        losses = weighted_losses(self.losses, shown, following, mask)
        losses["quantizer"] = masked_mean(quantized.loss, spread)
        if learn and self.noise:
            assert noise is not None
            self.quantizer.learn(vectors.detach(), quantized.tokens, spread, noise.flatten()[: self.noise])
        with torch.no_grad():
            error = masked_mean((shown - following).square(), mask)
        return LossWithIntermediateLosses.of(**losses), {"pixel_error": error, **quantized.metrics}
