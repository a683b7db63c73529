"""Δ-IRIS' world model: each block has the frame itself as one continuous token, the action, and the tokens of the change.

block t:    I  a  d0 d1 d2 d3      6 tokens, with 4 of a change
predicts:   _  d0 d1 d2 d3 _       what this action changes
at a:       reward and end that follow
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rl_lab.components.dynamics.sequence_backbone import State
from rl_lab.components.dynamics.token_world_model import Outcome, TokenWorldModel
from rl_lab.components.nn.component_loss import LossWithIntermediateLosses
from rl_lab.components.nn.weight_decay import exempt_from_decay
from rl_lab.components.representation_learners.frame_convnet import HALVE, WIDTHS, FrameEncoder, latent_side
from rl_lab.components.representation_learners.tokenizer import frame_shape, to_frames
from rl_lab.records import Batch, Spec


class DeltaTokenModel(TokenWorldModel):
    """frame_width, frame_latent: of the net that makes the I-token; frame_latent × grid² is the backbone's width.

    A dream's state has `frame`, the picture as it is now; its I-token has been read already. Between `advance` and
    `absorb` it has not, nor has `pending`, the last token of the change.
    """

    extra = 2
    context = 0  # rows that a dream begins from; 0: all that are given

    def __init__(
        self,
        spec: Spec,
        backbone: Callable[..., Any],
        *,
        frame_width: int = 32,
        frame_latent: int = 8,
        widths: Sequence[int] = WIDTHS,
        halve: Sequence[bool] = HALVE,
        **options: Any,
    ) -> None:
        channels, side = frame_shape(spec)
        dim = frame_latent * latent_side(side, halve) ** 2
        super().__init__(spec, backbone, dim=dim, **options)
        self.frame_net = FrameEncoder(
            channels=channels,
            latent=frame_latent,
            width=frame_width,
            widths=tuple(widths),
            halve=tuple(halve),
        )
        self.frame_norm = nn.LayerNorm(dim)
        exempt_from_decay(self)

    def see(self, frames: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> I-tokens (M, dim)."""
        return self.frame_norm(self.frame_net(frames).flatten(1))

    def compute_loss(
        self, batch: Batch, tokenizer: Any, noise: torch.Tensor | None = None
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """batch: (B, L + 1) rows: L blocks, and what followed the last. noise: dropout's seeds."""
        frames, action = to_frames(batch.obs[self.key]), batch.action[:, :-1]
        with torch.no_grad():
            tokens = self._changes(tokenizer, frames, action)
        images = self.see(frames[:, :-1].flatten(0, 1)).unflatten(0, action.shape)
        hidden = self.read(self.embed(images, action, tokens), noise)
        return self.losses_of(hidden, tokens, batch)

    def losses_of(
        self, hidden: torch.Tensor, tokens: torch.Tensor, batch: Batch
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """hidden: (B, L, 2 + K, dim), tokens (B, L, K): heads and targets put together."""
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        taken = real[:, :-1] & real[:, 1:]
        places = hidden[:, :, 1 : 1 + self.tokens].flatten(1, 2)
        mask = taken.unsqueeze(2).expand(tokens.shape).flatten(1)
        return self.losses(
            places,
            tokens.flatten(1),
            mask,
            hidden[:, :, 1],
            batch.reward[:, 1:],
            batch.terminated[:, 1:],
            taken,
        )

    def embed(self, images: torch.Tensor, action: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """I-tokens (B, L, dim), (B, L), (B, L, K) -> blocks (B, L, 2 + K, dim)."""
        changes = self.token_table(tokens)
        return torch.cat([images.unsqueeze(2), self.action_table(action).unsqueeze(2), changes], 2)

    def _changes(self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """(B, T + 1, C, H, W), (B, T) -> tokens (B, T, K)."""
        before, after = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
        return tokenizer.encode(after, before, action.flatten()).unflatten(0, action.shape)

    # ---------------------------------------------------------------- dreaming

    def begin(
        self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor, frame: torch.Tensor | None = None
    ) -> State:
        """frames: (B, T, C, H, W), action: (B, ≥ T - 1): all of the past is read, and the last frame's I-token."""
        past = frames.shape[1] - 1
        action = action[:, :past]
        images = self.see(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        sequence = images[:, -1:]
        if past:
            tokens = self._changes(tokenizer, frames, action)
            sequence = torch.cat([self.embed(images[:, :-1], action, tokens).flatten(1, 2), sequence], 1)
        _, state = self.feed(sequence, self.empty(len(frames)))
        return {**state, "frame": frames[:, -1]}

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,
        noise: torch.Tensor,
        looked: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        hidden, state = self.feed(self.action_table(action).unsqueeze(1), state)
        outcome = self.begin_outcome(hidden[:, -1], noise[:, :2])
        drawn, state = self.draw_tokens(hidden[:, -1], state, noise[:, 2:])
        seen = None if looked is None else looked()
        frame = tokenizer.decode(torch.stack(drawn, 1), state["frame"], action, seen)
        return {**state, "frame": frame, "pending": drawn[-1]}, outcome.join()

    def absorb(self, state: State) -> State:
        known = {key: value for key, value in state.items() if key != "pending"}
        rest = torch.stack([self.token_table(state["pending"]), self.see(state["frame"])], 1)
        return self.feed(rest, known)[1]
