"""The policies of DreamerV1 (tanh of a normal) and V2 (truncated normal), straight-through actions, exploration."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from rl_lab.components.controllers.dreamer import DreamerActorController
from rl_lab.components.nn.actions import TanhNormalPolicy, TruncatedNormalPolicy, make_policy
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ActMode
from tests.workflows.dreamer_case import CONTINUOUS, DISCRETE, MULTI, vector_spec

ONE = ActionSpec("continuous", (1,), low=(-1.0,), high=(1.0,))
GRID = torch.linspace(-0.99999, 0.99999, 400001).unsqueeze(-1)


def density(policy: Any, raw: torch.Tensor) -> torch.Tensor:
    return policy.log_prob_and_entropy(raw.expand(len(GRID), -1), GRID)[0].exp()


@pytest.mark.parametrize("make", [TanhNormalPolicy, TruncatedNormalPolicy])
@pytest.mark.parametrize("raw", [[0.3, -3.0], [-2.0, -4.0], [0.0, 0.5]])
def test_density_and_entropy_by_integration(make: Any, raw: list[float]):
    options = {"init_std": 1.0} if make is TanhNormalPolicy else {}
    policy, raw = make(ONE, **options), torch.tensor([raw])
    found, step = density(policy, raw), float(GRID[1] - GRID[0])
    assert float(found.sum() * step) == pytest.approx(1.0, abs=2e-3)
    entropy = -(found * found.clamp(min=1e-30).log()).sum() * step
    _, ours = policy.log_prob_and_entropy(raw, torch.zeros(1, 1))
    assert float(ours) == pytest.approx(float(entropy), abs=1e-2)


def test_tanh_normal_matches_torch():
    policy = TanhNormalPolicy(CONTINUOUS, init_std=2.0, min_std=1e-4, mean_scale=5.0)
    raw = torch.randn(6, 4)
    mean = 5.0 * torch.tanh(raw[:, :2] / 5.0)
    std = torch.log1p(torch.exp(raw[:, 2:] + math.log(math.exp(2.0) - 1.0))) + 1e-4
    reference = TransformedDistribution(Normal(mean, std), TanhTransform())
    noise = torch.randn(6, 2)
    action = policy.sample(raw, noise)
    assert torch.allclose(action, torch.tanh(mean + std * noise), atol=1e-6)
    inner = action.clamp(-0.999, 0.999)
    log_prob, _ = policy.log_prob_and_entropy(raw, inner)
    assert torch.allclose(log_prob, reference.log_prob(inner).sum(-1), atol=1e-3)


def test_initial_deviations():
    """danijar/dreamer: 5 for a raw output of 0; danijar/dreamerv2: 2 sigmoid(0) + 0.1."""
    raw = torch.zeros(1, 2)
    assert float(TanhNormalPolicy(ONE)._mean_std(raw)[1]) == pytest.approx(5.0001, rel=1e-5)
    assert float(TruncatedNormalPolicy(ONE)._mean_std(raw)[1]) == pytest.approx(1.1)


def test_tanh_normal_mode_is_the_most_probable():
    policy = TanhNormalPolicy(ONE, init_std=1.0)
    for raw in ([0.4, -3.0], [-1.5, -3.0]):  # narrow: one maximum
        found = density(policy, torch.tensor([raw]))
        best = float(GRID[found.argmax()])
        assert float(policy.mode(torch.tensor([raw]))) == pytest.approx(best, abs=0.05)
    wide = policy.mode(torch.tensor([[1.0, 4.0]]))  # wide: most of the mass is at the ends
    assert float(wide) > 0.99


def test_truncated_normal_sample_is_the_inverse_distribution():
    policy = TruncatedNormalPolicy(ONE)
    raw = torch.tensor([[0.5, 1.0]], requires_grad=True)
    mean, std = policy._mean_std(raw)
    place = torch.tensor([[0.1]])
    action = policy.sample(raw, place)
    whole = Normal(mean, std)
    low, high = whole.cdf(torch.tensor(-1.0)), whole.cdf(torch.tensor(1.0))
    assert float((whole.cdf(action) - low) / (high - low)) == pytest.approx(0.1, abs=1e-5)
    # The gradient of a sample, by finite differences.
    found = torch.autograd.grad(action.sum(), raw)[0]
    for index in range(2):
        step = torch.zeros_like(raw)
        step[0, index] = 1e-2
        slope = (policy.sample(raw + step, place) - policy.sample(raw - step, place)) / 2e-2
        assert float(found[0, index]) == pytest.approx(float(slope), abs=1e-3)
    assert float(policy.mode(raw)) == pytest.approx(float(torch.tanh(raw[0, 0])))


def test_truncated_normal_stays_inside():
    policy = TruncatedNormalPolicy(CONTINUOUS)
    raw = torch.tensor([[9.0, -9.0, -9.0, 9.0]]).repeat(3, 1).requires_grad_()
    noise = torch.tensor([[0.0, 0.0], [0.5, 0.5], [1.0 - 1e-7, 1.0 - 1e-7]])
    action = policy.sample(raw, noise)
    assert action.abs().max() < 1.0
    action.sum().backward()
    assert torch.isfinite(raw.grad).all()
    log_prob, entropy = policy.log_prob_and_entropy(raw, action)
    assert torch.isfinite(log_prob).all() and torch.isfinite(entropy).all()


@pytest.mark.parametrize("action", [DISCRETE, MULTI])
def test_one_hot_actions_equal_stored_ones(action: ActionSpec):
    policy = make_policy(action, unimix=0.1)
    raw = torch.randn(7, policy.width, requires_grad=True)
    noise = torch.rand(7, *policy.noise_shape)
    stored, vectors = policy.sample(raw, noise), policy.sample_one_hot(raw, noise)
    chosen = [part.argmax(-1) for part in vectors.split(action.choices, -1)]
    assert torch.equal(stored, chosen[0] if action.kind == "discrete" else torch.stack(chosen, -1))
    ours, expected = policy.log_prob_of_one_hot(raw, vectors), policy.log_prob_and_entropy(raw, stored)[0]
    assert torch.allclose(ours, expected, atol=1e-6)
    # Straight through: the gradient of the sample is that of the mixed probabilities.
    weight = torch.randn_like(vectors)
    found = torch.autograd.grad((vectors * weight).sum(), raw)[0]
    parts = [0.9 * torch.softmax(part, -1) for part in raw.split(action.choices, -1)]
    assert torch.allclose(
        found, torch.autograd.grad((torch.cat(parts, -1) * weight).sum(), raw)[0], atol=1e-6
    )


def actor_of(action: ActionSpec, **options: Any) -> DreamerActorController:
    torch.manual_seed(0)
    return DreamerActorController(spec=vector_spec(action), features=4, units=8, layers=1, **options)


def test_exploration_noise():
    feature = torch.randn(2000, 4)
    noisy, quiet = (actor_of(CONTINUOUS, distribution="tanh_normal", noise=n) for n in (0.3, 0.0))
    quiet.policy.min_std = noisy.policy.min_std = 1e-6
    quiet.policy.shift = noisy.policy.shift = -100.0  # almost deterministic: what is left is the noise

    def acted(actor: Any, sample: bool) -> torch.Tensor:
        return actor.act(feature, ActMode(sample=sample, generator=torch.Generator().manual_seed(1)))

    difference = acted(noisy, True) - acted(quiet, True)
    inside = acted(noisy, True).abs() < 1.0
    assert float(difference[inside].std()) == pytest.approx(0.3, abs=0.03)
    assert acted(noisy, True).abs().max() <= 1.0
    assert torch.equal(acted(noisy, False), acted(quiet, False))  # evaluation of the mode has none


def test_random_choices_as_exploration():
    actor = actor_of(DISCRETE, noise=0.5)
    actor.mlp.out.bias.data.copy_(torch.tensor([50.0, 0.0, 0.0]))  # always the first
    feature, mode = torch.randn(3000, 4), ActMode(generator=torch.Generator().manual_seed(1))
    assert float((actor.act(feature, mode) == 0).float().mean()) == pytest.approx(0.5 + 0.5 / 3, abs=0.03)


def test_gradient_auto():
    assert actor_of(CONTINUOUS, gradient="auto").gradient == "dynamics"
    assert actor_of(DISCRETE, gradient="auto").gradient == "reinforce"
    assert actor_of(DISCRETE, gradient="both").through_dynamics
    assert not actor_of(DISCRETE, gradient="both").has_fast_form
    assert actor_of(CONTINUOUS, gradient="dynamics").has_fast_form
    with pytest.raises(ConfigError, match=r"controllers.actor.distribution is 'tanh'"):
        actor_of(CONTINUOUS, distribution="tanh")
