"""SimNorm and normed layers, compared with values computed by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.nn.normed_mlp import NormedMLP, SimNorm, parse_layer, simnorm
from rl_lab.errors import ConfigError


def test_simnorm_values():
    """Groups of two: (0, ln 3) becomes (1/4, 3/4), equal values become ½."""
    x = torch.tensor([0.0, math.log(3.0), 5.0, 5.0])
    assert torch.allclose(simnorm(x, 2), torch.tensor([0.25, 0.75, 0.5, 0.5]))


def test_groups_sum_to_one():
    x = torch.randn(3, 5, 16)
    y = SimNorm(8)(x)
    assert y.shape == x.shape
    assert torch.allclose(y.unflatten(-1, (2, 8)).sum(-1), torch.ones(3, 5, 2))
    moved = x.clone()
    moved[..., 8:] += 3.0  # a constant added to a group changes nothing
    assert torch.allclose(SimNorm(8)(moved), y, atol=1e-6)


def test_indivisible_latent():
    with pytest.raises(ConfigError, match="groups of 8"):
        NormedMLP([4], 8, 12, out="norm+simnorm")


def test_normed_mlp_layers():
    mlp = NormedMLP([3, 2], 4, 5)
    a, b = torch.randn(6, 3), torch.randn(6, 2)
    x = torch.cat([a, b], 1)
    first, second, last = mlp.layers
    for layer, weight in ((first, torch.cat([first.weight0, first.weight1], 1)), (second, second.weight0)):
        x = F.linear(x, weight, layer.bias)
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        x = x * torch.tanh(torch.log1p(x.exp()))
    assert torch.allclose(mlp(a, b), F.linear(x, last.weight0, last.bias), atol=1e-5)
    assert torch.allclose(mlp(a.view(2, 3, 3), b.view(2, 3, 2)).flatten(0, 1), mlp(a, b))


def test_initial_weights():
    torch.manual_seed(0)
    mlp = NormedMLP([64], 64, 8, zero=True)
    assert mlp.layers[0].weight0.std().item() == pytest.approx(0.02, rel=0.1)
    assert mlp.layers[0].bias.abs().max() == 0.0
    assert mlp.layers[-1].weight0.abs().max() == 0.0
    orthogonal = NormedMLP([8], 16, 4, hidden=("elu",), init="orthogonal").layers[0]
    assert torch.allclose(orthogonal.weight0.t() @ orthogonal.weight0, torch.eye(8), atol=1e-5)


def test_parse_layer():
    assert parse_layer("norm+mish") == (True, "mish")
    assert parse_layer("elu") == (False, "elu")
    with pytest.raises(ConfigError, match="norm\\+mish"):
        parse_layer("norm+mist")
