"""Alignment of tokens, actions and heads on counting sequences; rollouts match complete sequences."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from rl_lab.components.dynamics.backbones import GRUBackbone
from rl_lab.components.dynamics.token_world_model import DeltaTokenModel, FrameTokenModel
from rl_lab.components.nn.transformer import Transformer
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec

SIDE, TOKENS, BLOCKS, VOCAB = 16, 4, 5, 64
SPEC = Spec("images", {"image": ArraySpec((3, SIDE, SIDE), "uint8")}, ActionSpec("discrete", (), (3,)))
BACKBONES = {"transformer": partial(Transformer, layers=2, heads=2), "gru": GRUBackbone}


class CountingTokenizer:
    """A frame whose first pixel is n has the tokens 4n, 4n+1, 4n+2, 4n+3, so that tokens count upwards."""

    key, num_tokens, vocab = "image", TOKENS, VOCAB

    def encode(self, frame, previous=None, action=None):
        first = (frame[:, 0, 0, 0] * 255).round().long()
        return first[:, None] * TOKENS + torch.arange(TOKENS)

    def decode(self, tokens, previous=None, action=None, features=None):
        value = (tokens[:, 0] // TOKENS).float() / 255
        return value.view(-1, 1, 1, 1).expand(-1, 3, SIDE, SIDE)


def counting_batch(rows: int, mask: torch.Tensor | None = None) -> Batch:
    """Frame t shows t; its reward is alternately 1 and -1; the last row terminates."""
    steps = torch.arange(rows)
    image = steps.to(torch.uint8).view(1, rows, 1, 1, 1).expand(2, rows, 3, SIDE, SIDE)
    no = torch.zeros(2, rows, dtype=torch.bool)
    end = no.clone()
    end[:, -1] = True
    columns = {
        "obs/image": image,
        "action": (steps % 3).expand(2, rows),
        "reward": (1.0 - 2.0 * (steps % 2)).expand(2, rows),
        "terminated": end,
        "truncated": no,
        "is_first": no,
    }
    return Batch(columns, mask=mask)


class Recorder(nn.Module):
    """A head that records its input and returns constant logits."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.outputs, self.given = outputs, torch.zeros(0)

    def forward(self, x):
        self.given = x
        return x.new_zeros(*x.shape[:-1], self.outputs)


class Marker(nn.Module):
    """A backbone that returns the position of each token."""

    dim, seeds, max_length = 1, 0, None

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x, seeds=None):
        return torch.arange(x.shape[1]).float().view(1, -1, 1).expand(x.shape)


def marked(model) -> dict[str, torch.Tensor]:
    """Compute the loss on the counting sequence: positions that each head reads, and its targets."""
    model.token_head, model.reward_head, model.end_head = Recorder(VOCAB), Recorder(3), Recorder(2)
    seen: dict[str, torch.Tensor] = {}
    original = model.losses

    def losses(hidden, tokens, token_mask, at_action, reward, end, mask):
        seen.update(
            places=hidden[0, :, 0].long(),
            tokens=tokens[0],
            token_mask=token_mask,
            action=at_action[0, :, 0].long(),
        )
        seen.update(reward=reward[0], end=end[0], mask=mask)
        return original(hidden, tokens, token_mask, at_action, reward, end, mask)

    model.losses = losses
    mask = torch.ones(2, BLOCKS + 1, dtype=torch.bool)
    mask[1, 3:] = False
    model.compute_loss(counting_batch(BLOCKS + 1, mask), CountingTokenizer())
    return seen


def frame_model(backbone=BACKBONES["transformer"]) -> FrameTokenModel:
    torch.manual_seed(0)
    return FrameTokenModel(SPEC, backbone, dim=8, tokens=TOKENS, vocab=VOCAB, blocks=BLOCKS)


def delta_model(backbone=BACKBONES["transformer"]) -> DeltaTokenModel:
    torch.manual_seed(0)
    return DeltaTokenModel(
        SPEC, backbone, frame_width=2, frame_latent=2, tokens=TOKENS, vocab=VOCAB, blocks=BLOCKS
    )


def test_frame_model_targets():
    seen = marked(frame_model(Marker))
    block = TOKENS + 1
    for place, token in zip(seen["places"].tolist(), seen["tokens"].tolist()):
        step, inside = divmod(place, block)
        if inside < TOKENS:
            assert inside < TOKENS - 1  # the last token of a frame predicts nothing: the action is next
            assert token == step * TOKENS + inside + 1
        else:
            assert token == (step + 1) * TOKENS  # at the action: the next frame's first
    assert len(seen["tokens"]) == BLOCKS * (TOKENS - 1) + BLOCKS - 1
    assert seen["action"].tolist() == [t * block + TOKENS for t in range(BLOCKS)]
    assert seen["reward"].tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0]  # of the row that follows
    assert seen["end"].tolist() == [False] * (BLOCKS - 1) + [True]
    assert seen["mask"][1].tolist() == [True, True, False, False, False]
    assert seen["token_mask"][1].sum() == 3 * (TOKENS - 1) + 2  # three valid frames, two steps between them


def test_delta_model_targets():
    seen = marked(delta_model(Marker))
    block = TOKENS + 2
    for place, token in zip(seen["places"].tolist(), seen["tokens"].tolist()):
        step, inside = divmod(place, block)
        assert 1 <= inside <= TOKENS
        assert token == (step + 1) * TOKENS + inside - 1
    assert len(seen["tokens"]) == BLOCKS * TOKENS
    assert seen["action"].tolist() == [t * block + 1 for t in range(BLOCKS)]
    assert seen["reward"].tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0]
    assert seen["end"].tolist() == [False] * (BLOCKS - 1) + [True]
    assert seen["token_mask"][1].sum() == 2 * TOKENS


@torch.no_grad()
@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_frame_model_rollout_matches_sequence(backbone):
    model, tokenizer = frame_model(BACKBONES[backbone]), CountingTokenizer()
    frames = to_frames(counting_batch(1))
    drawn, logits, actions = [tokenizer.encode(frames[:, 0])], [], []
    head = model.token_head.forward
    model.token_head.forward = lambda x: logits.append(head(x)) or logits[-1]
    state = model.begin(tokenizer, frames, torch.zeros(2, 1, dtype=torch.int64))
    noise = torch.rand(2, BLOCKS, model.step_noise)
    for t in range(BLOCKS - 1):
        tokens: list[torch.Tensor] = []
        draw = model.draw_token
        model.draw_token = lambda h, u, draw=draw, tokens=tokens: tokens.append(draw(h, u)) or tokens[-1]
        actions.append(torch.tensor([t % 3, (t + 1) % 3]))
        assert not model.full(state).any()
        state, outcome = model.step(tokenizer, state, actions[-1], noise[:, t])
        model.draw_token = draw
        drawn.append(torch.stack(tokens, 1))
        assert outcome.reward.shape == outcome.ended.shape == (2,)
    model.token_head.forward = head
    stepped = torch.stack(logits, 1)  # (2, steps · K, vocab)
    tokens, action = torch.stack(drawn, 1), torch.stack([*actions, actions[0]], 1)
    hidden = model.read(model.embed(tokens, action), None)  # (2, BLOCKS, K + 1, dim)
    at_action, inside = hidden[:, :-1, TOKENS:], hidden[:, 1:, : TOKENS - 1]
    full = model.token_head(torch.cat([at_action, inside], 2).flatten(1, 2))
    torch.testing.assert_close(stepped, full, atol=1e-5, rtol=1e-4)
    assert model.full(model.step(tokenizer, state, actions[0], noise[:, -1])[0]).all()


@torch.no_grad()
@pytest.mark.parametrize("backbone", sorted(BACKBONES))
def test_delta_model_rollout_matches_sequence(backbone):
    model, tokenizer = delta_model(BACKBONES[backbone]), CountingTokenizer()
    rows = counting_batch(3)
    frames, past = to_frames(rows), rows.action
    logits, shown, changes, actions = [], [*frames.unbind(1)], [], [past[:, 0], past[:, 1]]
    head = model.token_head.forward
    model.token_head.forward = lambda x: logits.append(head(x)) or logits[-1]
    state = model.begin(tokenizer, frames, past)
    noise = torch.rand(2, 2, model.step_noise)
    for t in range(2):
        actions.append(torch.tensor([t, 2 - t]))
        tokens: list[torch.Tensor] = []
        draw = model.draw_token
        model.draw_token = lambda h, u, draw=draw, tokens=tokens: tokens.append(draw(h, u)) or tokens[-1]
        state, _ = model.step(tokenizer, state, actions[-1], noise[:, t])
        model.draw_token = draw
        changes.append(torch.stack(tokens, 1))
        shown.append(state["frame"])
    model.token_head.forward = head
    before = [tokenizer.encode(frames[:, 1]), tokenizer.encode(frames[:, 2])]
    images = model.encode_frames(torch.stack(shown[:4], 1).flatten(0, 1)).unflatten(0, (2, 4))
    blocks = model.embed(images, torch.stack(actions, 1), torch.stack([*before, *changes], 1))
    hidden = model.read(blocks, None)[:, 2:, 1 : 1 + TOKENS]
    torch.testing.assert_close(
        torch.stack(logits, 1), model.token_head(hidden.flatten(1, 2)), atol=1e-5, rtol=1e-4
    )


def to_frames(batch: Batch) -> torch.Tensor:
    return batch.obs["image"].float() / 255


def test_model_learns_to_count():
    model = frame_model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    batch = counting_batch(BLOCKS + 1)
    for _ in range(120):
        loss, metrics = model.compute_loss(batch, CountingTokenizer())
        optimizer.zero_grad()
        loss.loss_total.backward()
        optimizer.step()
    assert set(loss.intermediate_losses) == {"tokens", "reward", "end"}
    total = sum(loss.intermediate_losses.values())
    torch.testing.assert_close(loss.loss_total.detach(), total)
    assert float(metrics["token_accuracy"]) > 0.95
    assert float(loss.loss_total) < 1.0


def test_world_model_error_messages():
    with pytest.raises(ConfigError, match="'tow_hot'"):
        FrameTokenModel(SPEC, Marker, dim=8, tokens=4, vocab=8, blocks=2, reward="tow_hot")
    with pytest.raises(ConfigError, match="'token'"):
        FrameTokenModel(SPEC, Marker, dim=8, tokens=4, vocab=8, blocks=2, weights={"token": 1.0})
    several = Spec("x", SPEC.observations, ActionSpec("multi_discrete", (2,), (2, 2)))
    with pytest.raises(ConfigError, match="multi_discrete actions"):
        FrameTokenModel(several, Marker, dim=8, tokens=4, vocab=8, blocks=2)
    with pytest.raises(ConfigError, match=r"world_model\.code must be the width"):
        FrameTokenModel(SPEC, Marker, dim=8, tokens=4, vocab=0, blocks=2)
