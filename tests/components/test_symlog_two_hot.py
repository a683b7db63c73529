"""Two-hot regression in symlog space, compared with values computed by hand."""

import math

import pytest
import torch

from rl_lab.components.nn.two_hot import SquaredError, SymlogTwoHot, make_regression, symexp, symlog
from rl_lab.errors import ConfigError


def test_symlog_two_hot_encoding():
    """Five bins at -2 … 2 in symlog space. symlog(e^0.25 − 1) = 0.25: ¾ on bin 0, ¼ on bin 1."""
    code = SymlogTwoHot(5, limit=2.0)
    target = torch.tensor([math.exp(0.25) - 1.0, 0.0, -(math.exp(1.5) - 1.0), 1e9, -1e9])
    expected = torch.tensor(
        [
            [0.0, 0.0, 0.75, 0.25, 0.0],
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [0.5, 0.5, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 1.0],  # clipped to the last bin
            [1.0, 0.0, 0.0, 0.0, 0.0],
        ]
    )
    assert torch.allclose(code.encode(target), expected, atol=1e-6)


def test_mean_in_symlog_space():
    """Half on bin 0, half on bin 2: symexp(1) = e − 1, not the mean of 0 and e² − 1."""
    code = SymlogTwoHot(5, limit=2.0)
    logits = torch.tensor([-1e9, -1e9, 0.0, -1e9, 0.0])
    assert code.mean(logits).item() == pytest.approx(math.e - 1.0, rel=1e-5)


def test_symlog_two_hot_loss():
    """Equal logits give ln 5 for any target; other logits are computed by hand."""
    code = SymlogTwoHot(5, limit=2.0)
    target = torch.tensor([0.3, -4.0])
    assert torch.allclose(code.loss(torch.zeros(2, 5), target), torch.full((2,), math.log(5.0)))
    probs = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    target = torch.tensor(math.exp(0.25) - 1.0)
    expected = -(0.75 * math.log(0.3) + 0.25 * math.log(0.2))
    assert code.loss(probs.log(), target).item() == pytest.approx(expected, rel=1e-5)


def test_published_bins():
    """101 bins over ±10: 0.2 apart, for values up to 22,025."""
    code = SymlogTwoHot()
    assert code.centers[51].item() == pytest.approx(0.2)
    assert symexp(code.centers[-1]).item() == pytest.approx(math.exp(10.0) - 1.0)
    values = torch.tensor([-900.0, -1.0, 0.0, 0.37, 12.0, 5000.0])
    assert torch.allclose(code.mean(code.encode(values).clamp(min=1e-30).log()), values, rtol=1e-3, atol=1e-4)
    assert torch.allclose(code.encode(values).sum(-1), torch.ones(6), atol=1e-5)
    assert ((code.encode(values) > 0).sum(-1) <= 2).all()


def test_gradient_of_cross_entropy():
    code = SymlogTwoHot(11, limit=3.0)
    logits = torch.randn(4, 11, requires_grad=True)
    target = torch.randn(4)
    code.loss(logits, target).sum().backward()
    expected = torch.softmax(logits.detach(), -1) - code.encode(target)
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_squared_error():
    code = make_regression(0, 10.0)
    assert isinstance(code, SquaredError) and code.width == 1
    assert torch.equal(code.mean(torch.tensor([[2.0]])), torch.tensor([2.0]))
    assert torch.equal(code.loss(torch.tensor([[2.0]]), torch.tensor([5.0])), torch.tensor([9.0]))
    code = make_regression(1, 10.0)
    assert code.mean(symlog(torch.tensor([[7.0]]))).item() == pytest.approx(7.0)
    assert isinstance(make_regression(101, 10.0), SymlogTwoHot)


def test_too_few_bins():
    with pytest.raises(ConfigError, match="at least 2"):
        SymlogTwoHot(1)
