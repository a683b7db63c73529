"""Convolutions of earlier Dreamer versions against loops over pixels, and layer styles."""

from __future__ import annotations

import itertools

import pytest
import torch

from rl_lab.components.nn.image_stacks import STACKS, ConvLayer, StackDecoder, StackEncoder
from rl_lab.components.nn.mlp import LayerNorm, LayerStyle, RMSNorm, layer_style
from rl_lab.errors import ConfigError

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


@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (5, 2), (5, 1)])
def test_same_convolution_is_the_slow_loop(kernel: int, stride: int):
    x = torch.randn(2, 3, 8, 8)
    layer = ConvLayer(3, 4, kernel, style=PLAIN, stride=stride, output=True)
    assert torch.allclose(layer(x), slow_same(x, layer.weight, stride), atol=1e-5)


@pytest.mark.parametrize(("kernel", "stride"), [(4, 2), (5, 2), (5, 1)])
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
