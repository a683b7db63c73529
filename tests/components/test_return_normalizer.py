import pytest
import torch

from rl_lab.components.controllers.dreamer import DreamerCriticController
from rl_lab.components.nn.moving_averages import ReturnNormalizer, SlowCopy


def test_percentile_averages():
    normalizer = ReturnNormalizer(rate=0.1)
    returns = torch.arange(101.0).reshape(1, 101)  # 5th percentile 5, 95th 95
    scale = normalizer.update(returns)
    assert (normalizer.low.item(), normalizer.high.item()) == pytest.approx((0.5, 9.5))
    assert scale.item() == pytest.approx(9.0)
    scale = normalizer.update(returns)
    assert scale.item() == pytest.approx(9.0 * 0.9 + 90.0 * 0.1)


def test_small_returns_are_not_scaled_up():
    assert ReturnNormalizer(rate=1.0).update(torch.linspace(0, 0.1, 50)).item() == 1.0


def test_non_finite_returns_are_ignored():
    normalizer = ReturnNormalizer(rate=0.5)
    normalizer.update(torch.arange(101.0))
    before = (normalizer.low.clone(), normalizer.high.clone())
    normalizer.update(torch.tensor([1.0, float("nan"), 3.0]))
    assert torch.equal(normalizer.low, before[0])
    assert torch.equal(normalizer.high, before[1])


def test_range_is_in_state_dict():
    normalizer = ReturnNormalizer()
    normalizer.update(torch.arange(101.0))
    other = ReturnNormalizer()
    other.load_state_dict(normalizer.state_dict())
    assert torch.equal(other.scale(), normalizer.scale())


def test_slow_copy():
    net = torch.nn.Linear(2, 1)
    slow = SlowCopy(net)
    assert list(slow.parameters()) == []
    assert set(slow.state_dict()) == {"network.weight", "network.bias"}
    start = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.add_(1.0)
    assert torch.equal(slow(torch.ones(1, 2)), torch.nn.functional.linear(torch.ones(1, 2), start, net.bias))
    slow.update(net, 0.25)
    assert torch.allclose(slow.network.weight, start + 0.25)


def test_initial_critic():
    critic = DreamerCriticController(features=5, units=8, layers=2, bins=41)
    feature = torch.randn(3, 4, 5)
    assert torch.equal(critic.value(feature), torch.zeros(3, 4))
    critic.head.mlp.out.weight.data.normal_()
    assert not torch.equal(critic.value(feature), critic.slow_value(feature))
    critic.update_slow(1.0)
    assert torch.equal(critic.value(feature), critic.slow_value(feature))
    assert all("slow" not in name for name, _ in critic.named_parameters())
