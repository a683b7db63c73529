"""IRIS' world model: a frame's tokens and the action, again and again; each token is predicted from all before it.

block t:    z0 z1 … z15 a          17 tokens, with 16 of a frame
predicts:   z1 z2 … __  z0'        the frame's own next token; at the action, the next frame's first
at a:       reward and end that follow
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rl_lab.components.dynamics.sequence_backbone import State
from rl_lab.components.dynamics.token_world_model import Outcome, TokenWorldModel
from rl_lab.components.nn.component_loss import LossWithIntermediateLosses
from rl_lab.components.representation_learners.tokenizer import to_frames
from rl_lab.records import Batch


class FrameTokenModel(TokenWorldModel):
    """A dream's state: `frame` as decoded, `pending` the frame's last token (it is fed together with the action)."""

    extra = 1
    context = 1  # rows that a dream begins from: it sees the current frame only

    def compute_loss(
        self, batch: Batch, tokenizer: Any, noise: torch.Tensor | None = None
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """batch: (B, L + 1) rows: L blocks, and what followed the last. noise: dropout's seeds."""
        steps = batch.reward.shape[1] - 1
        with torch.no_grad():
            frames = to_frames(batch.obs[self.key][:, :steps].flatten(0, 1))
            tokens = tokenizer.encode(frames).unflatten(0, (-1, steps))
        hidden = self.read(self.embed(tokens, batch.action[:, :steps]), noise)
        return self.losses_of(hidden, tokens, batch)

    def embed(self, tokens: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """(B, L, K), (B, L) -> blocks (B, L, K + 1, dim)."""
        return torch.cat([self.token_table(tokens), self.action_table(action).unsqueeze(2)], 2)

    def losses_of(
        self, hidden: torch.Tensor, tokens: torch.Tensor, batch: Batch
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """hidden: (B, L, K + 1, dim), tokens (B, L, K): heads and targets put together."""
        k, steps = self.tokens, tokens.shape[1]
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        here, taken = real[:, :steps], real[:, :-1] & real[:, 1:]
        at_action = hidden[:, :, k]
        inside = hidden[:, :, : k - 1].flatten(1, 2)
        places = torch.cat([inside, at_action[:, :-1]], 1)
        targets = torch.cat([tokens[:, :, 1:].flatten(1), tokens[:, 1:, 0]], 1)
        mask = torch.cat([here.unsqueeze(2).expand(-1, -1, k - 1).flatten(1), taken[:, :-1]], 1)
        return self.losses(
            places, targets, mask, at_action, batch.reward[:, 1:], batch.terminated[:, 1:], taken
        )

    # ---------------------------------------------------------------- dreaming

    def begin(
        self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor, frame: torch.Tensor | None = None
    ) -> State:
        """frames: (B, T, C, H, W), of which the last counts. frame: its reconstruction, where that is known already."""
        tokens = tokenizer.encode(frames[:, -1])
        shown = tokenizer.decode(tokens) if frame is None else frame
        state = {**self.empty(len(tokens)), "frame": shown, "pending": tokens[:, -1]}
        if self.tokens > 1:
            _, state = self.feed(self.token_table(tokens[:, :-1]), state)
        return state

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,
        noise: torch.Tensor,
        looked: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        pair = torch.stack([self.token_table(state["pending"]), self.action_table(action)], 1)
        hidden, state = self.feed(pair, state)
        outcome = self.begin_outcome(hidden[:, -1], noise[:, :2])
        drawn, state = self.draw_tokens(hidden[:, -1], state, noise[:, 2:])
        frame = tokenizer.decode(torch.stack(drawn, 1))
        return {**state, "frame": frame, "pending": drawn[-1]}, outcome.join()
