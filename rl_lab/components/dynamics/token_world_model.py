"""The world models of IRIS and Δ-IRIS: autoregressive models of tokens, one block per step.

They are trained on complete sequences (`compute_loss`) and imagine token by token (`begin`, `step`); both
give the same values. The state of a rollout is a dict of tensors with the batch first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.dynamics.backbones import State
from rl_lab.components.kernels.sampling import sample_logits
from rl_lab.components.nn.categorical import sample_index
from rl_lab.components.nn.fast_path import SideStream
from rl_lab.components.nn.losses import LossWithIntermediateLosses, masked_mean, reward_share
from rl_lab.components.nn.optim import exempt_from_decay
from rl_lab.components.nn.residual_conv import HALVE, WIDTHS, FrameEncoder, latent_side
from rl_lab.components.nn.transformer import init_token_network
from rl_lab.components.nn.two_hot import SymlogTwoHot
from rl_lab.components.representation_learners.tokenizer import (
    action_table,
    frame_key,
    frame_shape,
    to_frames,
)
from rl_lab.errors import ConfigError, closest
from rl_lab.records import Batch, Spec

# --- Reward distributions ---


class SignReward(nn.Module):
    """The sign of the reward as three classes, for games with clipped rewards: logits (…, 3)."""

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
    """The reward by two-hot regression in symlog space; `draw` returns its mean."""

    def draw(self, logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.mean(logits)


def make_reward(kind: str, bins: int, limit: float) -> SignReward | TwoHotReward:
    """kind: sign, or two_hot with `bins` over symlog ±limit."""
    return SignReward() if kind == "sign" else TwoHotReward(bins, limit=limit)


# --- What both world models share ---

MEMORY = "memory/"  # prefix of the backbone's state in the state of a rollout
REWARDS = ("sign", "two_hot")
LOSSES = ("tokens", "reward", "end")


@dataclass
class Outcome:
    """Reward and termination of one imagined step, (B,) each."""

    reward: torch.Tensor  # float
    end_chance: torch.Tensor  # probability of termination
    ended: torch.Tensor  # bool, sampled from it


class TokenHead(nn.Sequential):
    """MLP with one hidden layer of the backbone's width."""

    def __init__(self, dim: int, outputs: int) -> None:
        super().__init__(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, outputs))


class TokenWorldModel(nn.Module):
    """Base class: embeddings, heads, losses and imagination.

    backbone:      builds the sequence model: backbone(dim=…, length=…)
    tokens, vocab: number of tokens per frame and of different tokens, as in the tokenizer
    code:          width of a token if vocab is 0: tokens are then vectors, which are predicted by regression
    blocks:        maximum context in steps
    reward:        "sign" (3 classes) or "two_hot" (`bins` over symlog ±limit)
    weights:       of the losses tokens, reward and end
    """

    fast = False  # outcome on a side stream, tokens sampled in one kernel; see fast_path.py
    extra: int  # positions of a block other than the frame's tokens

    def __init__(
        self,
        spec: Spec,
        backbone: Callable[..., Any],
        *,
        dim: int,
        tokens: int,
        vocab: int,
        blocks: int,
        code: int = 0,
        reward: str = "sign",
        bins: int = 255,
        limit: float = 20.0,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        if reward not in REWARDS:
            raise ConfigError(f"algorithm.reward is '{reward}'.{closest(reward, REWARDS)}")
        self.weights = {**dict.fromkeys(LOSSES, 1.0), **(weights or {})}
        for name in self.weights:
            if name not in LOSSES:
                raise ConfigError(
                    f"algorithm.loss_weights has an unknown key '{name}'.{closest(name, LOSSES)}"
                )
        if (vocab == 0) != (code > 0):
            raise ConfigError(
                "components.world_model.code must be the width of a code if vocab is 0 (no quantizer), and 0 otherwise"
            )
        self.key, self.spec = frame_key(spec), spec
        self.dim, self.tokens, self.vocab, self.blocks, self.code = dim, tokens, vocab, blocks, code
        self.block = self.block_size(tokens)
        self.length = blocks * self.block
        self.backbone = backbone(dim=dim, length=self.length)
        self.token_table = nn.Embedding(vocab, dim) if vocab else nn.Linear(code, dim)
        self.action_table = action_table(spec, dim)
        self.place_table = nn.Embedding(self.length, dim)
        self.reward = make_reward(reward, bins, limit)
        self.token_head = TokenHead(dim, vocab or code)
        self.reward_head = TokenHead(dim, self.reward.width)
        self.end_head = TokenHead(dim, 2)
        for part in self.children():
            if part is not self.backbone:  # its weights may be loaded
                init_token_network(part)
        exempt_from_decay(self)

    def block_size(self, tokens: int) -> int:
        """Positions of one step."""
        return tokens + self.extra

    @property
    def seeds(self) -> int:
        """Number of uniform random values that a training step takes for dropout."""
        return int(self.backbone.seeds)

    @property
    def step_noise(self) -> int:
        """Number of uniform random values of one imagined step: reward, end, tokens."""
        return 2 + self.tokens

    # ---------------------------------------------------------------- training

    def read(self, embeddings: torch.Tensor, seeds: torch.Tensor | None) -> torch.Tensor:
        """Complete blocks (B, L, block, dim) -> outputs of the backbone, the same shape."""
        flat = embeddings.flatten(1, 2) + self.place_table.weight[: embeddings.shape[1] * self.block]
        used = seeds.flatten() if seeds is not None and self.seeds else None
        return self.backbone(flat, used).unflatten(1, (-1, self.block))

    def losses(
        self,
        hidden: torch.Tensor,  # (B, N, dim) at positions that predict a token
        tokens: torch.Tensor,  # (B, N) targets, or (B, N, code)
        token_mask: torch.Tensor,  # (B, N) bool
        at_action: torch.Tensor,  # (B, L, dim)
        reward: torch.Tensor,  # (B, L) after the action
        end: torch.Tensor,  # (B, L) bool
        mask: torch.Tensor,  # (B, L) bool: the action is not padding
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        logits = self.token_head(hidden)
        token_loss = _cross_entropy(logits, tokens) if self.vocab else _vector_error(logits, tokens)
        end_loss = _cross_entropy(self.end_head(at_action), end.long())
        means = {
            "tokens": masked_mean(token_loss, token_mask),
            "reward": masked_mean(self.reward.loss(self.reward_head(at_action), reward), mask),
            "end": masked_mean(end_loss, mask),
        }
        with torch.no_grad():
            metrics = {} if self.code else {"token_accuracy": self._accuracy(logits, tokens, token_mask)}
            metrics |= {
                "real_steps": mask.float().mean(),
                "reward_share": reward_share(reward, mask),
            }
        return LossWithIntermediateLosses.of(**{k: v * self.weights[k] for k, v in means.items()}), metrics

    @staticmethod
    def _accuracy(logits: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return masked_mean((logits.argmax(-1) == tokens).float(), mask)

    # ---------------------------------------------------------------- imagination

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,  # (B,)
        noise: torch.Tensor,  # (B, step_noise) uniform
        features: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        """The state with the next frame, and its outcome.

        features: returns `tokenizer.frame_features` of the previous frame, if already computed
        """
        raise NotImplementedError

    def read_pending(self, state: State) -> State:
        """Read the tokens that `advance` left pending. A policy on the frame need not wait for it."""
        return state

    def step(
        self, tokenizer: Any, state: State, action: torch.Tensor, noise: torch.Tensor
    ) -> tuple[State, Outcome]:
        """action: (B,), noise: (B, step_noise) uniform -> the state with the next frame, and its outcome."""
        state, outcome = self.advance(tokenizer, state, action, noise)
        return self.read_pending(state), outcome

    def feed(self, embeddings: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Embeddings of the next T tokens (B, T, dim) -> outputs (B, T, dim) and the new state."""
        count = embeddings.shape[1]
        positions = state["position"][:, None] + torch.arange(count, device=embeddings.device)
        x = embeddings + self.place_table(positions.clamp(max=self.length - 1))
        memory = {key.removeprefix(MEMORY): value for key, value in state.items() if key.startswith(MEMORY)}
        hidden, memory = self.backbone.step(x, memory)
        kept = {MEMORY + key: value for key, value in memory.items()}
        return hidden, {**state, **kept, "position": state["position"] + count}

    def empty(self, size: int) -> State:
        """The state before the first token."""
        memory = {MEMORY + key: value for key, value in self.backbone.init_state(size).items()}
        return {
            **memory,
            "position": torch.zeros(size, dtype=torch.int64, device=self.place_table.weight.device),
        }

    def full(self, state: State) -> torch.Tensor:
        """(B,) bool: another step does not fit into the context."""
        return state["position"] + self.block > self.length

    def outcome(self, at_action: torch.Tensor, noise: torch.Tensor) -> Outcome:
        """at_action: (B, dim); noise: (B, 2) uniform."""
        probability = torch.softmax(self.end_head(at_action).float(), -1)[:, 1]
        reward = self.reward.draw(self.reward_head(at_action), noise[:, 0])
        return Outcome(reward, probability, noise[:, 1] < probability)

    def begin_outcome(self, at_action: torch.Tensor, noise: torch.Tensor) -> SideStream[Outcome]:
        """As `outcome`, on a side stream: the frame's tokens do not depend on it."""
        return SideStream(self.outcome, at_action, noise, fast=self.fast, device=at_action.device)

    def draw_token(self, hidden: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """(B, dim), (B,) uniform -> sampled tokens (B,), or their predicted means (B, code)."""
        if self.code:
            mean: torch.Tensor = self.token_head(hidden)
            return mean.float().clamp(-1.0, 1.0)
        return sample_logits(self.token_head(hidden), noise, fast=self.fast)

    def draw_tokens(
        self, hidden: torch.Tensor, state: State, noise: torch.Tensor
    ) -> tuple[list[torch.Tensor], State]:
        """Sample a frame's tokens: hidden (B, dim) at the action, noise (B, tokens) -> (B,) each.

        The returned state has not read the last token.
        """
        drawn = [self.draw_token(hidden, noise[:, 0])]
        for n in range(1, self.tokens):
            outputs, state = self.feed(self.token_table(drawn[-1]).unsqueeze(1), state)
            drawn.append(self.draw_token(outputs[:, -1], noise[:, n]))
        return drawn, state


def _vector_error(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(B, N, D), (B, N, D) -> squared errors (B, N), float32."""
    return (prediction.float() - target.float()).square().mean(-1)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(B, N, C), (B, N) -> (B, N), float32."""
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)


# --- IRIS ---


class FrameTokenModel(TokenWorldModel):
    """IRIS: each step is a frame's tokens and the action; each token is predicted from all previous ones.

    block t:    z0 z1 … z15 a          17 tokens, if a frame has 16
    predicts:   z1 z2 … __  z0'        the frame's next token; at the action, the next frame's first token
    at a:       reward and end after the action

    State of a rollout: `frame`, decoded, and `pending`, the frame's last token, which is read together with
    the action.
    """

    extra = 1
    context = 1  # frames that a rollout starts from: only the current one

    def compute_loss(
        self, batch: Batch, tokenizer: Any, noise: torch.Tensor | None = None
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """batch: (B, L + 1) rows, L blocks and the row after the last. noise: seeds of the dropout."""
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
        """Losses from hidden (B, L, K + 1, dim) and tokens (B, L, K)."""
        k, steps = self.tokens, tokens.shape[1]
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        here, taken = real[:, :steps], real[:, :-1] & real[:, 1:]
        at_action = hidden[:, :, k]
        inside = hidden[:, :, : k - 1].flatten(1, 2)
        predicting = torch.cat([inside, at_action[:, :-1]], 1)
        targets = torch.cat([tokens[:, :, 1:].flatten(1, 2), tokens[:, 1:, 0]], 1)
        mask = torch.cat([here.unsqueeze(2).expand(-1, -1, k - 1).flatten(1), taken[:, :-1]], 1)
        return self.losses(
            predicting, targets, mask, at_action, batch.reward[:, 1:], batch.terminated[:, 1:], taken
        )

    # ---------------------------------------------------------------- imagination

    def begin(
        self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor, frame: torch.Tensor | None = None
    ) -> State:
        """Start from the last of frames (B, T, C, H, W). frame: its reconstruction, if already computed."""
        tokens = tokenizer.encode(frames[:, -1])
        decoded = tokenizer.decode(tokens) if frame is None else frame
        state = {**self.empty(len(tokens)), "frame": decoded, "pending": tokens[:, -1]}
        if self.tokens > 1:
            _, state = self.feed(self.token_table(tokens[:, :-1]), state)
        return state

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,
        noise: torch.Tensor,
        features: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        pair = torch.stack([self.token_table(state["pending"]), self.action_table(action)], 1)
        hidden, state = self.feed(pair, state)
        outcome = self.begin_outcome(hidden[:, -1], noise[:, :2])
        drawn, state = self.draw_tokens(hidden[:, -1], state, noise[:, 2:])
        frame = tokenizer.decode(torch.stack(drawn, 1))
        return {**state, "frame": frame, "pending": drawn[-1]}, outcome.join()


class FrameAtOnceModel(TokenWorldModel):
    """As `FrameTokenModel`, but one position per step: all tokens of the next frame are predicted together.

    block t:    the frame's tokens and the action, in one embedding
    predicts:   all tokens of the next frame, independently of each other given the past; reward and end

    A sequence is `tokens + 1` times shorter, and one imagined step is one call of the backbone. The price:
    tokens are sampled independently, so parts of a frame that depend on each other may not fit together.

    State of a rollout: `frame`, decoded, and `pending`, its tokens, which are read together with the action.
    """

    context = 1

    def __init__(self, spec: Spec, backbone: Callable[..., Any], **options: Any) -> None:
        super().__init__(spec, backbone, **options)
        self.frame_layer = nn.Linear(self.tokens * self.dim, self.dim)
        self.slot_table = nn.Embedding(self.tokens, self.dim)
        for part in (self.frame_layer, self.slot_table):
            init_token_network(part)
        exempt_from_decay(self)

    def block_size(self, tokens: int) -> int:
        return 1

    def compute_loss(
        self, batch: Batch, tokenizer: Any, noise: torch.Tensor | None = None
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """batch: (B, L + 1) rows, L blocks and the row after the last. noise: seeds of the dropout."""
        with torch.no_grad():
            frames = to_frames(batch.obs[self.key].flatten(0, 1))
            tokens = tokenizer.encode(frames).unflatten(0, batch.reward.shape)
        hidden = self.read(self.embed(tokens[:, :-1], batch.action[:, :-1]).unsqueeze(2), noise).squeeze(2)
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        taken = real[:, :-1] & real[:, 1:]
        return self.losses(
            self.slots(hidden).flatten(1, 2),
            tokens[:, 1:].flatten(1, 2),
            taken.unsqueeze(2).expand(-1, -1, self.tokens).flatten(1),
            hidden,
            batch.reward[:, 1:],
            batch.terminated[:, 1:],
            taken,
        )

    def embed(self, tokens: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        """(…, K), (…) -> (…, dim)."""
        parts = self.token_table(tokens).flatten(-2)  # (…, K · dim)
        return self.frame_layer(parts) + self.action_table(action)

    def slots(self, hidden: torch.Tensor) -> torch.Tensor:
        """(…, dim) -> (…, K, dim): what each token is predicted from."""
        return hidden.unsqueeze(-2) + self.slot_table.weight

    # ---------------------------------------------------------------- imagination

    def begin(
        self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor, frame: torch.Tensor | None = None
    ) -> State:
        """Start from the last of frames (B, T, C, H, W). frame: its reconstruction, if already computed."""
        tokens = tokenizer.encode(frames[:, -1])
        decoded = tokenizer.decode(tokens) if frame is None else frame
        return {**self.empty(len(tokens)), "frame": decoded, "pending": tokens}

    def advance(
        self,
        tokenizer: Any,
        state: State,
        action: torch.Tensor,
        noise: torch.Tensor,
        features: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        hidden, state = self.feed(self.embed(state["pending"], action).unsqueeze(1), state)
        outcome = self.begin_outcome(hidden[:, -1], noise[:, :2])
        drawn = self.draw_token(self.slots(hidden[:, -1]).flatten(0, 1), noise[:, 2:].flatten())
        tokens = drawn.unflatten(0, (len(action), self.tokens))
        return {**state, "frame": tokenizer.decode(tokens), "pending": tokens}, outcome.join()


# --- Δ-IRIS ---


class DeltaTokenModel(TokenWorldModel):
    """Δ-IRIS: each step is the frame as one continuous token (I-token), the action, tokens of the change.

    block t:    I  a  d0 d1 d2 d3      6 tokens, if a change has 4
    predicts:   _  d0 d1 d2 d3 _       what this action changes
    at a:       reward and end after the action

    frame_width, frame_latent: of the network that computes the I-token; frame_latent × grid² is the
    backbone's width

    State of a rollout: `frame`, the current frame, whose I-token has been read, except between `advance` and
    `read_pending`; then `pending`, the last token of the change, has not been read either.
    """

    extra = 2
    context = 0  # frames that a rollout starts from; 0: all that are passed

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

    def encode_frames(self, frames: torch.Tensor) -> torch.Tensor:
        """(M, C, H, W) -> I-tokens (M, dim)."""
        return self.frame_norm(self.frame_net(frames).flatten(1))

    def compute_loss(
        self, batch: Batch, tokenizer: Any, noise: torch.Tensor | None = None
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """batch: (B, L + 1) rows, L blocks and the row after the last. noise: seeds of the dropout."""
        frames, action = to_frames(batch.obs[self.key]), batch.action[:, :-1]
        with torch.no_grad():
            tokens = self._changes(tokenizer, frames, action)
        images = self.encode_frames(frames[:, :-1].flatten(0, 1)).unflatten(0, action.shape[:2])
        hidden = self.read(self.embed(images, action, tokens), noise)
        return self.losses_of(hidden, tokens, batch)

    def losses_of(
        self, hidden: torch.Tensor, tokens: torch.Tensor, batch: Batch
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """Losses from hidden (B, L, 2 + K, dim) and tokens (B, L, K)."""
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        taken = real[:, :-1] & real[:, 1:]
        predicting = hidden[:, :, 1 : 1 + self.tokens].flatten(1, 2)
        mask = taken.unsqueeze(2).expand(tokens.shape[:3]).flatten(1)
        return self.losses(
            predicting,
            tokens.flatten(1, 2),
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
        return tokenizer.encode(after, before, action.flatten(0, 1)).unflatten(0, action.shape[:2])

    # ---------------------------------------------------------------- imagination

    def begin(
        self, tokenizer: Any, frames: torch.Tensor, action: torch.Tensor, frame: torch.Tensor | None = None
    ) -> State:
        """Read frames (B, T, C, H, W) and action (B, ≥ T - 1), up to the last frame's I-token."""
        past = frames.shape[1] - 1
        action = action[:, :past]
        images = self.encode_frames(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
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
        features: Callable[[], torch.Tensor | None] | None = None,
    ) -> tuple[State, Outcome]:
        hidden, state = self.feed(self.action_table(action).unsqueeze(1), state)
        outcome = self.begin_outcome(hidden[:, -1], noise[:, :2])
        drawn, state = self.draw_tokens(hidden[:, -1], state, noise[:, 2:])
        previous = None if features is None else features()
        frame = tokenizer.decode(torch.stack(drawn, 1), state["frame"], action, previous)
        return {**state, "frame": frame, "pending": drawn[-1]}, outcome.join()

    def read_pending(self, state: State) -> State:
        known = {key: value for key, value in state.items() if key != "pending"}
        pending = torch.stack([self.token_table(state["pending"]), self.encode_frames(state["frame"])], 1)
        return self.feed(pending, known)[1]
