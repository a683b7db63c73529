"""On a GPU: the transformer's kernels agree with their plain torch forms."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.kernels import attention, residual_norm
from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.components.nn.transformer import Transformer, seed_word, seeded_dropout
from tests.gpu.kernel_case import EPS, HALF, agree, dtypes, on_gpu

pytestmark = pytest.mark.gpu


def test_dropout():
    seed, inputs, weight = torch.rand(()), torch.randn(3, 700), torch.randn(3, 700)
    results = []
    for device in ("cpu", "cuda"):
        x = inputs.to(device, copy=True).requires_grad_()
        y = seeded_dropout(x, 0.3, seed.to(device), fast=True)
        (y * weight.to(device)).sum().backward()
        results.append((y.detach(), x.grad))
    for expected, found in zip(*results, strict=True):
        agree(found, expected)


@dtypes
@pytest.mark.parametrize("batch, heads, length, width", [(64, 4, 340, 64), (86, 8, 126, 64), (7, 2, 9, 12)])
@pytest.mark.parametrize("tokens", [1, 2])
def test_cached_attention(dtype: torch.dtype, batch: int, heads: int, length: int, width: int, tokens: int):
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3 * heads * width).to(dtype)
    caches = torch.randn(2, batch, 3, heads, length, width).to(dtype)
    filled = torch.randint(length - tokens + 1, (batch,))
    filled[:4] = torch.tensor([0, 1, length - tokens, length + 3])  # the last of them does not fit
    on_device, filled_cuda = caches.cuda(), filled.cuda()
    found = attention.cached_attention(qkv.cuda(), on_device[0, :, 1], on_device[1, :, 1], filled_cuda)
    expected = attention.cached_attention(qkv, caches[0, :, 1], caches[1, :, 1], filled)
    agree(found, expected, 2e-5 if dtype == torch.float32 else HALF)
    assert torch.equal(on_device.cpu(), caches)


@dtypes
@pytest.mark.parametrize("rows, features", [(5, 12), (64, 256), (172, 512), (21760, 256), (4032, 512)])
@pytest.mark.parametrize("dropped", [False, True])
def test_residual_norm(dtype: torch.dtype, rows: int, features: int, dropped: bool):
    torch.manual_seed(0)
    x, grad_sum = torch.randn(2, rows, features)
    y, grad = torch.randn(2, rows, features).to(dtype)
    weight, bias = torch.rand(features) + 0.5, torch.randn(features)
    word = seed_word(torch.rand(())) if dropped else None
    word_cuda = None if word is None else word.cuda()
    for add in (y, None):
        cuda = residual_norm.residual_norm_forward(*on_gpu(x, add, weight, bias), EPS, dtype, 0.1, word_cuda)
        plain = residual_norm.residual_norm_forward(x, add, weight, bias, EPS, dtype, 0.1, word)
        agree(cuda[0], plain[0])
        agree(cuda[1], plain[1], 2e-5 if dtype == torch.float32 else HALF)
    for more in (grad_sum, None):
        cuda = residual_norm.residual_norm_backward(
            *on_gpu(more, grad, x, weight), EPS, dtype, 0.1, word_cuda
        )
        plain = residual_norm.residual_norm_backward(more, grad, x, weight, EPS, dtype, 0.1, word)
        for found, expected in zip(cuda, plain, strict=True):
            agree(found, expected, HALF if found.dtype == torch.bfloat16 else 2e-5)


@dtypes
@pytest.mark.parametrize("batch, tokens, heads, width", [(4, 340, 4, 64), (3, 126, 8, 64), (2, 9, 2, 12)])
def test_causal_attention(dtype: torch.dtype, batch: int, tokens: int, heads: int, width: int):
    torch.manual_seed(0)
    inputs = torch.randn(batch, tokens, 3 * heads * width).to(dtype)
    grad, word = torch.randn(batch, tokens, heads * width).to(dtype), seed_word(torch.rand(()))
    results = []
    for device in ("cpu", "cuda"):
        qkv = inputs.to(device, copy=True).requires_grad_()
        y = attention.causal_attention(qkv, heads, 0.1, word.to(device))
        y.backward(grad.to(device))
        results.append((y.detach(), qkv.grad))
    for expected, found in zip(*results, strict=True):
        agree(found, expected, 2e-5 if dtype == torch.float32 else HALF)


@torch.no_grad()
def test_cached_steps_of_a_transformer():
    torch.manual_seed(0)
    model, x = Transformer(dim=256, layers=3, heads=4, length=40), torch.randn(5, 40, 256)
    whole = model(x)
    model, found = model.cuda(), []
    use_fast_path(True, model)
    state = model.init_state(5)
    for part in x.cuda().split([15, 2, *[1] * 15, 2, *[1] * 6], 1):
        hidden, state = model.step(part, state)
        found.append(hidden)
    agree(torch.cat(found, 1), whole, 1e-4)
