"""The transformer's fast path matches the plain implementation: cached steps, and training with gradients."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.dynamics.backbones import copy_state
from rl_lab.components.kernels.attention import causal_attention
from rl_lab.components.kernels.dropout import kept
from rl_lab.components.kernels.residual_norm import residual_norm
from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.components.nn.transformer import FROZEN, Transformer, causal_softmax_dropout, seed_word
from rl_lab.utils.device import autocast

B, T, D, HEADS = 3, 11, 16, 2
TOLERANCE = {torch.float32: {"atol": 1e-5, "rtol": 1e-5}, torch.bfloat16: {"atol": 0.06, "rtol": 0.06}}
precisions = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])


def make_model(dropout: float = 0.0, length: int = T) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(dim=D, layers=3, heads=HEADS, length=length, dropout=dropout)
    with torch.no_grad():  # initial biases and norms are neutral and would hide errors
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def cached(model: Transformer, x: torch.Tensor, parts: tuple[int, ...], on: bool) -> list[torch.Tensor]:
    found = []
    use_fast_path(on, model)
    with torch.no_grad():
        state = model.init_state(len(x))
        assert hasattr(state["keys"], FROZEN) == on
        for part in x.split(parts, 1):
            hidden, state = model.step(part, state)
            assert hidden.dtype == x.dtype
            found.append(hidden)
    return [torch.cat(found, 1), *state.values()]


@precisions
@pytest.mark.parametrize("parts", [(1,) * 11, (2,) * 5 + (1,), (5, 2, 1, 1, 2), (11,)])
def test_cached_steps_match_plain(dtype: torch.dtype, parts: tuple[int, ...]):
    model, x = make_model(), torch.randn(B, T, D)
    with autocast(dtype, "cpu"):
        quick, plain = (cached(model, x, parts, on) for on in (True, False))
        full = model(x)
    for found, expected in zip(quick, plain, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(quick[0], full.detach(), **TOLERANCE[dtype])


@torch.no_grad()
def test_cache_rows_of_different_length():
    model, lengths = make_model(), torch.tensor([0, 4, T - 1, T])
    found = []
    for on in (True, False):
        torch.manual_seed(1)
        use_fast_path(on, model)
        state = model.init_state(4)
        for name in ("keys", "values"):
            state[name].copy_(torch.randn(state[name].shape))
        state["filled"] = lengths
        first, state = model.step(torch.randn(4, 1, D), state)
        second, state = model.step(torch.randn(4, 2, D), state)
        found.append([first, second, *state.values()])
    for quick, plain in zip(*found, strict=True):
        torch.testing.assert_close(quick, plain, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_plain_path_for_copies_and_gradients():
    model, x = make_model(), torch.randn(B, 1, D)
    use_fast_path(True, model)
    state = model.init_state(B)
    copied = copy_state(state)
    assert not hasattr(copied["keys"], FROZEN)
    torch.testing.assert_close(model.step(x, copied)[0], model.step(x, state)[0], atol=1e-5, rtol=1e-5)
    with torch.enable_grad():
        state = model.init_state(B)
        assert not hasattr(state["keys"], FROZEN)
        assert model.step(x, state)[0].requires_grad


def test_rollout_uses_current_weights():
    model, x = make_model(), torch.randn(B, 1, D)
    before = cached(model, x, (1,), True)[0]
    with torch.no_grad():
        model.blocks[0].attention.value.weight.add_(1.0)
    after = cached(model, x, (1,), True)[0]
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, cached(model, x, (1,), False)[0], atol=1e-5, rtol=1e-5)


@precisions
@pytest.mark.parametrize("dropout, seeded", [(0.0, False), (0.3, False), (0.3, True)])
def test_training_matches_plain(dtype: torch.dtype, dropout: float, seeded: bool):
    model = make_model(dropout)
    inputs, weight = torch.randn(B, T, D), torch.randn(B, T, D)
    seeds = torch.rand(model.seeds) if seeded else None
    found = []
    for on in (True, False):
        x = inputs.clone().requires_grad_()
        model.zero_grad()
        use_fast_path(on, model)
        with autocast(dtype, "cpu"):
            y = model(x, seeds)
        assert y.dtype == torch.float32
        (y * weight).sum().backward()
        assert x.grad is not None
        found.append({"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}})
    for name, expected in found[1].items():
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[0][name] / scale, expected / scale, **TOLERANCE[dtype], msg=name)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("used", ["both", "norm", "sum"])
def test_residual_norm(dropped: bool, used: str):
    torch.manual_seed(0)
    rate, word = 0.3, seed_word(torch.rand(())) if dropped else None
    inputs = [torch.randn(4, 5, D), torch.randn(4, 5, D), torch.rand(D) + 0.5, torch.randn(D)]
    found = []
    for fused in (True, False):
        x, y, weight, bias = tensors = [tensor.clone().requires_grad_() for tensor in inputs]
        if fused:
            total, normed = residual_norm(x, y, weight, bias, 1e-5, torch.float32, rate, word)
        else:
            total = x + (y if word is None else y * kept(tuple(y.shape), rate, word))
            normed = torch.nn.functional.layer_norm(total, (D,), weight, bias, 1e-5)
        loss = torch.zeros(())
        if used != "sum":
            loss = loss + (normed * inputs[1].cos()).sum()
        if used != "norm":
            loss = loss + (total * inputs[0].sin()).sum()
        found.append([total, normed, *torch.autograd.grad(loss, tensors, allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        expected = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_causal_attention():
    torch.manual_seed(0)
    seed, inputs, weight = torch.rand(()), torch.randn(B, T, 3 * D), torch.randn(B, T, D)
    found = []
    for fused in (True, False):
        qkv = inputs.clone().requires_grad_()
        if fused:
            y = causal_attention(qkv, HEADS, 0.3, seed_word(seed))
        else:
            q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
            scores = causal_softmax_dropout(q @ k.transpose(-2, -1), (D // HEADS) ** -0.5, 0.3, seed)
            y = (scores @ v).transpose(1, 2).flatten(2)
        (y * weight).sum().backward()
        found.append([y.detach(), qkv.grad])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
