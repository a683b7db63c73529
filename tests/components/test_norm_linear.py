import math

import pytest
import torch

from rl_lab.components.nn.mlp import MLP, TRUNCATION, BlockLinear, Linear, RMSNorm, truncated_normal_
from rl_lab.components.nn.two_hot import symexp, symlog
from rl_lab.errors import ConfigError


def test_rms_norm():
    norm = RMSNorm(2)
    norm.weight.data = torch.tensor([1.0, 2.0])
    # mean of squares of (3, 4) is 12.5
    expected = torch.tensor([3.0, 8.0]) / math.sqrt(12.5 + 1e-4)
    assert torch.allclose(norm(torch.tensor([3.0, 4.0])), expected)


def test_rms_norm_dtype():
    x = torch.full((4,), 300.0, dtype=torch.bfloat16)
    y = RMSNorm(4)(x)
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), torch.ones(4), atol=1e-2)


def test_truncated_normal_init():
    torch.manual_seed(0)
    weight = truncated_normal_(torch.empty(400, 100), fan_in=100)
    assert weight.std().item() == pytest.approx(0.1, rel=0.02)
    assert weight.abs().max().item() <= 2 * TRUNCATION * 0.1 + 1e-6
    assert torch.equal(truncated_normal_(torch.empty(3, 3), fan_in=3, scale=0.0), torch.zeros(3, 3))


def test_linear_scale_and_bias():
    layer = Linear(8, 4, scale=0.0)
    assert torch.equal(layer(torch.randn(2, 8)), torch.zeros(2, 4))
    torch.manual_seed(0)
    wide = Linear(64, 512, scale=0.01)
    assert wide.weight.std().item() == pytest.approx(0.01 / 8, rel=0.05)
    assert torch.equal(wide.bias, torch.zeros(512))


def test_block_linear_is_block_diagonal():
    torch.manual_seed(0)
    layer = BlockLinear(6, 4, blocks=2)
    layer.bias.data.normal_()
    x = torch.randn(5, 2, 3)
    expected = torch.stack([x[:, g] @ layer.weight[g] + layer.bias[g, 0] for g in range(2)], 1)
    assert torch.allclose(layer(x), expected, atol=1e-6)


def test_block_linear_fan_in():
    torch.manual_seed(0)
    layer = BlockLinear(256, 1024, blocks=8)
    assert layer.weight.std().item() == pytest.approx(1 / math.sqrt(256), rel=0.02)


def test_block_linear_rejects_indivisible_widths():
    with pytest.raises(ConfigError, match="blocks"):
        BlockLinear(10, 8, blocks=4)


def test_mlp_shapes_and_zero_output():
    mlp = MLP(6, 16, 2, outputs=3, out_scale=0.0)
    assert torch.equal(mlp(torch.randn(4, 5, 6)), torch.zeros(4, 5, 3))
    assert MLP(6, 16, 2)(torch.randn(4, 6)).shape == (4, 16)
    assert len(mlp.linears) == len(mlp.norms) == 2


def test_symlog_round_trip():
    x = torch.tensor([-1e4, -1.0, 0.0, 0.5, 1e6])
    assert torch.allclose(symexp(symlog(x)), x, rtol=1e-4)
    assert symlog(torch.tensor(math.e - 1)).item() == pytest.approx(1.0)
