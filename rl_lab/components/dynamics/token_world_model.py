"""What IRIS' and Δ-IRIS' world models share: heads, losses, and one imagined step's bookkeeping.

A world model reads blocks of tokens, one block a step. It is trained on whole sequences (`compute_loss`) and dreams token
by token (`begin`, `step`); both give the same numbers. A dream's state is a dict of tensors with the batch first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rl_lab.components.dynamics.sequence_backbone import State
from rl_lab.components.nn.component_loss import LossWithIntermediateLosses, masked_mean
from rl_lab.components.nn.kernels.sample_logits import sample_logits
from rl_lab.components.nn.side_stream import Aside
from rl_lab.components.nn.sign_reward import make_reward
from rl_lab.components.nn.token_init import init_token_network
from rl_lab.components.nn.weight_decay import exempt_from_decay
from rl_lab.components.representation_learners.tokenizer import action_count, frame_key
from rl_lab.errors import ConfigError, closest
from rl_lab.records import Spec

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
