"""On a GPU: every Triton kernel gives the numbers of its plain torch definition."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.nn.fast_path import fast_path
from rl_lab.components.nn.kernels import (
    add_bias,
    group_norm_silu,
    images,
    latent,
    norm_activate,
    norm_silu,
    recurrence,
    recurrent,
)
from rl_lab.components.nn.seeded_dropout import causal_softmax_dropout, seeded_dropout

pytestmark = pytest.mark.gpu

EPS = 1e-4


def agree(cuda: torch.Tensor, cpu: torch.Tensor) -> None:
    error = (cuda.cpu().float() - cpu.float()).abs().max()
    assert error <= 2e-5 * max(1.0, float(cpu.float().abs().max())), float(error)


def on_gpu(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


@pytest.mark.parametrize("rows, features", [(5, 12), (33, 64), (16, 2048), (5000, 256)])
@pytest.mark.parametrize("bias", ["none", "vector", "rows"])
def test_norm_silu(rows: int, features: int, bias: str):
    x, grad, weight = torch.randn(rows, features), torch.randn(rows, features), torch.rand(features) + 0.5
    b = {"none": None, "vector": torch.randn(features), "rows": torch.randn(rows, features)}[bias]
    agree(
        norm_silu.norm_silu_forward(*on_gpu(x, b, weight), EPS),
        norm_silu.norm_silu_forward(x, b, weight, EPS),
    )
    cuda = norm_silu.norm_silu_backward(*on_gpu(grad, x, b, weight), EPS)
    for found, expected in zip(cuda, norm_silu.norm_silu_backward(grad, x, b, weight, EPS)):
        agree(found, expected)
    wide = torch.zeros(rows, 2 * features)
    wide_cuda = wide.cuda()
    norm_silu.norm_silu_input_gradient(*on_gpu(grad, x, b, weight), EPS, wide_cuda[:, features:])
    norm_silu.norm_silu_input_gradient(grad, x, b, weight, EPS, wide[:, features:])
    agree(wide_cuda, wide)


@pytest.mark.parametrize("batch, blocks, width, hidden", [(3, 2, 6, 5), (16, 8, 256, 256)])
@pytest.mark.parametrize("kept", [True, False])
def test_recurrent_pieces(batch: int, blocks: int, width: int, hidden: int, kept: bool):
    whole = blocks * width
    deter, from_stoch = torch.randn(batch, whole), torch.randn(batch, hidden)
    from_deter = torch.randn(batch, 2 * hidden)[:, hidden:]
    keep = (torch.rand(batch) < 0.7).float()
    vectors = [torch.randn(hidden), torch.rand(hidden) + 0.5, torch.randn(hidden), torch.rand(hidden) + 0.5]
    weights = recurrent.EnterWeights(*vectors, EPS)
    weights_cuda = recurrent.EnterWeights(*(v.cuda() for v in vectors), EPS)
    mask = keep if kept else None
    agree(
        recurrent.enter(*on_gpu(deter, from_deter, from_stoch, mask), weights_cuda, blocks, torch.float32),
        recurrent.enter(deter, from_deter, from_stoch, mask, weights, blocks, torch.float32),
    )
    grad = torch.randn(blocks, batch, width + 2 * hidden)
    out, out_cuda = torch.zeros(batch, 2 * hidden), torch.zeros(batch, 2 * hidden).cuda()
    agree(
        recurrent.enter_backward(
            *on_gpu(grad, from_deter, from_stoch, keep), weights_cuda, out_cuda[:, :hidden]
        ),
        recurrent.enter_backward(grad, from_deter, from_stoch, keep, weights, out[:, :hidden]),
    )
    agree(out_cuda, out)
    (y, g), action = torch.randn(2, blocks, batch, width), torch.randn(batch, whole)
    norm = torch.rand(whole) + 0.5
    agree(recurrent.mix(*on_gpu(y, action, norm), EPS), recurrent.mix(y, action, norm, EPS))
    agree(
        recurrent.mix_backward(*on_gpu(g, y, action, norm), EPS),
        recurrent.mix_backward(g, y, action, norm, EPS),
    )
    raw, bias = torch.randn(blocks, batch, 3 * width), torch.randn(blocks, 1, 3 * width)
    for found, expected in zip(
        recurrent.gates(*on_gpu(raw, bias, deter, mask)), recurrent.gates(raw, bias, deter, mask)
    ):
        agree(found, expected)
    outside, product, carry = (
        torch.randn(batch, 3, whole)[:, 1],
        torch.randn(batch, whole),
        torch.randn(batch, whole),
    )
    after = (None, None, None) if kept else (carry, grad, keep.flip(0))
    arguments = (raw, bias, deter, keep, outside, product, *after)
    for found, expected in zip(
        recurrent.gates_backward(*on_gpu(*arguments)), recurrent.gates_backward(*arguments)
    ):
        agree(found, expected)


@pytest.mark.parametrize("batch, variables, classes", [(3, 3, 5), (16, 32, 16), (1024, 32, 64)])
def test_latents(batch: int, variables: int, classes: int):
    logits, bias = torch.randn(batch, variables * classes), torch.randn(variables * classes)
    noise = torch.rand(batch, 2, variables)[:, 1]
    probs, sample = latent.sample_latent(logits, bias, noise, 0.01)
    probs_cuda, sample_cuda = latent.sample_latent(*on_gpu(logits, bias, noise), 0.01)
    agree(probs_cuda, probs)
    # A border of the cumulative distribution may round to the other side of the noise.
    assert (sample_cuda.cpu() != sample).float().mean() < 1e-4
    assert (sample_cuda.view(batch, variables, classes).sum(-1) == 1).all()
    g_probs, g_sample = torch.randn(batch, variables, classes), torch.randn(batch, variables * classes)
    for product in (None, torch.randn(batch, variables * classes)):
        agree(
            latent.sample_latent_backward(*on_gpu(probs, g_probs, g_sample, product), 0.01, torch.float32),
            latent.sample_latent_backward(probs, g_probs, g_sample, product, 0.01, torch.float32),
        )


@pytest.mark.parametrize("channels", [3, 32, 48])
@pytest.mark.parametrize("folded_in", [True, False])
@pytest.mark.parametrize("folded_out", [True, False])
def test_pooling(channels: int, folded_in: bool, folded_out: bool):
    shape = (3, 4, 6, 4 * channels) if folded_in else (3, 8, 12, channels)
    x = (torch.randn(shape) * 2).round() / 2  # many equal values: the first of them takes the gradient
    inputs = [x, torch.randn(channels), torch.rand(channels) + 0.5]
    results = []
    for device in ("cpu", "cuda"):
        tensors = [tensor.detach().to(device).requires_grad_() for tensor in inputs]
        y = images.PoolNormSiLU.apply(*tensors, EPS, folded_in, folded_out)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape))
        results.append([y.detach(), *(tensor.grad for tensor in tensors)])
    for expected, found in zip(*results):
        agree(found, expected)


@pytest.mark.parametrize("channels", [3, 32, 48])
def test_unfolding(channels: int):
    inputs = [torch.randn(3, 4, 6, 4 * channels), torch.randn(channels), torch.rand(channels) + 0.5]
    results = []
    for device in ("cpu", "cuda"):
        tensors = [tensor.detach().to(device).requires_grad_() for tensor in inputs]
        y = images.UnfoldNormSiLU.apply(*tensors, EPS)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape))
        results.append([y.detach(), *(tensor.grad for tensor in tensors)])
    for expected, found in zip(*results):
        agree(found, expected)


@pytest.mark.parametrize("rows, steps", [(3, 4), (1024, 15), (16, 63)])
def test_recurrence(rows: int, steps: int):
    base, gain, final = torch.randn(rows, steps), torch.rand(rows, steps), torch.randn(rows)
    with torch.no_grad():
        agree(
            recurrence.reverse_recurrence(*on_gpu(base, gain, final)),
            recurrence.reverse_recurrence(base, gain, final),
        )


@pytest.mark.parametrize("members, rows, features", [(1, 5, 24), (5, 768, 512), (1, 8192, 512), (2, 33, 256)])
@pytest.mark.parametrize("activation", ["mish", "simnorm"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_norm_activate(members: int, rows: int, features: int, activation: str, with_bias: bool):
    x, grad = torch.randn(2, members, rows, features)
    bias = torch.randn(members, features) if with_bias else None
    scale, shift = torch.rand(members, features) + 0.5, torch.randn(members, features)
    settings = (1e-5, activation, 8)
    agree(
        norm_activate.norm_activate_forward(*on_gpu(x, bias, scale, shift), *settings),
        norm_activate.norm_activate_forward(x, bias, scale, shift, *settings),
    )
    cuda = norm_activate.norm_activate_backward(*on_gpu(grad, x, bias, scale, shift), *settings)
    for found, expected in zip(
        cuda, norm_activate.norm_activate_backward(grad, x, bias, scale, shift, *settings)
    ):
        agree(found, expected)


@pytest.mark.parametrize(
    "pictures, places, channels, groups",
    [(3, 25, 8, 4), (640, 256, 64, 32), (2, 4096, 64, 32), (86, 64, 128, 32)],
)
@pytest.mark.parametrize("silu", [False, True])
def test_group_norm(pictures: int, places: int, channels: int, groups: int, silu: bool):
    x, grad = torch.randn(2, pictures, places, channels)
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    forward, backward = group_norm_silu.group_norm_forward, group_norm_silu.group_norm_backward
    for pre in (None, torch.randn(channels)):
        found, moments = forward(*on_gpu(x, pre, weight, bias), groups, 1e-5, silu)
        expected, known = forward(x, pre, weight, bias, groups, 1e-5, silu)
        agree(found, expected)
        agree(moments, known)
        cuda = backward(*on_gpu(grad, x, pre, known, weight, bias), silu)
        for ours, theirs in zip(cuda, backward(grad, x, pre, known, weight, bias, silu)):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                agree(ours, theirs)


def test_add_bias():
    x, y = torch.randn(2, 5, 6, 4, 3).unbind(0)
    x, y = (value.contiguous(memory_format=torch.channels_last) for value in (x, y))
    bias = torch.randn(6)
    agree(add_bias.add_bias_forward(*on_gpu(x, y, bias)), add_bias.add_bias_forward(x, y, bias))


def test_dropout_and_causal_softmax():
    seed, x = torch.rand(()), torch.randn(3, 700)
    with fast_path():
        agree(seeded_dropout(x.cuda(), 0.3, seed.cuda()), seeded_dropout(x, 0.3, seed))
        grads = []
        weight = torch.randn(2, 3, 37, 37)
        for device in ("cpu", "cuda"):
            scores = torch.randn(2, 3, 37, 37, generator=torch.Generator().manual_seed(0)).to(device)
            scores.requires_grad_()
            y = causal_softmax_dropout(scores, 0.7, 0.2, seed.to(device))
            (y * weight.to(device)).sum().backward()
            grads.append((y.detach(), scores.grad))
    for plain, fused in zip(*grads):
        agree(fused, plain)
