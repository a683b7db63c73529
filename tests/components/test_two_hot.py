import math

import pytest
import torch

from rl_lab.components.nn.heads import ContinueHead, TwoHotHead
from rl_lab.components.nn.two_hot import TwoHot
from rl_lab.errors import ConfigError


def slow_two_hot(bins, value):
    """Dense target by searching the neighbours."""
    target = torch.zeros(len(bins))
    if value <= bins[0]:
        target[0] = 1.0
    elif value >= bins[-1]:
        target[-1] = 1.0
    else:
        upper = next(i for i, b in enumerate(bins) if b > value)
        lower = upper - 1
        target[upper] = (value - bins[lower]) / (bins[upper] - bins[lower])
        target[lower] = 1.0 - target[upper]
    return target


def test_bins_are_symmetric_and_reach_as_far_as_published():
    two_hot = TwoHot()
    assert len(two_hot.bins) == 255
    assert torch.equal(two_hot.bins, -two_hot.bins.flip(0))
    assert two_hot.bins[127] == 0.0
    assert two_hot.bins[-1].item() == pytest.approx(math.expm1(20.0), rel=1e-4)
    assert (two_hot.bins.diff() > 0).all()


@pytest.mark.parametrize("bins", [3, 41, 255])
def test_equal_logits_mean_exactly_zero(bins):
    assert torch.equal(TwoHot(bins).mean(torch.zeros(4, bins)), torch.zeros(4))


def test_zero_initialised_head_predicts_exactly_zero():
    head = TwoHotHead(features=12, units=16, layers=2)
    assert torch.equal(head.predict(torch.randn(7, 12) * 10), torch.zeros(7))


def test_loss_against_the_dense_target():
    torch.manual_seed(0)
    two_hot = TwoHot(41)
    values = torch.tensor([0.0, 0.3, -0.3, 1.0, 17.2, -900.0, 1e12, -1e12, two_hot.bins[5].item()])
    logits = torch.randn(len(values), 41)
    dense = torch.stack([slow_two_hot(two_hot.bins.tolist(), v) for v in values.tolist()])
    expected = -(dense * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(two_hot.loss(logits, values), expected, atol=1e-5)


def test_target_mean_is_the_value_itself():
    two_hot = TwoHot()
    values = torch.tensor([-5.0, -0.01, 0.0, 2.5, 333.0])
    lower, weight = two_hot.encode(values)
    recovered = (1 - weight) * two_hot.bins[lower] + weight * two_hot.bins[lower + 1]
    assert torch.allclose(recovered, values, atol=1e-4)


def test_mean_follows_the_distribution():
    two_hot = TwoHot(41)
    logits = torch.full((41,), -100.0)
    logits[30] = 100.0
    assert two_hot.mean(logits).item() == pytest.approx(two_hot.bins[30].item(), rel=1e-5)


def test_gradient_moves_the_prediction_to_the_target():
    two_hot = TwoHot(41)
    logits = torch.zeros(41, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(two_hot.loss(logits, torch.tensor(3.0)), logits)
        logits = (logits - 1.0 * gradient).detach().requires_grad_()
    assert two_hot.mean(logits).item() == pytest.approx(3.0, rel=0.05)


def test_even_number_of_bins_is_refused():
    with pytest.raises(ConfigError, match="odd"):
        TwoHot(254)


def test_continue_head_loss_by_hand():
    head = ContinueHead(features=4, units=8, layers=1)
    loss = head.loss(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.25]))
    p = 1 / (1 + math.exp(-2.0))
    expected = torch.tensor([math.log(2.0), -(0.25 * math.log(p) + 0.75 * math.log(1 - p))])
    assert torch.allclose(loss, expected, atol=1e-6)
    assert head.predict(torch.randn(3, 5, 4)).shape == (3, 5)
