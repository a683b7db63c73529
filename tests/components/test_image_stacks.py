"""Convolutions of earlier Dreamer versions against loops over pixels, and layer styles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rl_lab.components.nn.fast_path import use_fast_path
from rl_lab.components.nn.image_stacks import STACKS, ConvLayer, StackDecoder, StackEncoder
from rl_lab.components.nn.mlp import MLP, LayerNorm, LayerStyle, RMSNorm, layer_style
from rl_lab.components.representation_learners.decoders import DictDecoder
from rl_lab.components.representation_learners.encoders import DictEncoder, dict_embed_dim
from rl_lab.errors import ConfigError
from tests.workflows.dreamer_case import image_spec

PLAIN = LayerStyle("none", "relu", "glorot")


def slow_same(x: torch.Tensor, weight: torch.Tensor, stride: int) -> torch.Tensor:
    """TensorFlow's `same` padding: kernel - stride in all, the odd one at the end."""
    kernel, low = weight.shape[-1], (weight.shape[-1] - stride) // 2
    height, width = (side // stride for side in x.shape[-2:])
    y = torch.zeros(len(x), len(weight), height, width)
    for i, j, k, m in itertools.product(range(height), range(width), range(kernel), range(kernel)):
        row, column = i * stride + k - low, j * stride + m - low
        if 0 <= row < x.shape[-2] and 0 <= column < x.shape[-1]:
            y[..., i, j] += x[..., row, column] @ weight[..., k, m].t()
    return y


def slow_transposed(x: torch.Tensor, weight: torch.Tensor, stride: int, low: int, size: int) -> torch.Tensor:
    kernel = weight.shape[-1]
    y = torch.zeros(len(x), weight.shape[1], size, size)
    for i, j, k, m in itertools.product(*map(range, (*x.shape[-2:], kernel, kernel))):
        row, column = i * stride + k - low, j * stride + m - low
        if 0 <= row < size and 0 <= column < size:
            y[..., row, column] += x[..., i, j] @ weight[..., k, m]
    return y


@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (5, 2), (5, 1), (3, 2), (6, 2), (4, 1)])
def test_same_convolution_is_the_slow_loop(kernel: int, stride: int):
    x = torch.randn(2, 3, 8, 8)
    layer = ConvLayer(3, 4, kernel, style=PLAIN, stride=stride, output=True)
    assert torch.allclose(layer(x), slow_same(x, layer.weight, stride), atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (5, 2), (5, 1), (3, 2), (6, 2), (4, 1)])
def test_same_transposed_convolution_is_the_slow_loop(kernel: int, stride: int):
    """Of jax.lax.conv_transpose: a dilated image, padded by ⌈(kernel + stride - 2) / 2⌉ at the beginning."""
    x = torch.randn(2, 3, 4, 4)
    layer = ConvLayer(3, 5, kernel, style=PLAIN, stride=stride, transposed=True, output=True)
    low = kernel - 1 - -(-(kernel + stride - 2) // 2)
    found = layer(x)
    assert found.shape == (2, 5, 4 * stride, 4 * stride)
    assert torch.allclose(found, slow_transposed(x, layer.weight, stride, low, 4 * stride), atol=1e-5)


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("side", [64, 32, 16])
def test_decoder_reverses_the_encoder(name: str, side: int):
    stack, style = STACKS[name], layer_style("layer+silu", "fan_avg", bias=False)
    encoder = StackEncoder(stack, 3, (side, side), 2, style)
    decoder = StackDecoder(stack, 3, (side, side), 2, style)
    found = encoder(torch.rand(2, 3, side, side) - 0.5)
    assert found.shape == (2, encoder.features)
    image = decoder(torch.randn(2, *decoder.seed, requires_grad=True))
    assert image.shape == (2, 3, side, side)
    image.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters())


def test_published_shapes():
    """danijar/dreamerv2: 4 convolutions to 2×2×8·48; danijar/dreamerv3 @ 251910d: 4×4×4·depth."""
    assert STACKS["valid"].features((64, 64), 48) == 32 * 48
    assert STACKS["strided"].features((64, 64), 32) == 4 * 4 * 256
    assert STACKS["outer"].features((96, 96), 16) == 6 * 6 * 64


@pytest.mark.parametrize("images", ["pooled", "outer", "strided"])
def test_kernels_and_channels_of_choice(images: str):
    """danijar/dreamerv3 @ e3f0224, enc.simple and dec.simple: kernel, mults."""
    torch.manual_seed(0)
    spec, multipliers = (
        image_spec(16),
        {"pooled": [1, 2], "outer": [1, 1, 2, 2, 3], "strided": [1, 1, 2, 3]}[images],
    )
    words: dict[str, Any] = {
        "spec": spec,
        "units": 8,
        "depth": 2,
        "images": images,
        "kernel": 3,
        "multipliers": multipliers,
    }
    encoder = DictEncoder(**words)
    decoder = DictDecoder(**words, deter=8, stoch=3, classes=4, blocks=2)
    weights = [p for p in encoder.parameters() if p.ndim == 4]
    widths = [3, *(2 * multiple for multiple in multipliers)]
    assert [tuple(w.shape) for w in weights] == [(b, a, 3, 3) for a, b in itertools.pairwise(widths)]
    assert {tuple(p.shape[2:]) for p in decoder.parameters() if p.ndim == 4} == {(3, 3)}
    sizes = {key: words[key] for key in ("spec", "units", "depth", "images", "multipliers")}
    assert encoder.embed_dim == dict_embed_dim(**sizes)
    obs = {"image": torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)}
    found = encoder(obs)
    assert found.shape == (2, encoder.embed_dim)
    if images == "pooled":
        x = obs["image"].float() / 255.0 - 0.5
        for weight in weights:  # biases are 0 and scales are 1 at first
            x = torch.nn.functional.max_pool2d(slow_same(x, weight, 1), 2)
            x = torch.nn.functional.silu(x / (x.square().mean(1, keepdim=True) + 1e-4).sqrt())
        assert torch.allclose(found, x.permute(0, 2, 3, 1).flatten(1), atol=1e-5)
    state = {"deter": torch.randn(2, 8), "stoch": torch.randn(2, 3, 4)}
    feature = torch.cat([state["deter"], state["stoch"].flatten(1)], 1)
    assert decoder(state, feature)["image"].shape == (2, 3, 16, 16)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"images": "valid", "kernel": 3}, "components.encoder.images is valid"),
        ({"images": "strided", "multipliers": [1, 2]}, "components.encoder.multipliers has 2 values: list 4"),
        ({"images": "outer", "kernel": 1}, "components.encoder.kernel is 1: set it to 2 or more"),
        ({"images": "pooled", "kernel": 4}, "components.encoder.kernel is 4: set it to an odd number"),
    ],
)
def test_kernels_and_channels_that_do_not_fit(words: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        DictEncoder(spec=image_spec(16), units=8, depth=2, **words)


def test_wrong_image_sizes():
    with pytest.raises(ConfigError, match=r"environment\.size=64"):
        STACKS["valid"].features((96, 96), 4)
    with pytest.raises(ConfigError, match="divisible by 16"):
        STACKS["strided"].features((60, 64), 4)


def test_layer_styles():
    rms, layer, none = (layer_style(kind) for kind in ("rms+silu", "layer+elu", "elu"))
    assert isinstance(rms.make_norm(4), RMSNorm) and isinstance(layer.make_norm(4), LayerNorm)
    assert isinstance(none.make_norm(4), torch.nn.Identity)
    assert (rms.fused, layer.fused, none.fused) == (True, False, False)
    assert (rms.fused_norm, layer.fused_norm, none.fused_norm) == (True, True, False)
    x = torch.tensor([-1.0, 2.0])
    assert none.activate(x).tolist() == pytest.approx([-0.6321206, 2.0])
    # Without a norm a layer keeps its bias; before a norm it has none with bias=false.
    assert layer_style("elu", bias=False).linear(2, 2).bias is not None
    assert layer_style("layer+elu", bias=False).linear(2, 2).bias is None
    with pytest.raises(ConfigError, match=r"layer is 'norm.silu'"):
        layer_style("norm+silu")
    with pytest.raises(ConfigError, match="init is 'uniform'"):
        layer_style(init="uniform")


def test_layer_norm_by_hand():
    norm = LayerNorm(2, eps=0.0)
    norm.weight.data.copy_(torch.tensor([2.0, 3.0]))
    norm.bias.data.copy_(torch.tensor([0.0, 1.0]))
    assert norm(torch.tensor([[1.0, 5.0]])).tolist() == [[-2.0, 4.0]]  # mean 3, deviation 2


FUSED = ["rms+silu", "layer+silu", "layer+elu"]


def assert_fast_is_plain(module: torch.nn.Module, x: torch.Tensor) -> None:
    """Results and gradients, with scales and biases that matter."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    found = []
    for fast in (False, True):
        use_fast_path(fast, module)
        layers = [part for part in module.modules() if isinstance(part, ConvLayer | MLP)]
        assert layers and all(part.fast == (fast and part.has_fast_form) for part in layers)
        assert any(part.fast for part in layers) == fast
        y = module(x)
        weight = torch.linspace(-1.0, 1.0, y.numel()).view(y.shape)
        found.append([y, *torch.autograd.grad((y * weight).sum(), [x, *module.parameters()])])
    for plain, quick in zip(*found):
        assert (quick - plain).norm() <= 1e-4 * plain.norm() + 1e-6


@pytest.mark.parametrize("layer", FUSED)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", list(STACKS))
def test_fused_norms_of_convolutions(name: str, layer: str, bias: bool):
    stack, style = STACKS[name], layer_style(layer, bias=bias)
    encoder = StackEncoder(stack, 3, (16, 16), 2, style)
    assert_fast_is_plain(encoder, torch.rand(2, 3, 16, 16).requires_grad_())
    decoder = StackDecoder(stack, 3, (16, 16), 2, style)
    assert_fast_is_plain(decoder, torch.randn(2, *decoder.seed).requires_grad_())


@pytest.mark.parametrize("layer", FUSED)
@pytest.mark.parametrize("bias", [True, False])
def test_fused_norms_of_dense_layers(layer: str, bias: bool):
    mlp = MLP(5, 8, 2, outputs=3, style=layer_style(layer, bias=bias))
    assert_fast_is_plain(mlp, torch.randn(4, 2, 5).requires_grad_())
