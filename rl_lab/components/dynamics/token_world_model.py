"""What IRIS' and Δ-IRIS' world models share: heads, losses, and one imagined step's bookkeeping.

A world model reads blocks of tokens, one block a step. It is trained on whole sequences (`compute_loss`) and dreams token
by token (`begin`, `step`); both give the same numbers. A dream's state is a dict of tensors with the batch first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.dynamics.sequence_backbone import State
from rl_lab.components.nn.categorical import sample_index
from rl_lab.components.nn.fast_path import Aside
from rl_lab.components.nn.kernels.sample_logits import sample_logits
from rl_lab.components.nn.losses import LossWithIntermediateLosses, masked_mean
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.transformer import init_token_network
from rl_lab.components.nn.two_hot import SymlogTwoHot
from rl_lab.components.representation_learners.delta_tokenizer import HALVE, WIDTHS, FrameEncoder, latent_side
from rl_lab.components.representation_learners.tokenizer import (
    action_count,
    frame_key,
    frame_shape,
    to_frames,
)
from rl_lab.errors import ConfigError, closest
from rl_lab.records import Batch, Spec

# --------------------
# Rewards as three classes: negative, none, positive. For games whose rewards are worth their sign.


class SignReward(nn.Module):
    """Logits (…, 3)."""

    width = 3

    def loss(self, logits: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
        """Cross entropy to the reward's sign: (…, 3), (…) -> (…)."""
        target = (torch.sign(reward) + 1.0).long()
        return F.cross_entropy(logits.float().flatten(0, -2), target.flatten(), reduction="none").view_as(
            target
        )

    def draw(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """A sample: (…, 3), (…) uniform -> (…) in {-1, 0, 1}."""
        return sample_index(torch.softmax(logits.float(), -1), noise).float() - 1.0


class TwoHotReward(SymlogTwoHot):
    """The reward itself, by two-hot regression in symlog space; what is drawn is its mean."""

    def draw(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.mean(logits)


def make_reward(kind: str, bins: int, limit: float) -> SignReward | TwoHotReward:
    """For kind sign or two_hot, the latter with `bins` over symlog ±limit."""
    return SignReward() if kind == "sign" else TwoHotReward(bins, limit=limit)


MEMORY = "memory/"  # prefix of the backbone's own state in a dream's
REWARDS = ("sign", "two_hot")
LOSSES = ("tokens", "reward", "end")


@dataclass
class Outcome:
    """What one imagined step brings, (B,) each."""

    reward: torch.Tensor  # float
    end_chance: torch.Tensor  # probability of the end
    ended: torch.Tensor  # bool, drawn from it


class TokenHead(nn.Sequential):
    """One hidden layer of the backbone's width."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, outputs))


class TokenWorldModel(nn.Module):
    """backbone: makes the network that reads the sequence, from its width and the longest sequence.

    tokens, vocab: of a frame, as the tokenizer makes them
    blocks:        steps that it can look back on
    reward:        "sign" (3 classes) or "two_hot" (`bins` over symlog ±limit)
    weights:       of the losses tokens, reward and end
    """

    extra: int  # places of a block beside the frame's tokens

    def __init__(
        self,
        spec: Spec,
        backbone: Callable[..., Any],
        *,
        dim: int,
        tokens: int,
        vocab: int,
        blocks: int,
        reward: str = "sign",
        bins: int = 255,
        limit: float = 20.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if reward not in REWARDS:
            raise ConfigError(f"a world model's reward is '{reward}'.{closest(reward, REWARDS)}")
        self.weights = {**dict.fromkeys(LOSSES, 1.0), **(weights or {})}
        for name in self.weights:
            if name not in LOSSES:
                raise ConfigError(f"a world model's weights have no '{name}'.{closest(name, LOSSES)}")
        self.key, self.actions = frame_key(spec), action_count(spec)
        self.dim, self.tokens, self.vocab, self.blocks = dim, tokens, vocab, blocks
        self.block = tokens + self.extra
        self.length = blocks * self.block
        self.backbone = backbone(dim=dim, length=self.length)
        self.token_table = nn.Embedding(vocab, dim)
        self.action_table = nn.Embedding(self.actions, dim)
        self.place_table = nn.Embedding(self.length, dim)
        self.reward = make_reward(reward, bins, limit)
        self.token_head = TokenHead(dim, vocab)
        self.reward_head = TokenHead(dim, self.reward.width)
        self.end_head = TokenHead(dim, 2)
        for part in self.children():
            if part is not self.backbone:  # whose weights may be loaded ones
                init_token_network(part)
        exempt_from_decay(self)

    @property
    def seeds(self) -> int:
        """Uniform numbers that one training step wants for dropout."""
        return int(self.backbone.seeds)

    @property
    def step_noise(self) -> int:
        """Uniform numbers that one imagined step wants: reward, end, tokens."""
        return 2 + self.tokens

    # ---------------------------------------------------------------- training

    def read(self, embeddings: torch.Tensor, seeds: torch.Tensor | None) -> torch.Tensor:
        """Whole blocks (B, L, block, dim) -> the backbone's results, the same shape."""
        flat = embeddings.flatten(1, 2) + self.place_table.weight[: embeddings.shape[1] * self.block]
        used = seeds.flatten() if seeds is not None and self.seeds else None
        return self.backbone(flat, used).unflatten(1, (-1, self.block))

    def losses(
        self,
        hidden: torch.Tensor,  # (B, N, dim) where tokens are predicted
        tokens: torch.Tensor,  # (B, N) what comes there
        token_mask: torch.Tensor,  # (B, N) bool
        at_action: torch.Tensor,  # (B, L, dim)
        reward: torch.Tensor,  # (B, L) that followed
        end: torch.Tensor,  # (B, L) bool
        mask: torch.Tensor,  # (B, L) bool: the action was really taken
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        logits = self.token_head(hidden)
        token_loss = _cross_entropy(logits, tokens)
        end_loss = _cross_entropy(self.end_head(at_action), end.long())
        means = {
            "tokens": masked_mean(token_loss, token_mask),
            "reward": masked_mean(self.reward.loss(self.reward_head(at_action), reward), mask),
            "end": masked_mean(end_loss, mask),
        }
        with torch.no_grad():
            right = (logits.argmax(-1) == tokens).float()
            metrics = {"token_accuracy": masked_mean(right, token_mask), "real_steps": mask.float().mean()}
        return LossWithIntermediateLosses.of(**{k: v * self.weights[k] for k, v in means.items()}), metrics

    # ---------------------------------------------------------------- dreaming

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,  # (B,)
        noise: torch.Tensor,  # (B, step_noise) uniform
        looked: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        """The next frame, and what came with it. looked: `tokenizer.look` at the frame before, where it was done already."""
        raise NotImplementedError

    def absorb(self, state: State) -> State:
        """Read what `advance` left to be read. A policy that looks at the frame need not wait for it."""
        return state

    def step(
        self, tokenizer: Any, state: State, action: torch.Tensor, noise: torch.Tensor
    ) -> tuple[State, Outcome]:
        """action: (B,), noise: (B, step_noise) uniform: the state with the next frame, and what came with it."""
        state, outcome = self.advance(tokenizer, state, action, noise)
        return self.absorb(state), outcome

    def feed(self, embeddings: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """The next T tokens' embeddings (B, T, dim): the results, and the state after them."""
        count = embeddings.shape[1]
        places = state["position"][:, None] + torch.arange(count, device=embeddings.device)
        x = embeddings + self.place_table(places.clamp(max=self.length - 1))
        memory = {key.removeprefix(MEMORY): value for key, value in state.items() if key.startswith(MEMORY)}
        hidden, memory = self.backbone.step(x, memory)
        kept = {MEMORY + key: value for key, value in memory.items()}
        return hidden, {**state, **kept, "position": state["position"] + count}

    def empty(self, size: int) -> State:
        """Before the first token."""
        memory = {MEMORY + key: value for key, value in self.backbone.init_state(size).items()}
        return {
            **memory,
            "position": torch.zeros(size, dtype=torch.int64, device=self.place_table.weight.device),
        }

    def full(self, state: State) -> torch.Tensor:
        """(B,) bool: another step does not fit."""
        return state["position"] + self.block > self.length

    def outcome(self, at_action: torch.Tensor, noise: torch.Tensor) -> Outcome:
        """at_action: (B, dim); noise: (B, 2) uniform."""
        chance = torch.softmax(self.end_head(at_action).float(), -1)[:, 1]
        reward = self.reward.draw(self.reward_head(at_action), noise[:, 0])
        return Outcome(reward, chance, noise[:, 1] < chance)

    def begin_outcome(self, at_action: torch.Tensor, noise: torch.Tensor) -> Aside[Outcome]:
        """As `outcome`, to be joined: the frame's tokens need not wait for it."""
        return Aside(self.outcome, at_action, noise, device=at_action.device)

    def draw_token(self, hidden: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(B, dim), (B,) uniform -> (B,) a sampled token."""
        return sample_logits(self.token_head(hidden), noise)

    def draw_tokens(
        self, hidden: torch.Tensor, state: State, noise: torch.Tensor
    ) -> tuple[list[torch.Tensor], State]:
        """A frame's tokens, one after the other: (B, dim) of the action, (B, tokens) uniform -> (B,) each.

        The last one is drawn, but not read yet.
        """
        drawn = [self.draw_token(hidden, noise[:, 0])]
        for n in range(1, self.tokens):
            results, state = self.feed(self.token_table(drawn[-1]).unsqueeze(1), state)
            drawn.append(self.draw_token(results[:, -1], noise[:, n]))
        return drawn, state


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(B, N, C), (B, N) -> (B, N), float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)


# --------------------
# IRIS' world model: a frame's tokens and the action, again and again; each token is predicted from all before it.
#
# block t:    z0 z1 … z15 a          17 tokens, with 16 of a frame
# predicts:   z1 z2 … __  z0'        the frame's own next token; at the action, the next frame's first
# at a:       reward and end that follow


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


# --------------------
# Δ-IRIS' world model: each block has the frame itself as one continuous token, the action, and the tokens of the change.
#
# block t:    I  a  d0 d1 d2 d3      6 tokens, with 4 of a change
# predicts:   _  d0 d1 d2 d3 _       what this action changes
# at a:       reward and end that follow


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
