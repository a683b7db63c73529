"""Triton kernels against their plain forms, on the CPU in Triton's interpreter (`make test-extras`).

Tensors here are not CUDA tensors: a public function computes its plain form, so a kernel's launcher is called directly.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from rl_lab.components import kernels
from rl_lab.components.kernels import (
    add_bias,
    attention,
    block_gru,
    dropout,
    group_norm_silu,
    norm_activate,
    norm_silu,
    pool_norm_silu,
    residual_norm,
    reverse_scan,
    sampling,
    topk,
    two_hot,
    upsample2x,
)
from rl_lab.components.kernels.triton_jit import next_power_of_2
from rl_lab.components.nn import optim

# Elements beyond a mask are computed and not stored.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

EPS = 1e-4
# Kernels that the interpreter cannot run, with the reason
NOT_RUN: dict[str, str] = {}
TESTED: set[str] = set()
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
# The interpreter holds bfloat16 as bits: it rounds towards zero, and can neither multiply matrices of it nor cast to it
# from a comparison. Kernels that do so are tested in float16.
halves = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


def launches(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test of these kernels. `only_named_kernels` checks that it launches them and no others."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.update(names)
        test.kernels = set(names)  # type: ignore[attr-defined]
        return pytest.mark.extras(test)

    return mark


@pytest.fixture(autouse=True)
def only_named_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    expected = getattr(request.function, "kernels", None)
    if expected is None:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    launched = set()
    run = InterpretedFunction.run

    def record(kernel, *args, **kwargs):
        launched.add(kernel.fn.__name__)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", record)
    yield
    assert launched == expected


def agree(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Equal but for rounding, relative to the largest element."""
    assert found.shape == expected.shape and found.dtype == expected.dtype
    tolerance = TOLERANCE.get(expected.dtype, tolerance)
    error = (found.float() - expected.float()).abs().max()
    assert error <= tolerance * max(1.0, float(expected.float().abs().max())), float(error)


def all_agree(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for one, other in zip(found, expected, strict=True):
        agree(one, other)


def test_every_kernel_is_tested_here():
    launched = set()
    for path in [*Path(kernels.__path__[0]).glob("*.py"), Path(optim.__file__)]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value))
    assert len(launched) > 30
    assert launched == TESTED | set(NOT_RUN)


# ---------------------------------------------------------------- elementwise operations, images


@dtypes
@launches("_add_bias_kernel")
def test_add_bias(dtype: torch.dtype):
    x, y = torch.randn(2, 5, 6, 4, 3).to(dtype).unbind(0)
    x, y = (value.contiguous(memory_format=torch.channels_last) for value in (x, y))
    bias = torch.randn(6)
    agree(add_bias._add_bias_cuda(x, y, bias), add_bias.add_bias_forward(x, y, bias))


@dtypes
@launches("_dropout_kernel")
def test_dropout(dtype: torch.dtype):
    x, word = torch.randn(3, 700).to(dtype).requires_grad_(), torch.tensor(123456789)
    y = dropout.SeededDropout.apply(x, 0.3, word)
    y.backward(torch.ones_like(y))
    mask = dropout.kept((3, 700), 0.3, word)
    agree(y.detach(), (x.detach().float() * mask).to(dtype))
    agree(x.grad, mask.to(dtype))
    assert torch.equal(x.grad == 0.0, mask == 0.0)


@dtypes
@launches("_upsample_kernel", "_upsample_backward_kernel")
def test_upsample2x(dtype: torch.dtype):
    x, grad = torch.randn(2, 3, 5, 8).to(dtype), torch.randn(2, 6, 10, 8).to(dtype)
    assert torch.equal(upsample2x._upsample_cuda(x), upsample2x.upsample2x_forward(x))
    agree(upsample2x._upsample_backward_cuda(grad), upsample2x.upsample2x_backward(grad))


@pytest.mark.parametrize("folded_in", [True, False])
@pytest.mark.parametrize("folded_out", [True, False])
@launches("_pool_kernel")
def test_pool_norm_silu(folded_in: bool, folded_out: bool):
    shape = (3, 4, 6, 12) if folded_in else (3, 8, 12, 3)
    x = (torch.randn(shape) * 2).round() / 2  # many equal values: the first of them gets the gradient
    x, bias, weight = (value.requires_grad_() for value in (x, torch.randn(3), torch.rand(3) + 0.5))
    expected = pool_norm_silu.PoolNormSiLU.apply(x, bias, weight, EPS, folded_in, folded_out)
    grad = torch.randn(expected.shape)
    gx, gbias, gweight = torch.autograd.grad(expected, (x, bias, weight), grad)
    with torch.no_grad():
        settings = (x, bias, weight, EPS, folded_in, folded_out)
        agree(pool_norm_silu._pool_norm_silu_cuda(*settings), expected.detach())
        found = pool_norm_silu._pool_norm_silu_backward_cuda(grad, *settings)
    all_agree(found, (gx, gweight, gbias))


@launches("_unfold_kernel")
def test_unfold_norm_silu():
    inputs = (torch.randn(3, 4, 6, 12), torch.randn(3), torch.rand(3) + 0.5)
    x, bias, weight = (value.requires_grad_() for value in inputs)
    expected = pool_norm_silu.UnfoldNormSiLU.apply(x, bias, weight, EPS)
    grad = torch.randn(expected.shape)
    gx, gbias, gweight = torch.autograd.grad(expected, (x, bias, weight), grad)
    with torch.no_grad():
        agree(pool_norm_silu._unfold_norm_silu_cuda(x, bias, weight, EPS), expected.detach())
        found = pool_norm_silu._unfold_norm_silu_backward_cuda(grad, x, bias, weight, EPS)
    all_agree(found, (gx, gweight, gbias))


# ---------------------------------------------------------------- norms


@pytest.fixture
def several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of 4 rows, of which two share a backward pass: as with thousands of rows."""
    for module in (residual_norm, norm_activate):
        monkeypatch.setattr(module, "row_tiles", lambda rows, features: (next_power_of_2(features), 4, 4))
    for module in (residual_norm, norm_activate, norm_silu):
        monkeypatch.setattr(module, "PARTIALS", 2)


def compare_residual_norm(dtype: torch.dtype, rows: int, features: int, word: torch.Tensor | None) -> None:
    x, grad_sum = torch.randn(2, rows, features)
    y, grad = torch.randn(2, rows, features).to(dtype)
    weight, bias = torch.rand(features) + 0.5, torch.randn(features)
    last = (EPS, dtype, 0.1, word)
    for add, other in ((y, grad_sum), (None, None)):
        found = residual_norm._residual_norm_cuda(x, add, weight, bias, *last)
        all_agree(found, residual_norm.residual_norm_forward(x, add, weight, bias, *last))
        found = residual_norm._residual_norm_backward_cuda(other, grad, x, weight, *last)
        all_agree(found, residual_norm.residual_norm_backward(other, grad, x, weight, *last))


@dtypes
@launches("_residual_norm_kernel", "_residual_norm_backward_kernel")
def test_residual_norm(dtype: torch.dtype):
    compare_residual_norm(dtype, 5, 12, None)


@dtypes
@launches("_residual_norm_kernel", "_residual_norm_backward_kernel")
def test_residual_norm_with_dropout_and_several_rows(dtype: torch.dtype, several_rows):
    compare_residual_norm(dtype, 21, 12, torch.tensor(987654321))


def compare_norm_silu(rows: int, features: int, bias: torch.Tensor | None) -> None:
    x, grad = torch.randn(2, rows, features)
    given = (x, bias, torch.rand(features) + 0.5, EPS)
    agree(norm_silu._norm_silu_cuda(*given), norm_silu.norm_silu_forward(*given))
    found = norm_silu._norm_silu_backward_cuda(grad, *given)
    all_agree(found, norm_silu.norm_silu_backward(grad, *given))
    wide, expected = torch.zeros(2, rows, 2 * features)
    norm_silu._norm_silu_backward_cuda(grad, *given, wide[:, features:], parameters=False)
    norm_silu.norm_silu_input_gradient(grad, *given, expected[:, features:])
    agree(wide, expected)


@pytest.mark.parametrize("shape", [None, (12,), (5, 12)], ids=["none", "vector", "rows"])
@launches("_norm_silu_kernel", "_norm_silu_backward_kernel", "_sum_partials_kernel")
def test_norm_silu(shape: tuple[int, ...] | None):
    compare_norm_silu(5, 12, None if shape is None else torch.randn(shape))


@launches("_norm_silu_kernel", "_norm_silu_backward_kernel", "_sum_partials_kernel")
def test_norm_silu_of_several_rows(several_rows):
    compare_norm_silu(4100, 128, torch.randn(128))  # 4097 rows or more: 16 of them a program


def compare_norm_activate(rows: int, activation: str, with_bias: bool) -> None:
    members, features = 2, 24
    x, grad = torch.randn(2, members, rows, features)
    bias = torch.randn(members, features) if with_bias else None
    scale, shift = torch.rand(members, features) + 0.5, torch.randn(members, features)
    last = (EPS, activation, 8)
    forward, launch = norm_activate.norm_activate_forward, norm_activate._norm_activate_cuda
    agree(launch(x, bias, scale, shift, *last), forward(x, bias, scale, shift, *last))
    found = norm_activate._norm_activate_backward_cuda(grad, x, bias, scale, shift, *last)
    all_agree(found, norm_activate.norm_activate_backward(grad, x, bias, scale, shift, *last))
    # One scale for all members, and a strided result
    shared = (x, bias, scale[:1], shift[:1], *last)
    wide = torch.zeros(members, rows, features + 3)
    launch(*shared, wide[..., :features])
    agree(wide[..., :features], forward(*shared))
    assert not wide[..., features:].any()


@pytest.mark.parametrize("activation", ["mish", "simnorm", "silu", "elu"])
@pytest.mark.parametrize("with_bias", [False, True])
@launches("_norm_activate_kernel", "_norm_activate_backward_kernel")
def test_norm_activate(activation: str, with_bias: bool):
    compare_norm_activate(5, activation, with_bias)


@pytest.mark.parametrize("activation", ["mish", "simnorm", "silu", "elu"])
@launches("_norm_activate_kernel", "_norm_activate_backward_kernel")
def test_norm_activate_of_several_rows(activation: str, several_rows):
    compare_norm_activate(21, activation, True)


WHOLE_IMAGE = {"_forward_image_kernel", "_backward_image_kernel"}
SPLIT_IMAGE = {
    "_forward_sums_kernel", "_forward_result_kernel", "_backward_sums_kernel", "_backward_result_kernel"
}  # fmt: skip


def compare_group_norm(images: int, pixels: int, channels: int, groups: int, dtype: torch.dtype) -> None:
    x, grad, other = torch.randn(3, images, pixels, channels).to(dtype)
    weight, bias, pre = torch.rand(channels) + 0.5, torch.randn(channels), torch.randn(channels)
    for silu, before, residual in ((True, pre, other), (False, None, None), (True, None, other)):
        found = group_norm_silu._group_norm_cuda(x, before, weight, bias, groups, EPS, silu)
        expected = group_norm_silu.group_norm_forward(x, before, weight, bias, groups, EPS, silu)
        all_agree(found, expected)
        given = (grad, x, before, expected[1], weight, bias, silu, residual)
        gx, parameters, of_pre = group_norm_silu._group_norm_backward_cuda(*given)
        all_agree((gx, parameters), group_norm_silu.group_norm_backward(*given)[:2])
        assert (of_pre is None) == (before is None)
        if of_pre is not None:
            # A sum that is nearly 0: its error is that of its terms.
            expected_sum = group_norm_silu.group_norm_backward(*given)[2]
            agree(of_pre, expected_sum, 2e-5 * (images * pixels) ** 0.5)


@dtypes
@launches(*WHOLE_IMAGE)
def test_group_norm_of_small_images(dtype: torch.dtype):
    compare_group_norm(3, 25, 8, 4, dtype)


@dtypes
@pytest.mark.parametrize("enough, tiles", [(1024, 1), (1, 4)])
@launches(*SPLIT_IMAGE)
def test_group_norm_of_large_images(dtype: torch.dtype, enough: int, tiles: int, monkeypatch):
    """Split into parts of one tile, or of several where there are programs enough."""
    monkeypatch.setattr(group_norm_silu, "ENOUGH", enough)
    assert group_norm_silu._tiling(2, 300, 64, group_norm_silu.FORWARD_TILES)[1] == tiles
    compare_group_norm(2, 300, 64, 8, dtype)


# ---------------------------------------------------------------- attention


@dtypes
@pytest.mark.parametrize("tokens, length, width", [(1, 9, 12), (2, 9, 12), (2, 300, 4)])
@launches("_cached_attention_kernel")
def test_cached_attention(dtype: torch.dtype, tokens: int, length: int, width: int):
    batch, heads = 5, 2
    qkv = torch.randn(batch, tokens, 3 * heads * width).to(dtype)
    caches = torch.randn(2, batch, 3, heads, length, width).to(dtype)
    written = caches.clone()
    filled = torch.tensor([0, 1, length - tokens, length + 3, 4])  # one row has no room left
    found = attention._cached_attention_cuda(qkv, written[0, :, 1], written[1, :, 1], filled)
    agree(found, attention.cached_attention(qkv, caches[0, :, 1], caches[1, :, 1], filled))
    assert torch.equal(written, caches)


@launches("_move_heads_kernel")
def test_split_and_merge_heads():
    x = torch.randn(2, 70, 3 * 2 * 12)
    parts = attention.split_heads(x, 3, 2)
    assert torch.equal(attention._split_heads_cuda(x, 3, 2), parts)
    assert torch.equal(attention._merge_heads_cuda(parts, 2), x)


@dtypes
@launches("_softmax_kernel", "_softmax_backward_kernel")
def test_causal_softmax(dtype: torch.dtype):
    scores, grad = (torch.randn(2, 3, 9, 9) * 3.0).to(dtype)
    last = (0.3, 0.2, torch.tensor(5))
    agree(attention._softmax_cuda(scores, *last), attention._softmax(scores, *last))
    found = attention._softmax_backward_cuda(grad, scores, *last)
    agree(found, attention._softmax_backward(grad, scores, *last))


@pytest.mark.parametrize("tokens", [9, 70])
@launches("_tiled_attention_kernel", "_query_gradient_kernel", "_key_gradient_kernel")
def test_tiled_attention(tokens: int):
    """In float16."""
    inputs = torch.randn(2, tokens, 3 * 2 * 16).half()
    grad = torch.randn(2, tokens, 2 * 16).half()
    assert attention._tiles_fit(inputs, 2)
    results = []
    for function in (attention.TiledAttention, attention.CausalAttention):
        qkv = inputs.clone().requires_grad_()
        y = function.apply(qkv, 2, 0.1, torch.tensor(77))
        y.backward(grad)
        results.append((y.detach(), qkv.grad))
    all_agree(*results)


# ---------------------------------------------------------------- recurrent state


@dtypes
@launches(
    "_enter_kernel", "_enter_backward_kernel", "_mix_kernel", "_gates_kernel", "_gates_backward_kernel"
)  # fmt: skip
def test_block_gru(dtype: torch.dtype):
    batch, blocks, width, hidden = 3, 2, 6, 5
    size = blocks * width
    deter, keep = torch.randn(batch, size), torch.tensor([1.0, 0.0, 1.0])
    from_stoch = torch.randn(batch, hidden).to(dtype)
    from_deter = torch.randn(batch, 2 * hidden).to(dtype)[:, hidden:]
    vectors = (torch.randn(hidden), torch.rand(hidden) + 0.5, torch.randn(hidden), torch.rand(hidden) + 0.5)
    weights = block_gru.EnterWeights(*vectors, EPS)
    raw, bias = torch.randn(blocks, batch, 3 * width).to(dtype), torch.randn(blocks, 1, 3 * width)
    for mask in (keep, None):
        given = (deter, from_deter, from_stoch, mask, weights, blocks, dtype)
        agree(block_gru._enter_cuda(*given), block_gru.enter(*given))
        low, expected = torch.zeros(2, batch, size + 3).to(dtype)
        found = block_gru._gates_cuda(raw, bias, deter, mask, low[:, :size])
        all_agree(found, block_gru.gates(raw, bias, deter, mask, expected[:, :size]))
        assert not low[:, size:].any()
        all_agree(
            block_gru._gates_cuda(raw, bias, deter, mask, None), block_gru.gates(raw, bias, deter, mask)
        )

    grad = torch.randn(blocks, batch, width + 2 * hidden).to(dtype)
    wide, expected = torch.zeros(2, batch, 2 * hidden).to(dtype)
    given = (grad, from_deter, from_stoch, keep, weights)
    found = block_gru._enter_backward_cuda(*given, wide[:, :hidden])
    agree(found, block_gru.enter_backward(*given, expected[:, :hidden]))
    agree(wide, expected)

    y, g = torch.randn(2, blocks, batch, width).to(dtype)
    action, norm = torch.randn(batch, size).to(dtype), torch.rand(size) + 0.5
    found = block_gru._mix_cuda(y, y, action, norm, EPS, backward=False)
    agree(found, block_gru.mix(y, action, norm, EPS))
    found = block_gru._mix_cuda(g, y, action, norm, EPS, backward=True)
    agree(found, block_gru.mix_backward(g, y, action, norm, EPS))

    outside, product = torch.randn(batch, 3, size)[:, 1], torch.randn(batch, size).to(dtype)
    for after in ((None, None, None), (torch.randn(batch, size), grad, keep.flip(0))):
        given = (raw, bias, deter, keep, outside, product, *after)
        all_agree(block_gru._gates_backward_cuda(*given), block_gru.gates_backward(*given))


@launches("_reverse_scan_kernel")
def test_reverse_scan():
    base, gain, final = torch.randn(40, 5), torch.rand(40, 5), torch.randn(40)
    agree(reverse_scan._reverse_scan_cuda(base, gain, final), reverse_scan.reverse_scan(base, gain, final))


# ---------------------------------------------------------------- samples, plans


@dtypes
@pytest.mark.parametrize("classes", [1, 2, 100])
@launches("_sample_logits_kernel")
def test_sample_logits(classes: int, dtype: torch.dtype):
    logits, noise = (torch.randn(50, classes) * 3.0).to(dtype), torch.rand(50, 2)[:, 1]
    logits[0] += 200.0  # no exponential of this
    assert torch.equal(
        sampling._sample_logits_cuda(logits, noise), sampling.sample_logits(logits, noise, fast=False)
    )


@halves
@launches("_categorical_kernel", "_categorical_backward_kernel")
def test_categorical_sample(dtype: torch.dtype):
    batch, variables, classes = 4, 3, 5
    size = variables * classes
    logits, bias = torch.randn(batch, size).to(dtype), torch.randn(size)
    logits[0] += 200.0
    given = (logits, bias, torch.rand(batch, 2, variables)[:, 1], 0.01)
    probs, sample = sampling.categorical_sample(*given)
    all_agree(sampling._categorical_sample_cuda(*given, None), (probs, sample))
    wide = torch.zeros(batch, size + 3).to(dtype)
    sampling._categorical_sample_cuda(*given, wide[:, 3:])
    assert torch.equal(wide[:, 3:], sample) and not wide[:, :3].any()
    g_sample = torch.randn(batch, 2, size + 3)[:, 1, 3:]
    for g_probs in (None, torch.randn(batch, variables, classes)):
        for product in (None, torch.randn(batch, size)):
            given = (probs, g_probs, g_sample, product, 0.01, dtype)
            found = sampling._categorical_sample_backward_cuda(*given)
            agree(found, sampling.categorical_sample_backward(*given))


@dtypes
@pytest.mark.parametrize("shape", [(5, 6), (300, 1), (2, 3, 7)])
@launches("_bounded_normal_kernel", "_limit_action_kernel")
def test_bounded_normal_actions(dtype: torch.dtype, shape: tuple[int, ...]):
    raw = (torch.randn(*shape[:-1], 2 * shape[-1]) * 2.0).to(dtype)
    given = (raw, torch.randn(shape), 0.1, 1.0, 0.7)
    action = sampling.sample_normal(*given, fast=False)
    agree(sampling._sample_normal_cuda(*given), action)
    limited = sampling.limit_action(action * 2.0, dtype, fast=False)
    agree(sampling._limit_action_cuda(action * 2.0, dtype), limited)


@pytest.mark.parametrize("rows, length, count", [(3, 50, 7), (2, 33, 1), (2, 64, 64)])
@launches("_topk_kernel")
def test_topk(rows: int, length: int, count: int):
    values = torch.randn(rows, length)
    values[:, 3] = values[:, 5]
    best, index = topk._topk_cuda(values, count)
    assert torch.equal(best, topk.topk(values, count, fast=False)[0])
    assert torch.equal(values.gather(1, index), best)
    assert all(len(set(row)) == count for row in index.tolist())


# ---------------------------------------------------------------- two-hot logits


@dtypes
@pytest.mark.parametrize("shape", [(3, 4), (7,), (2, 3, 2), ()])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rows", [1, 4])
@launches("_loss_kernel", "_loss_backward_kernel")
def test_two_hot_loss(shape: tuple[int, ...], count: int, rows: int, dtype: torch.dtype, monkeypatch):
    """With 1 row a program, and with 4, as where rows are many."""
    monkeypatch.setattr(two_hot, "_loss_tiles", lambda *sizes: (8, rows, 1))
    bins = torch.tensor([-20.0, -3.0, -1.0, 0.0, 1.0, 3.0, 20.0])
    logits = (torch.randn(*shape, 7) * 3.0).to(dtype)
    special = torch.tensor([0.0, 1e12, -1e12, float("inf"), -20.0, -3.0, 20.0])
    # The last axis is read at one index: targets are strided, as a slice of a batch is.
    chosen, common = special[torch.randint(7, (*shape, 2))], torch.randn(*shape, 2) * 10.0
    targets = [torch.where(torch.rand(*shape, 2) < 0.5, chosen, common)[..., 1], common[..., 1]][:count]
    found, saved = two_hot._two_hot_loss_cuda(logits, bins, targets)
    expected, known = two_hot.two_hot_loss_forward(logits, bins, targets)
    agree(found, expected)
    for one, other in zip(saved, known, strict=True):
        agree(one.float(), other.float())
    for grad in (torch.randn(shape), torch.ones(()).expand(shape)):
        gradient = two_hot._two_hot_loss_backward_cuda(grad, logits, saved)
        agree(gradient, two_hot.two_hot_loss_backward(grad, logits, known))


@launches("_loss_kernel", "_loss_backward_kernel")
def test_two_hot_loss_of_a_slice_and_of_nan():
    bins, logits, nan = torch.linspace(-5.0, 5.0, 9), torch.randn(3, 5, 9), float("nan")
    target = torch.randn(3, 4)
    target[1, 2] = nan
    found, saved = two_hot._two_hot_loss_cuda(logits[:, :-1], bins, [target])
    expected, known = two_hot.two_hot_loss_forward(logits[:, :-1], bins, [target])
    assert torch.equal(found.isnan(), target.isnan())
    agree(found.nan_to_num(), expected.nan_to_num())
    grad = torch.randn(3, 5)[:, 1:]
    gradient = two_hot._two_hot_loss_backward_cuda(grad, logits[:, :-1], saved)
    plain = two_hot.two_hot_loss_backward(grad, logits[:, :-1], known)
    agree(gradient.nan_to_num(), plain.nan_to_num())


@dtypes
@pytest.mark.parametrize("shape", [(3, 4), (4100,), ()])
@launches("_mean_kernel")
def test_two_hot_mean(shape: tuple[int, ...], dtype: torch.dtype):
    positive = torch.logspace(-1, 3, 20)
    logits = (torch.randn(*shape, 41) * 3.0).to(dtype)
    agree(two_hot._two_hot_mean_cuda(logits, positive), two_hot.two_hot_mean(logits, positive, fast=False))
    if len(shape) < 2:
        return
    sliced = logits[:, :-1]
    agree(two_hot._two_hot_mean_cuda(sliced, positive), two_hot.two_hot_mean(sliced, positive, fast=False))
    equal = torch.full((*shape, 41), 1.7).to(dtype)
    assert torch.equal(two_hot._two_hot_mean_cuda(equal, positive), torch.zeros(shape))


@dtypes
@pytest.mark.parametrize("with_bias", [False, True])
@launches("_return_kernel")
def test_two_hot_return(dtype: torch.dtype, with_bias: bool):
    rewards, values = torch.randn(3, 6, 11).to(dtype), torch.randn(2, 6, 11).to(dtype)
    rewards[1, 4, 2] = float("nan")
    bias = torch.randn(2, 11) if with_bias else None
    given = (rewards, values, bias, torch.linspace(-3.0, 3.0, 11), torch.rand(6, 4), -1e3)
    found = two_hot._two_hot_return_cuda(*given)
    assert found[4] == -1e3
    agree(found, two_hot.two_hot_return(*given))


# ---------------------------------------------------------------- the optimizer


@launches("_laprop_kernel")
def test_laprop():
    """Three updates, of which the second is masked, against the optimizer's foreach form."""
    shapes, lr, betas, eps = [(3, 5), (2048,), (2049,), (4, 3, 2, 2)], 0.05, (0.9, 0.999), 1e-20
    plain = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain[3].data = plain[3].data.to(memory_format=torch.channels_last)
    fused = [parameter.detach().clone() for parameter in plain]
    square, momentum = ([torch.zeros_like(value) for value in fused] for _ in range(2))
    assert optim._kernel_fits(fused)
    update = optim.FusedUpdate(fused, square, momentum)
    optimizer = optim.LaProp(plain, lr=lr, betas=betas, eps=eps, agc=0.3, warmup=0)
    steps = 0
    for masked in (False, True, False):
        grads = [torch.randn(shape) * 30.0 for shape in shapes]
        grads[1][5] = float("nan") if masked else 1.0
        for parameter, grad in zip(plain, grads, strict=True):
            parameter.grad = grad
        optimizer.found_inf = torch.tensor(float(masked))
        ratios = optimizer._clip_ratios(optimizer.param_groups[0], plain, grads)
        go = torch.tensor(0.0 if masked else 1.0)
        steps += not masked
        rate = (lr * go / (1.0 - betas[0] ** steps)).expand(4)
        root = torch.full((4,), (1.0 - betas[1] ** steps) ** -0.5)
        update(grads, torch.stack([ratios, rate, root]), go, betas, eps)
        optimizer.step()
        for i, parameter in enumerate(plain):
            state = optimizer.state[parameter]
            agree(fused[i], parameter.detach())
            agree(square[i], state["square"])
            agree(momentum[i], state["momentum"])
