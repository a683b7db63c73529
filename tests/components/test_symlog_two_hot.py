"""Two-hot regression in symlog space, worked by hand."""

import math

import pytest
import torch

from rl_lab.components.nn.symlog import symexp, symlog
from rl_lab.components.nn.two_hot import SquaredError, SymlogTwoHot, make_regression
from rl_lab.errors import ConfigError


def test_by_hand():
    """Five bins at -2 … 2 in symlog space. symlog(e^0.25 − 1) = 0.25: three quarters on bin 0, one on bin 1."""
    code = SymlogTwoHot(5, limit=2.0)
    target = torch.tensor([math.exp(0.25) - 1.0, 0.0, -(math.exp(1.5) - 1.0), 1e9, -1e9])
    expected = torch.tensor(
        [
            [0.0, 0.0, 0.75, 0.25, 0.0],
            [0.0, 0.0, 1.0, 0.0, 0.0],
            [0.5, 0.5, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, 1.0],  # beyond the end: the last bin, not the first one too
            [1.0, 0.0, 0.0, 0.0, 0.0],
        ]
    )
    assert torch.allclose(code.encode(target), expected, atol=1e-6)


def test_mean_is_taken_in_symlog_space():
    """Half on bin 0, half on bin 2: symexp(1) = e − 1, not the mean of 0 and e² − 1."""
    code = SymlogTwoHot(5, limit=2.0)
    logits = torch.tensor([-1e9, -1e9, 0.0, -1e9, 0.0])
    assert code.mean(logits).item() == pytest.approx(math.e - 1.0, rel=1e-5)


def test_loss_by_hand():
    """Equal logits cost ln 5 whatever the target; a quarter and three quarters as certain logits say, by hand."""
    code = SymlogTwoHot(5, limit=2.0)
    target = torch.tensor([0.3, -4.0])
    assert torch.allclose(code.loss(torch.zeros(2, 5), target), torch.full((2,), math.log(5.0)))
    probs = torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])
    target = torch.tensor(math.exp(0.25) - 1.0)
    expected = -(0.75 * math.log(0.3) + 0.25 * math.log(0.2))
    assert code.loss(probs.log(), target).item() == pytest.approx(expected, rel=1e-5)


def test_published_bins():
    """101 bins over ±10: 0.2 apart, and numbers up to 22,025."""
    code = SymlogTwoHot()
    assert code.centers[51].item() == pytest.approx(0.2)
    assert symexp(code.centers[-1]).item() == pytest.approx(math.exp(10.0) - 1.0)
    values = torch.tensor([-900.0, -1.0, 0.0, 0.37, 12.0, 5000.0])
    assert torch.allclose(code.mean(code.encode(values).clamp(min=1e-30).log()), values, rtol=1e-3, atol=1e-4)
    assert torch.allclose(code.encode(values).sum(-1), torch.ones(6), atol=1e-5)
    assert ((code.encode(values) > 0).sum(-1) <= 2).all()


def test_gradient_is_that_of_cross_entropy():
    code = SymlogTwoHot(11, limit=3.0)
    logits = torch.randn(4, 11, requires_grad=True)
    target = torch.randn(4)
    code.loss(logits, target).sum().backward()
    expected = torch.softmax(logits.detach(), -1) - code.encode(target)
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_plain_numbers():
    code = make_regression(0, 10.0)
    assert isinstance(code, SquaredError) and code.width == 1
    assert torch.equal(code.mean(torch.tensor([[2.0]])), torch.tensor([2.0]))
    assert torch.equal(code.loss(torch.tensor([[2.0]]), torch.tensor([5.0])), torch.tensor([9.0]))
    code = make_regression(1, 10.0)
    assert code.mean(symlog(torch.tensor([[7.0]]))).item() == pytest.approx(7.0)
    assert isinstance(make_regression(101, 10.0), SymlogTwoHot)


def test_one_bin_is_no_code():
    with pytest.raises(ConfigError, match="2 bins"):
        SymlogTwoHot(1)
