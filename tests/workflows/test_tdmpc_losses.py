"""Losses and settings of TD-MPC against values computed by hand."""

import pytest
import torch

from rl_lab.errors import ConfigError
from rl_lab.workflows.tdmpc.losses import over_time, policy_loss, td_target, total_loss
from rl_lab.workflows.tdmpc.settings import PlanSchedule, TDMPCSettings, discount_for
from tests.workflows.tdmpc_case import tdmpc_config


def test_td_target_by_hand():
    """Termination stops bootstrapping; truncation does not (it is not an argument)."""
    reward = torch.tensor([[1.0, 2.0]])
    terminated = torch.tensor([[False, True]])
    value = torch.tensor([[10.0, float("inf")]])  # the value after termination is unused
    assert td_target(reward, terminated, value, 0.9).tolist() == [[10.0, 2.0]]
    by_task = td_target(reward, terminated, value, torch.tensor([0.5, 0.9]))
    assert by_task.tolist() == [[6.0, 2.0]]


@pytest.mark.parametrize(
    ("length", "discount"),
    [(500, 0.99), (100, 0.95), (1000, 0.995), (10_000, 0.995), (50, 0.95), (250, 0.98)],
)
def test_discount_heuristic(length, discount):
    """DMC's 500 decisions 0.99, Meta-World's 100 the least, 0.95; never above 0.995 (nicklashansen/tdmpc2)."""
    assert discount_for(length, low=0.95, high=0.995) == pytest.approx(discount)


def test_over_time_by_hand():
    """Two steps, ρ = ½: Σ ρᵗ ℓ_t / H = (1 · 4 + ½ · 2) / 2."""
    loss = torch.tensor([[4.0], [2.0]])
    weights = torch.tensor([1.0, 0.5]) / 2
    assert over_time(loss, weights).tolist() == [2.5]


def test_total_loss_by_hand():
    losses = {"reward": torch.tensor([1.0, 3.0]), "value": torch.tensor([10.0, 200.0])}
    scales = {"reward": 0.5, "value": 0.1}
    assert total_loss(losses, scales).item() == pytest.approx((0.5 + 1.0 + 1.5 + 20.0) / 2)
    limited = total_loss(losses, scales, limit=100.0)
    assert limited.item() == pytest.approx((0.5 + 1.0 + 1.5 + 10.0) / 2)
    weighted = total_loss(losses, scales, weight=torch.tensor([1.0, 0.0]))
    assert weighted.item() == pytest.approx((0.5 + 1.0) / 2)


def test_policy_loss_by_hand():
    value = torch.tensor([[1.0, 3.0], [4.0, 4.0]])
    entropy = torch.tensor([[2.0, 2.0], [0.0, 0.0]])
    weight = torch.tensor([1.0, 0.5])
    loss = policy_loss(value, entropy, 0.5, weight)
    assert loss.item() == pytest.approx(-((2.0 + 1.0) * 1.0 + 4.0 * 0.5) / 2)


def test_schedule_is_linear():
    """TD-MPC: deviation 0.5 → 0.05 and horizon 1 → 5 over 25,000 decisions."""
    schedule = PlanSchedule(25_000, (0.5, 0.05), (1, 5))
    assert schedule.at(0) == {"min_std": 0.5, "horizon": 1.0}
    assert schedule.at(12_500) == {"min_std": pytest.approx(0.275), "horizon": 3.0}
    assert schedule.at(24_999)["horizon"] == 4.0
    assert schedule.at(10**6) == {"min_std": pytest.approx(0.05), "horizon": 5.0}


def settings(**changes):
    return TDMPCSettings.from_config(
        tdmpc_config(**{f"algorithm__{k}": v for k, v in changes.items()}).algorithm
    )


def test_discounts_per_task():
    assert settings().discounts(1) == [pytest.approx(0.99)]
    assert settings(discount=0.9).discounts(2) == [0.9, 0.9]
    assert settings(episode_length=[500, 100]).discounts(2) == [pytest.approx(0.99), 0.95]
    with pytest.raises(ConfigError, match="3 tasks"):
        settings(episode_length=[500, 100]).discounts(3)


def test_settings_errors():
    algorithm = dict(tdmpc_config().algorithm)
    del algorithm["rho"]
    with pytest.raises(ConfigError, match=r"algorithm\.rho.*algorithm: tdmpc2"):
        TDMPCSettings.from_config(algorithm)
    with pytest.raises(ConfigError, match="Did you mean 'reward'"):
        settings(loss_scales={"rewards": 1.0})
    with pytest.raises(ConfigError, match="has no value for"):
        settings(loss_scales={"reward": 1.0})
    with pytest.raises(ConfigError, match="min_std"):
        settings(plan_schedule={"std": [1, 2]})
    with pytest.raises(ConfigError, match="horizon"):
        settings(horizon=0)
