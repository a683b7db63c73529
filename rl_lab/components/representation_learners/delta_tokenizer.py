"""The context-aware tokenizer of Δ-IRIS: tokens of the change between frames (Micheli, Alonso, Fleuret 2024).

The decoder also gets the previous frame and the action, so that the tokens only encode what these do not
determine. Widths and depths are from the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    HALVE,
    WIDTHS,
    FrameDecoder,
    FrameEncoder,
    latent_side,
)
from rl_lab.components.nn.transformer import init_token_network
from rl_lab.components.representation_learners.tokenizer import (
    action_table,
    frame_key,
    frame_shape,
    rounded,
    to_frames,
)
from rl_lab.errors import ConfigError
from rl_lab.records import Batch, Spec

if TYPE_CHECKING:
    from rl_lab.components.nn.return_critic import ReturnCritic


class DeltaTokenizer(nn.Module):
    """Two consecutive frames and the action between them -> tokens_side² tokens.

    width, latent:             of encoder and decoder
    frame_width, frame_latent: of the network that encodes the previous frame for the decoder
    action_channels:           channels of the action in the decoder's input
    critic:                    builds a critic on the codes of a change (nn/return_critic.py); None: none
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
        critic: Callable[[int], ReturnCritic] | None = None,
    ) -> None:
        super().__init__()
        self.channels, self.side = frame_shape(spec)
        self.key = frame_key(spec)
        self.grid, self.tokens_side = latent_side(self.side, halve), tokens_side
        if self.grid < 1 or self.grid % tokens_side:
            raise ConfigError(
                f"tokens_side={tokens_side} does not divide the {self.grid}×{self.grid} grid of images of "
                f"{self.side}×{self.side}: change tokens_side or environment.size"
            )
        self.patch = self.grid // tokens_side
        self.num_tokens, self.vocab = tokens_side**2, quantizer.vocab
        net: dict[str, Any] = {"widths": tuple(widths), "halve": tuple(halve)}
        self.encoder = FrameEncoder(channels=2 * self.channels + 1, latent=latent, width=width, **net)
        self.frame_net = FrameEncoder(channels=self.channels, latent=frame_latent, width=frame_width, **net)
        inputs = frame_latent + action_channels + latent
        self.decoder = FrameDecoder(channels=self.channels, latent=inputs, width=width, **net)
        self.action_channels = action_channels
        self.action_plane = action_table(spec, self.side**2)
        self.action_grid = action_table(spec, action_channels * self.grid**2)
        patch_width = latent * self.patch**2
        self.before, self.after = nn.Linear(patch_width, quantizer.dim), nn.Linear(quantizer.dim, patch_width)
        for part in (self.action_plane, self.action_grid, self.before, self.after):
            init_token_network(part)  # torch's N(0, 1) for embeddings would outweigh the frames
        self.quantizer = quantizer
        check_image_side(losses, self.side)
        self.losses = nn.ModuleDict(losses)
        self.critic = None if critic is None else critic(self.num_tokens * quantizer.dim)
        exempt_from_decay(self)

    @property
    def least_rows(self) -> int:
        """Rows of a sequence that `compute_loss` needs."""
        return 2 if self.critic is None else 2 + self.critic.horizon

    def noise_size(self, sequences: int, rows: int) -> int:
        return self.quantizer.noise_size(sequences * (rows - 1) * self.num_tokens)

    def _vectors(self, frame: torch.Tensor, previous: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """-> (M · tokens, quantizer.dim)."""
        plane = self.action_plane(action).view(-1, 1, self.side, self.side)
        grid = self.encoder(torch.cat([previous, plane.to(previous.dtype), frame], 1))
        n, p = self.tokens_side, self.patch
        patches = grid.unflatten(3, (n, p)).unflatten(2, (n, p))  # (M, latent, n, p, n, p)
        return self.before(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(0, 2))

    def _reconstruct(
        self, vectors: torch.Tensor, features: torch.Tensor, action: torch.Tensor
    ) -> torch.Tensor:
        """vectors: (M, tokens, quantizer.dim), features of the previous frame -> (M, C, H, W), unclipped."""
        n, p = self.tokens_side, self.patch
        patches = self.after(vectors).unflatten(2, (-1, p, p)).unflatten(1, (n, n))  # (M, n, n, latent, p, p)
        grid = patches.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
        planes = self.action_grid(action).view(-1, self.action_channels, self.grid, self.grid)
        return self.decoder(
            torch.cat([features, planes.to(features.dtype), grid.to(features.dtype)], 1)
        ).float()

    def encode(
        self, frame: torch.Tensor, previous: torch.Tensor | None = None, action: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert previous is not None and action is not None
        tokens: torch.Tensor = self.quantizer(self._vectors(frame, previous, action)).tokens
        return tokens.unflatten(0, (-1, self.num_tokens))

    def frame_features(self, frame: torch.Tensor) -> torch.Tensor:
        return self.frame_net(frame)

    def decode(
        self,
        tokens: torch.Tensor,
        previous: torch.Tensor | None = None,
        action: torch.Tensor | None = None,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert previous is not None and action is not None
        features = self.frame_features(previous) if features is None else features
        return rounded(self._reconstruct(self.quantizer.embed(tokens), features, action))

    def policy_view(self, frame: torch.Tensor) -> torch.Tensor:
        """The frame itself: reconstructions are so accurate that the policy can use real frames."""
        return frame

    def compute_loss(
        self, batch: Batch, noise: torch.Tensor | None = None, *, learn: bool = True
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """Loss over pairs of consecutive valid rows (B, T). noise: (…, noise_size) uniform, for `learn`."""
        frames = to_frames(batch.obs[self.key])
        previous, following = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
        action = batch.action[:, :-1].flatten(0, 1)
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        pairs = real[:, :-1] & real[:, 1:]
        mask = pairs.flatten()
        token_mask = mask.repeat_interleave(self.num_tokens)
        vectors = self._vectors(following, previous, action)
        quantized = self.quantizer(vectors, token_mask)
        codes = quantized.vectors.unflatten(0, (-1, self.num_tokens))
        reconstruction = self._reconstruct(codes, self.frame_features(previous), action)
        losses = weighted_losses(self.losses, reconstruction, following, mask, previous)
        losses["quantizer"] = masked_mean(quantized.loss, token_mask)
        if self.critic is not None:
            known = codes.flatten(1).unflatten(0, pairs.shape)
            losses["return"] = self.critic.loss(known, batch.reward[:, 1:], batch.terminated[:, 1:], pairs)
        if learn and self.quantizer.noise_size(len(vectors)):
            assert noise is not None
            self.quantizer.learn(vectors.detach(), quantized.tokens, token_mask, noise.flatten())
        with torch.no_grad():
            error = masked_mean((reconstruction - following).square(), mask)
        return LossWithIntermediateLosses.of(**losses), {"pixel_error": error, **quantized.metrics}
