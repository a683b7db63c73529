"""Gaussian latents, and categorical ones without uniform mixture, against torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Categorical, Normal
from torch.distributions import kl_divergence as expected_kl

from rl_lab.components.nn.latents import CategoricalLatent, GaussianLatent, make_latent, noise_spec
from rl_lab.errors import ConfigError


def test_gaussian_statistics_by_hand():
    raw = torch.tensor([[1.0, -2.0, 0.0, 2.0]])  # means 1 and -2, raw deviations 0 and 2
    softplus = GaussianLatent(2).statistics(raw)
    assert softplus[0, :, 0].tolist() == [1.0, -2.0]
    expected = [math.log(2.0) + 0.1, math.log(1.0 + math.exp(2.0)) + 0.1]
    assert softplus[0, :, 1].tolist() == pytest.approx(expected)
    sigmoid = GaussianLatent(2, std_form="sigmoid2").statistics(raw)
    assert sigmoid[0, :, 1].tolist() == pytest.approx([1.1, 2.0 / (1.0 + math.exp(-1.0)) + 0.1])


def test_gaussian_kl_entropy_and_sample():
    latent = GaussianLatent(3)
    p, q = (latent.statistics(torch.randn(5, 6)) for _ in range(2))
    first, second = (Normal(x[..., 0], x[..., 1]) for x in (p, q))
    assert torch.allclose(latent.kl_divergence(p, q), expected_kl(first, second).sum(-1), atol=1e-5)
    assert torch.allclose(latent.entropy(p), first.entropy().sum(-1), atol=1e-5)
    raw, noise = torch.randn(5, 6, requires_grad=True), torch.randn(5, 3)
    sample, statistics = latent.draw(raw, noise)
    assert torch.allclose(sample[..., 0], statistics[..., 0] + statistics[..., 1] * noise)
    assert torch.autograd.grad(sample.sum(), raw)[0].abs().min() > 0.0
    assert torch.equal(latent.mode(statistics)[..., 0], statistics[..., 0])
    assert torch.equal(latent.from_column(latent.to_column(sample)), sample)


def test_categorical_without_mixture_is_finite():
    """Probabilities of a softmax may round to 0; the KL and its gradient must stay finite."""
    latent = CategoricalLatent(1, 3, unimix=0.0)
    raw = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    other = torch.tensor([[0.0, 1.0, 0.0]])
    sample, statistics = latent.draw(raw, torch.tensor([[0.5]]))
    kl = latent.kl_divergence(statistics, latent.statistics(other))
    expected = expected_kl(Categorical(logits=raw.detach()), Categorical(logits=other))
    assert torch.allclose(kl, expected) and sample[0, 0].tolist() == [1.0, 0.0, 0.0]
    kl.sum().backward()
    assert torch.isfinite(raw.grad).all()


def test_noise_and_columns():
    gaussian, categorical = GaussianLatent(4), CategoricalLatent(4, 8)
    assert (noise_spec(gaussian, 2).shape, noise_spec(gaussian, 2).kind) == ((2, 4), "normal")
    assert (noise_spec(categorical, 2, 3).shape, noise_spec(categorical).kind) == ((2, 3, 4), "uniform")
    assert (gaussian.column.dtype, categorical.column.dtype) == ("float32", "uint8")
    stoch = categorical.from_column(torch.tensor([[0, 7, 3, 3]]))
    assert categorical.to_column(stoch).tolist() == [[0, 7, 3, 3]]


def test_wrong_settings():
    options = {"unimix": 0.0, "std_form": "softplus", "min_std": 0.1}
    with pytest.raises(ConfigError, match=r"size\.classes=1"):
        make_latent("gaussian", 4, 8, **options)
    with pytest.raises(ConfigError, match=r"components.rssm.latent is 'gauss'"):
        make_latent("gauss", 4, 1, **options)
    with pytest.raises(ConfigError, match=r"components.rssm.std_form"):
        make_latent("gaussian", 4, 1, **options | {"std_form": "exp"})


@pytest.mark.parametrize("unimix", [0.0, 0.01])
def test_fused_sample_equals_plain(unimix: float):
    results = []
    raw, noise, weight = torch.randn(2, 5, 12), torch.rand(2, 5, 3), torch.randn(2, 5, 3, 4)
    for fast in (False, True):
        latent = CategoricalLatent(3, 4, unimix=unimix)
        latent.fast = fast
        logits = raw.clone().requires_grad_()
        sample, statistics = latent.draw(logits, noise)
        (sample * weight + statistics.exp() * weight.square()).sum().backward()
        results.append((sample.detach(), statistics.detach(), logits.grad))
    assert torch.equal(results[0][0], results[1][0])
    for plain, fused in zip(*results):
        assert torch.allclose(plain, fused, atol=1e-6)
