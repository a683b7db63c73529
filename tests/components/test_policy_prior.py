"""Policies of TD-MPC: ranges, entropies, gradients, masks."""

import math

import pytest
import torch

from rl_lab.components.controllers.tdmpc import CategoricalPrior, DeterministicPrior, GaussianPrior
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

OBS = {"vector": ArraySpec((3,), "float32")}
CONTINUOUS = Spec("toy", OBS, ActionSpec("continuous", (2,)))
DISCRETE = Spec("toy", OBS, ActionSpec("discrete", (), (3,)))
MULTI = Spec("toy", OBS, ActionSpec("multi_discrete", (2,), (2, 3)))


def fixed(policy, raw):
    """The policy with an output that does not depend on the latent."""
    last = policy.mlp.layers[-1]
    last.weight0.data.zero_()
    last.bias.data.copy_(torch.tensor(raw))
    return policy


def test_gaussian_prior():
    """Raw output (m, 0): the log std is the middle of its range, −4; entropy as in the docstring."""
    policy = fixed(GaussianPrior(spec=CONTINUOUS, latent=4, units=8), [0.3, -0.2, 0.0, 0.0])
    latent, noise = torch.randn(1, 4), torch.tensor([[1.0, -2.0]])
    action, entropy = policy.explore(latent, noise)
    std = math.exp(-4.0)
    expected = [math.tanh(0.3 + std), math.tanh(-0.2 - 2 * std)]
    assert torch.allclose(action, torch.tensor([expected]), atol=1e-6)
    assert torch.allclose(policy.sample(latent, noise), action)
    gauss = sum(-0.5 * e * e + 4.0 - 0.5 * math.log(2 * math.pi) for e in (1.0, -2.0))
    correction = sum(math.log(1 - a * a + 1e-6) for a in expected)
    assert entropy.item() == pytest.approx(-(2 * gauss - correction), rel=1e-5)


def test_masked_dimensions():
    policy = fixed(GaussianPrior(spec=CONTINUOUS, latent=4, units=8), [0.3, 5.0, 0.0, 3.0])
    noise, mask = torch.tensor([[1.0, -2.0]]), torch.tensor([[1.0, 0.0]])
    action, entropy = policy.explore(torch.randn(1, 4), noise, mask=mask)
    assert action[0, 1] == 0.0
    gauss = -0.5 + 4.0 - 0.5 * math.log(2 * math.pi)
    assert entropy.item() == pytest.approx(-(gauss - math.log(1 - action[0, 0].item() ** 2 + 1e-6)), rel=1e-5)


def test_entropy_grows_with_std():
    policy = GaussianPrior(spec=CONTINUOUS, latent=4, units=8)
    noise = torch.randn(2000, 2)
    entropies = []
    for raw in (-1.0, 0.0, 0.3):
        fixed(policy, [0.0, 0.0, raw, raw])
        entropies.append(policy.explore(torch.zeros(2000, 4), noise)[1].mean().item())
    assert entropies == sorted(entropies)


def test_deterministic_noise_is_clipped():
    policy = fixed(DeterministicPrior(spec=CONTINUOUS, latent=4, units=8, std=0.1), [0.5, 3.0])
    action = policy.sample(torch.zeros(1, 4), torch.tensor([[9.0, 9.0]]))
    assert action[0, 0].item() == pytest.approx(math.tanh(0.5) + 0.3)
    assert action[0, 1].item() == 1.0
    action.sum().backward()
    assert (policy.mlp.layers[-1].bias.grad.abs() > 0).all()  # also where the action is clipped
    _, entropy = policy.explore(torch.zeros(3, 4), torch.randn(3, 2))
    assert torch.equal(entropy, torch.zeros(3))


@pytest.mark.parametrize("spec", [DISCRETE, MULTI], ids=lambda s: s.action.kind)
def test_categorical_prior(spec):
    policy = CategoricalPrior(spec=spec, latent=4, units=8)
    noise = torch.rand(6, len(spec.action.choices))
    action, entropy = policy.explore(torch.randn(6, 4), noise)
    assert action.shape == (6, spec.action.size)
    for part in action.split(spec.action.choices, -1):
        assert torch.allclose(part.sum(-1), torch.ones(6)) and set(part.detach().unique().tolist()) <= {
            0.0,
            1.0,
        }
    assert (entropy > 0).all() and (entropy <= sum(math.log(n) for n in spec.action.choices) + 1e-5).all()
    (action * torch.arange(spec.action.size)).sum().backward()
    assert policy.mlp.layers[-1].bias.grad.abs().sum() > 0


def test_categorical_frequencies():
    policy = fixed(
        CategoricalPrior(spec=DISCRETE, latent=4, units=8, unimix=0.0),
        [math.log(0.2), math.log(0.5), math.log(0.3)],
    )
    action = policy.sample(
        torch.zeros(4000, 4), torch.rand(4000, 1, generator=torch.Generator().manual_seed(0))
    )
    assert torch.allclose(action.mean(0), torch.tensor([0.2, 0.5, 0.3]), atol=0.03)


def test_wrong_action_kind():
    with pytest.raises(ConfigError, match="tdmpc_categorical_policy"):
        GaussianPrior(spec=DISCRETE, latent=4, units=8)
    with pytest.raises(ConfigError, match="continuous"):
        CategoricalPrior(spec=CONTINUOUS, latent=4, units=8)
