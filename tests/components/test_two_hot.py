import math

import pytest
import torch

from rl_lab.components.controllers.dreamer import DreamerCriticController
from rl_lab.components.nn.fast_path import use_fast_path
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


def test_bins():
    two_hot = TwoHot()
    assert len(two_hot.bins) == 255
    assert torch.equal(two_hot.bins, -two_hot.bins.flip(0))
    assert two_hot.bins[127] == 0.0
    assert two_hot.bins[-1].item() == pytest.approx(math.expm1(20.0), rel=1e-4)
    assert (two_hot.bins.diff() > 0).all()


@pytest.mark.parametrize("space", ["numbers", "symlog"])
@pytest.mark.parametrize("bins", [3, 41, 255])
def test_equal_logits_give_zero(bins, space):
    assert torch.equal(TwoHot(bins, space=space).mean(torch.zeros(4, bins)), torch.zeros(4))


def test_zero_initialised_head_predicts_zero():
    head = TwoHotHead(features=12, units=16, layers=2)
    assert torch.equal(head.predict(torch.randn(7, 12) * 10), torch.zeros(7))


def test_loss_matches_dense_target():
    torch.manual_seed(0)
    two_hot = TwoHot(41)
    values = torch.tensor([0.0, 0.3, -0.3, 1.0, 17.2, -900.0, 1e12, -1e12, two_hot.bins[5].item()])
    logits = torch.randn(len(values), 41)
    dense = torch.stack([slow_two_hot(two_hot.bins.tolist(), v) for v in values.tolist()])
    expected = -(dense * logits.log_softmax(-1)).sum(-1)
    assert torch.allclose(two_hot.loss(logits, values), expected, atol=1e-5)


def test_target_mean_equals_value():
    two_hot = TwoHot()
    values = torch.tensor([-5.0, -0.01, 0.0, 2.5, 333.0])
    lower, weight = two_hot.encode(values)
    recovered = (1 - weight) * two_hot.bins[lower] + weight * two_hot.bins[lower + 1]
    assert torch.allclose(recovered, values, atol=1e-4)


def test_symlog_space():
    """Bins at symlog -2, -1, 0, 1, 2: e² - 1 is bin 4, e^1.5 - 1 is half way between 3 and 4."""
    two_hot = TwoHot(5, limit=2.0, space="symlog")
    values = torch.tensor([math.expm1(2.0), math.expm1(1.5), -math.expm1(0.25), 1e9])
    lower, weight = two_hot.encode(values)
    assert torch.allclose(lower + weight, torch.tensor([4.0, 3.5, 1.75, 4.0]))
    # Half on 0 and half on e² - 1 = 6.39: the mean in symlog space is 1, so e - 1 = 1.72, not 3.19.
    unsure = torch.tensor([-100.0, -100.0, 0.0, -100.0, 0.0])
    assert two_hot.mean(unsure).item() == pytest.approx(math.expm1(1.0))
    assert TwoHot(5, limit=2.0).mean(unsure).item() == pytest.approx(math.expm1(2.0) / 2)


def test_fused_loss_in_symlog_space():
    torch.manual_seed(0)
    two_hot = TwoHot(41, space="symlog")
    logits = torch.randn(2, 9, 41, requires_grad=True)
    targets = [torch.randn(2, 9) * 200, torch.randn(2, 9)]
    plain = two_hot.loss(logits, *targets)
    use_fast_path(True, two_hot)
    quick = two_hot.loss(logits, *targets)
    assert torch.allclose(plain, quick, atol=1e-5)
    weight = torch.rand(2, 9)
    expected, found = (torch.autograd.grad(loss, logits, weight)[0] for loss in (plain, quick))
    assert torch.allclose(expected, found, atol=1e-6)


def test_unknown_space():
    with pytest.raises(ConfigError, match="two-hot space is 'symexp'"):
        TwoHot(space="symexp")


def test_mean_of_distribution():
    two_hot = TwoHot(41)
    logits = torch.full((41,), -100.0)
    logits[30] = 100.0
    assert two_hot.mean(logits).item() == pytest.approx(two_hot.bins[30].item(), rel=1e-5)


def test_gradient_moves_prediction_to_target():
    two_hot = TwoHot(41)
    logits = torch.zeros(41, requires_grad=True)
    for _ in range(300):
        (gradient,) = torch.autograd.grad(two_hot.loss(logits, torch.tensor(3.0)), logits)
        logits = (logits - 1.0 * gradient).detach().requires_grad_()
    assert two_hot.mean(logits).item() == pytest.approx(3.0, rel=0.05)


def special_values(two_hot):
    """Outside the range, at its ends, on bins, between them, and zero."""
    on_bins = [two_hot.bins[index].item() for index in (0, 5, 20, 21, -1)]
    return torch.tensor([*on_bins, 0.0, -0.0, 0.3, -17.2, 1e12, -1e12, float("inf")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2])
def test_fused_loss(dtype, count):
    torch.manual_seed(0)
    two_hot = TwoHot(41)
    values = special_values(two_hot)
    targets = [values, values.roll(3)][:count]
    targets = [target.view(3, 4) for target in targets]
    inputs, weight = (torch.randn(3, 5, 41) * 3.0).to(dtype), torch.randn(3, 4)
    results = []
    for on in (False, True):
        logits = inputs.clone().requires_grad_()
        use_fast_path(on, two_hot)
        loss = two_hot.loss(logits[:, :-1], *targets)
        assert ("TwoHotCrossEntropy" in type(loss.grad_fn).__name__) == on
        (loss * weight).sum().backward()
        results.append((loss.detach(), logits.grad))
    (plain, gradient), (fused, fused_gradient) = results
    assert plain.shape == (3, 4) and fused.dtype == torch.float32 and fused_gradient.dtype == dtype
    assert torch.allclose(fused, plain, rtol=1e-5, atol=1e-5)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert torch.allclose(fused_gradient.float(), gradient.float(), rtol=tolerance, atol=tolerance)
    assert not fused_gradient[:, -1].any()


def test_two_targets():
    torch.manual_seed(0)
    critic = DreamerCriticController(features=4, units=8, layers=1, bins=41)
    two_hot, logits = critic.head.two_hot, torch.randn(7, 41)
    first, second = torch.randn(2, 7) * 10.0
    expected = two_hot.loss(logits, first) + two_hot.loss(logits, second)
    wanted = first.clone().requires_grad_()
    for on in (False, True):
        use_fast_path(on, critic)
        assert torch.allclose(critic.loss(logits, first, second), expected, atol=1e-5)
        (gradient,) = torch.autograd.grad(two_hot.loss(logits, wanted).sum(), wanted)
        assert gradient.abs().min() > 0.0


def test_nan_propagates_to_loss():
    two_hot, nan = TwoHot(41), float("nan")
    logits = torch.zeros(3, 41)
    logits[1, 4] = nan
    for on in (False, True):
        use_fast_path(on, two_hot)
        loss = two_hot.loss(logits, torch.tensor([nan, 1.0, 2.0]))
        assert loss.isnan().tolist() == [True, True, False]


def test_even_bins_are_rejected():
    with pytest.raises(ConfigError, match="odd"):
        TwoHot(254)


def test_continue_head_loss():
    head = ContinueHead(features=4, units=8, layers=1)
    loss = head.loss(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.25]))
    p = 1 / (1 + math.exp(-2.0))
    expected = torch.tensor([math.log(2.0), -(0.25 * math.log(p) + 0.75 * math.log(1 - p))])
    assert torch.allclose(loss, expected, atol=1e-6)
    assert head.predict(torch.randn(3, 5, 4)).shape == (3, 5)
