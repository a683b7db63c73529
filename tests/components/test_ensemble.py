"""A stacked ensemble computes the same as separate networks."""

import pytest
import torch
import torch.nn.functional as F

from rl_lab.components.controllers.tdmpc import QEnsembleController, choose_pair
from rl_lab.components.nn.moving_averages import SlowCopy
from rl_lab.components.nn.normed_mlp import EnsembleMLP
from rl_lab.errors import ConfigError
from rl_lab.records import ActionSpec, ArraySpec, Spec

SPEC = Spec("toy", {"vector": ArraySpec((3,), "float32")}, ActionSpec("continuous", (2,)))


def randomise(module):
    torch.manual_seed(1)
    for parameter in module.parameters():
        parameter.data.normal_(std=0.5)
    return module


def alone(ensemble, member, *parts):
    """One member, computed separately."""
    x = torch.cat(parts, -1)
    layers = ensemble.weights()
    for layer, kind in zip(layers, ensemble.layer_kinds):
        names = sorted(name for name in layer if name.startswith("input"))
        weight = torch.cat([layer[name][member] for name in names], 0)
        x = x @ weight + layer["bias"][member, 0]
        if kind.startswith("norm"):
            x = F.layer_norm(x, x.shape[-1:], layer["scale"][member, 0], layer["shift"][member, 0])
        activation = kind.rpartition("+")[2]
        x = (
            x
            if activation == "plain"
            else torch.tanh(x)
            if activation == "tanh"
            else getattr(F, activation)(x)
        )
    return x


@pytest.mark.parametrize("hidden", [("norm+mish", "norm+mish"), ("norm+tanh", "elu")])
def test_members_are_independent(hidden):
    ensemble = randomise(EnsembleMLP(4, [3, 2], 8, 5, hidden=hidden))
    a, b = torch.randn(2, 6, 3), torch.randn(2, 6, 2)
    together = ensemble(a, b)
    assert together.shape == (4, 2, 6, 5)
    for member in range(4):
        assert torch.allclose(together[member], alone(ensemble, member, a, b), atol=1e-5)
    some = ensemble(a, b, weights=ensemble.select(torch.tensor([2, 0])))
    assert torch.allclose(some, together[[2, 0]], atol=1e-6)


def test_ensemble_parameter_count():
    ensemble = EnsembleMLP(5, [512, 6], 512, 101)
    one = (518 * 512 + 3 * 512) + (512 * 512 + 3 * 512) + (512 * 101 + 101)
    assert sum(p.numel() for p in ensemble.parameters()) == 5 * one == 2_911_225


def test_selected_members_are_detached():
    ensemble = randomise(EnsembleMLP(3, [3, 2], 8, 1))
    latent, action = torch.randn(4, 3), torch.randn(4, 2, requires_grad=True)
    ensemble(latent, action, weights=ensemble.select(torch.tensor([0, 1]))).sum().backward()
    assert action.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in ensemble.parameters())


def test_dropout_depends_on_noise_only():
    ensemble = randomise(EnsembleMLP(2, [3], 4, 1, hidden=("elu",)))
    x = torch.randn(5, 3)
    none, all_but = torch.ones(2, 5, 4), torch.zeros(2, 5, 4)
    kept = ensemble(x, dropout=none, rate=0.5)
    layer = ensemble.weights()
    hidden = F.elu((x @ layer[0]["input0"][0] + layer[0]["bias"][0]) * 2.0)  # kept units are scaled up
    assert torch.allclose(kept[0], hidden @ layer[1]["input0"][0] + layer[1]["bias"][0], atol=1e-5)
    gone = ensemble(x, dropout=all_but, rate=0.5)
    assert torch.allclose(gone, layer[1]["bias"].expand(-1, 5, -1))


def test_slow_copy_averages_buffers():
    ensemble = randomise(EnsembleMLP(2, [3], 4, 1))
    slow = SlowCopy(ensemble)
    x = torch.randn(5, 3)
    assert torch.equal(slow.network(x), ensemble(x))
    assert list(slow.parameters()) == []
    randomised = {name: p.clone() for name, p in ensemble.named_parameters()}
    for parameter in ensemble.parameters():
        parameter.data += 1.0
    slow.update(ensemble, 0.25)
    for name, buffer in slow.network.named_buffers():
        assert torch.allclose(buffer, randomised[name] + 0.25)


def critic(**options):
    return randomise(QEnsembleController(spec=SPEC, latent=3, units=8, bins=11, **options))


def test_target_is_minimum_of_two_members():
    q = critic(members=4)
    q.update_slow(1.0)
    latent, action = torch.randn(6, 3), torch.randn(6, 2)
    values = q.mean(q(latent, action))
    pair = torch.tensor([3, 1])
    assert torch.allclose(q.target(latent, action, pair), torch.minimum(values[3], values[1]), atol=1e-5)
    weights = q.online.select(pair)
    assert torch.allclose(q.value(latent, action, weights), (values[3] + values[1]) / 2, atol=1e-5)
    least = critic(members=4, reduce="min")
    assert torch.allclose(
        least.value(latent, action, weights), torch.minimum(values[3], values[1]), atol=1e-5
    )


def test_initial_values_are_zero():
    q = QEnsembleController(spec=SPEC, latent=3, units=8)
    assert q.mean(q(torch.randn(4, 3), torch.randn(4, 2))).abs().max() < 1e-6


def test_pairs_are_uniform_and_distinct():
    generator = torch.Generator().manual_seed(0)
    pairs = [tuple(sorted(choose_pair(torch.rand(4, generator=generator)).tolist())) for _ in range(1200)]
    counts = {pair: pairs.count(pair) for pair in set(pairs)}
    assert len(counts) == 6 and min(counts.values()) > 140


def test_critic_error_messages():
    with pytest.raises(ConfigError, match="members=1 must be at least 2"):
        critic(members=1)
    with pytest.raises(ConfigError, match="mean or min"):
        critic(reduce="max")
