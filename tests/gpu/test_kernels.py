"""On a GPU: Triton kernels agree with their plain torch forms."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.kernels import (
    add_bias,
    block_gru,
    group_norm_silu,
    norm_activate,
    norm_silu,
    pool_norm_silu,
    sampling,
    upsample2x,
)
from rl_lab.components.kernels.reverse_scan import reverse_scan
from rl_lab.components.kernels.topk import topk
from rl_lab.components.kernels.two_hot import two_hot_return
from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.components.nn.two_hot import TwoHot
from tests.gpu.kernel_case import EPS, HALF, agree, dtypes, on_gpu

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows, features", [(5, 12), (33, 64), (16, 2048), (5000, 256), (70000, 16)])
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
def test_block_gru(batch: int, blocks: int, width: int, hidden: int, kept: bool):
    whole = blocks * width
    deter, from_stoch = torch.randn(batch, whole), torch.randn(batch, hidden)
    from_deter = torch.randn(batch, 2 * hidden)[:, hidden:]
    keep = (torch.rand(batch) < 0.7).float()
    vectors = [torch.randn(hidden), torch.rand(hidden) + 0.5, torch.randn(hidden), torch.rand(hidden) + 0.5]
    weights = block_gru.EnterWeights(*vectors, EPS)
    weights_cuda = block_gru.EnterWeights(*(v.cuda() for v in vectors), EPS)
    mask = keep if kept else None
    agree(
        block_gru.enter(*on_gpu(deter, from_deter, from_stoch, mask), weights_cuda, blocks, torch.float32),
        block_gru.enter(deter, from_deter, from_stoch, mask, weights, blocks, torch.float32),
    )
    grad = torch.randn(blocks, batch, width + 2 * hidden)
    out, out_cuda = torch.zeros(batch, 2 * hidden), torch.zeros(batch, 2 * hidden).cuda()
    agree(
        block_gru.enter_backward(
            *on_gpu(grad, from_deter, from_stoch, keep), weights_cuda, out_cuda[:, :hidden]
        ),
        block_gru.enter_backward(grad, from_deter, from_stoch, keep, weights, out[:, :hidden]),
    )
    agree(out_cuda, out)
    (y, g), action = torch.randn(2, blocks, batch, width), torch.randn(batch, whole)
    norm = torch.rand(whole) + 0.5
    agree(block_gru.mix(*on_gpu(y, action, norm), EPS), block_gru.mix(y, action, norm, EPS))
    agree(
        block_gru.mix_backward(*on_gpu(g, y, action, norm), EPS),
        block_gru.mix_backward(g, y, action, norm, EPS),
    )
    raw, bias = torch.randn(blocks, batch, 3 * width), torch.randn(blocks, 1, 3 * width)
    for found, expected in zip(
        block_gru.gates(*on_gpu(raw, bias, deter, mask)), block_gru.gates(raw, bias, deter, mask)
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
        block_gru.gates_backward(*on_gpu(*arguments)), block_gru.gates_backward(*arguments)
    ):
        agree(found, expected)


@pytest.mark.parametrize("batch, variables, classes", [(3, 3, 5), (16, 32, 16), (1024, 32, 64)])
def test_categorical_sample(batch: int, variables: int, classes: int):
    logits, bias = torch.randn(batch, variables * classes), torch.randn(variables * classes)
    noise = torch.rand(batch, 2, variables)[:, 1]
    probs, sample = sampling.categorical_sample(logits, bias, noise, 0.01)
    probs_cuda, sample_cuda = sampling.categorical_sample(*on_gpu(logits, bias, noise), 0.01)
    agree(probs_cuda, probs)
    # A border of the cumulative distribution may round to the other side of the noise.
    assert (sample_cuda.cpu() != sample).float().mean() < 1e-4
    assert (sample_cuda.view(batch, variables, classes).sum(-1) == 1).all()
    whole = variables * classes
    g_sample = torch.randn(batch, 2, whole + 3)[:, 1, 3:]  # rows apart, as the features of a dream have them
    for g_probs in (None, torch.randn(batch, variables, classes)):
        for product in (None, torch.randn(batch, whole)):
            gradients = (probs, g_probs, g_sample, product)
            agree(
                sampling.categorical_sample_backward(*on_gpu(*gradients), 0.01, torch.float32),
                sampling.categorical_sample_backward(*gradients, 0.01, torch.float32),
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
        y = pool_norm_silu.PoolNormSiLU.apply(*tensors, EPS, folded_in, folded_out)
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
        y = pool_norm_silu.UnfoldNormSiLU.apply(*tensors, EPS)
        y.backward(torch.linspace(-1, 1, y.numel(), device=device).view(y.shape))
        results.append([y.detach(), *(tensor.grad for tensor in tensors)])
    for expected, found in zip(*results):
        agree(found, expected)


@pytest.mark.parametrize("rows, steps", [(3, 4), (1024, 15), (16, 63)])
def test_reverse_scan(rows: int, steps: int):
    base, gain, final = torch.randn(rows, steps), torch.rand(rows, steps), torch.randn(rows)
    with torch.no_grad():
        agree(
            reverse_scan(*on_gpu(base, gain, final)),
            reverse_scan(base, gain, final),
        )


@pytest.mark.parametrize("members, rows, features", [(1, 5, 24), (5, 768, 512), (1, 8192, 512), (2, 33, 256)])
@pytest.mark.parametrize("activation", ["mish", "simnorm", "silu", "elu"])
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


@pytest.mark.parametrize("activation", ["mish", "simnorm", "silu", "elu"])
@pytest.mark.parametrize("rows", [7, 1000])
def test_norm_activate_shared_in_place_and_apart(activation: str, rows: int):
    """One norm for all groups of rows, each with its own bias; written over the input, and into a wider table."""
    x, bias = torch.randn(6, rows, 512), torch.randn(6, 512)
    scale, shift = torch.rand(1, 512) + 0.5, torch.randn(1, 512)
    settings = (1e-5, activation, 8)
    expected = norm_activate.norm_activate_forward(x, bias, scale, shift, *settings)
    cuda = on_gpu(x, bias, scale, shift)
    wide = torch.zeros(6, rows, 560, device="cuda")
    norm_activate.norm_activate_forward(*cuda, *settings, wide[..., :512])
    agree(wide[..., :512], expected)
    assert not wide[..., 512:].any()
    norm_activate.norm_activate_forward(*cuda, *settings, cuda[0])
    agree(cuda[0], expected)


@pytest.mark.parametrize(
    "rows, length, count", [(1, 512, 64), (16, 512, 64), (3, 50, 7), (2, 33, 1), (2, 64, 64)]
)
def test_topk(rows: int, length: int, count: int):
    values = torch.randn(rows, length)
    values[:, 3] = values[:, 5]
    values[0, :4] = -1e9
    best, index = topk(values.cuda(), count, fast=True)
    assert torch.equal(best.cpu(), torch.topk(values, count, dim=1).values)
    assert torch.equal(values.gather(1, index.cpu()), best.cpu())
    assert all(len(set(row.tolist())) == count for row in index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps, rows, bins", [(3, 8192, 101), (1, 5, 21)])
def test_two_hot_return(steps: int, rows: int, bins: int, dtype: torch.dtype):
    rewards = torch.randn(steps, rows, bins + 3).to(dtype)[..., :bins]
    values = torch.randn(2, rows, bins + 3).to(dtype)[..., :bins]
    rewards[0, 2, 0] = float("nan")
    centers, weight = torch.linspace(-10.0, 10.0, bins), torch.rand(rows, steps + 1)
    for bias in (None, torch.randn(2, bins).to(dtype)):
        found = two_hot_return(*on_gpu(rewards, values, bias, centers, weight), -1e9)
        expected = two_hot_return(rewards, values, bias, centers, weight, -1e9)
        assert found[2] == -1e9 and expected[2] == -1e9
        found[2] = expected[2] = 0.0
        agree(found, expected)


@dtypes
@pytest.mark.parametrize(
    "bins, shape", [(255, (1024, 16)), (255, (16, 64)), (255, (5,)), (41, (3, 2, 2)), (3, ())]
)
def test_two_hot_mean(bins: int, shape: tuple[int, ...], dtype: torch.dtype):
    torch.manual_seed(0)
    two_hot, logits = TwoHot(bins), (torch.randn(*shape, bins) * 3.0).to(dtype)
    expected, zero = two_hot.mean(logits), torch.full((*shape, bins), 1.7).to(dtype)
    two_hot, logits = two_hot.cuda(), logits.cuda()
    use_fast_path(True, two_hot)
    found = two_hot.mean(logits)
    assert found.shape == shape and found.dtype == torch.float32
    agree(found, expected)
    if shape:
        agree(two_hot.mean(logits[1:-1]), expected[1:-1])
    if len(shape) > 1:
        agree(two_hot.mean(logits[:, :-1]), expected[:, :-1])
    assert torch.equal(two_hot.mean(zero.cuda()).cpu(), torch.zeros(shape))
    # Where a gradient is wanted, there is one.
    logits.requires_grad_()
    assert two_hot.mean(logits).requires_grad
    with torch.no_grad():
        agree(two_hot.mean(logits), expected)


@dtypes
@pytest.mark.parametrize(
    "bins, shape", [(255, (1024, 15)), (255, (16, 63)), (255, (7, 1)), (255, (9,)), (41, (3, 4, 2)), (3, ())]
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("sliced", [True, False])
def test_two_hot_loss(bins: int, shape: tuple[int, ...], count: int, sliced: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    two_hot, sliced = TwoHot(bins), sliced and len(shape) > 1
    use_fast_path(True, two_hot)
    wide = (shape[0], shape[1] + 1, *shape[2:]) if sliced else shape
    inputs, weight = (torch.randn(*wide, bins) * 3.0).to(dtype), torch.randn(shape)
    ends = torch.tensor([0.0, 1e12, -1e12, float("inf"), *two_hot.bins[[0, 1, bins // 2 + 1, -2, -1]]])
    # The last axis is read at one place: targets lie apart, as a slice of a batch does.
    special, common = ends[torch.randint(len(ends), (*shape, 2))], torch.randn(*shape, 2) * 100.0
    targets = [torch.where(torch.rand(*shape, 2) < 0.5, special, common), common][:count]
    results = []
    for device in ("cpu", "cuda"):
        two_hot, logits = two_hot.to(device), inputs.to(device, copy=True).requires_grad_()
        loss = two_hot.loss(logits[:, :-1] if sliced else logits, *(t.to(device)[..., 1] for t in targets))
        assert loss.shape == shape and loss.dtype == torch.float32
        # Two gradients of the loss: one that lies as the loss does, and one number for all.
        loss.backward(weight.to(device), retain_graph=True)
        (even,) = torch.autograd.grad(loss.sum(), logits)
        results.append((loss.detach(), logits.grad, even))
    for expected, found in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        agree(found, expected, 2e-5 if found.dtype == torch.float32 else HALF)


def test_two_hot_loss_of_what_is_no_number():
    two_hot, logits, nan = TwoHot().cuda(), torch.zeros(3, 255, device="cuda"), float("nan")
    logits[1, 4] = nan
    use_fast_path(True, two_hot)
    loss = two_hot.loss(logits, torch.tensor([nan, 1.0, 2.0], device="cuda"))
    assert loss.isnan().tolist() == [True, True, False]
    assert two_hot.mean(logits).isnan().tolist() == [False, True, False]


@pytest.mark.parametrize(
    "pictures, places, channels, groups",
    [
        (3, 25, 8, 4),
        (640, 256, 64, 32),  # a whole picture in one program, as all small ones
        (300, 64, 256, 32),
        (2, 4096, 64, 32),  # in 64 parts
        (90, 4096, 32, 32),
        (70, 1100, 128, 32),  # in several tiles each, the last not full
        (5, 300, 512, 32),
    ],
)
@pytest.mark.parametrize("silu", [False, True])
def test_group_norm(pictures: int, places: int, channels: int, groups: int, silu: bool):
    x, grad, other = torch.randn(3, pictures, places, channels)
    weight, bias = torch.rand(channels) + 0.5, torch.randn(channels)
    forward, backward = group_norm_silu.group_norm_forward, group_norm_silu.group_norm_backward
    for pre in (None, torch.randn(channels)):
        found, moments = forward(*on_gpu(x, pre, weight, bias), groups, 1e-5, silu)
        expected, known = forward(x, pre, weight, bias, groups, 1e-5, silu)
        agree(found, expected)
        agree(moments, known)
        for beside in (None, other):
            cuda = backward(*on_gpu(grad, x, pre, known, weight, bias), silu, *on_gpu(beside))
            expected = backward(grad, x, pre, known, weight, bias, silu, beside)
            agree(cuda[0], expected[0])
            agree(cuda[1], expected[1])
            assert (cuda[2] is None) == (expected[2] is None) == (pre is None)
            if pre is not None:
                # A sum that is about 0 where a group is one channel: only its terms have a size.
                agree(cuda[2], expected[2], 2e-5 * (pictures * places) ** 0.5)


def test_group_norm_of_half_precision():
    for shape in ((70, 1100, 64), (30, 64, 256)):
        x, grad, beside = torch.randn(3, *shape).bfloat16()
        weight, bias, pre = torch.rand(shape[2]) + 0.5, torch.randn(shape[2]), torch.randn(shape[2])
        found, moments = group_norm_silu.group_norm_forward(*on_gpu(x, pre, weight, bias), 32, 1e-5, True)
        expected, known = group_norm_silu.group_norm_forward(x, pre, weight, bias, 32, 1e-5, True)
        assert found.dtype == torch.bfloat16
        agree(found, expected, HALF)
        agree(moments, known)
        given = (grad, x, pre, known, weight, bias)
        cuda = group_norm_silu.group_norm_backward(*on_gpu(*given), True, beside.cuda())
        gx, parameters, of_pre = group_norm_silu.group_norm_backward(*given, True, beside)
        agree(cuda[0], gx, HALF)
        agree(cuda[1], parameters)
        assert cuda[2] is not None and of_pre is not None
        agree(cuda[2], of_pre, 2e-5 * (shape[0] * shape[1]) ** 0.5)


@dtypes
@pytest.mark.parametrize("classes", [1, 2, 512, 1000])
def test_sample_logits(classes: int, dtype: torch.dtype):
    logits, noise = (torch.randn(3000, classes) * 3.0).to(dtype), torch.rand(3000, 2)
    found = sampling.sample_logits(logits.cuda(), noise.cuda()[:, 1], fast=True).cpu()
    probs = torch.softmax(logits.double(), -1)
    after = probs.cumsum(-1).gather(1, found[:, None])[:, 0]
    before = after - probs.gather(1, found[:, None])[:, 0]
    edge = 1e-5  # float32's sums, on either side of the border
    assert ((before - edge <= noise[:, 1]) & (noise[:, 1] <= after + edge)).all()


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (7, 16, 16, 64), (3, 4, 4, 6), (2, 8, 8, 4096)])
def test_upsample2x(shape: tuple[int, ...], dtype: torch.dtype):
    m, h, w, c = shape
    x, grad = torch.randn(shape).to(dtype), torch.randn(m, 2 * h, 2 * w, c).to(dtype)
    assert torch.equal(upsample2x.upsample2x_forward(x.cuda()).cpu(), upsample2x.upsample2x_forward(x))
    agree(upsample2x.upsample2x_backward(grad.cuda()), upsample2x.upsample2x_backward(grad), HALF)


def test_add_bias():
    x, y = torch.randn(2, 5, 6, 4, 3).unbind(0)
    x, y = (value.contiguous(memory_format=torch.channels_last) for value in (x, y))
    bias = torch.randn(6)
    agree(add_bias.add_bias_forward(*on_gpu(x, y, bias)), add_bias.add_bias_forward(x, y, bias))
