import math

import pytest
import torch

from rl_lab.components.nn.categorical import (
    entropy,
    kl_divergence,
    one_hot,
    sample_index,
    straight_through,
    unimix_probs,
)


def test_unimix():
    probs = unimix_probs(torch.tensor([0.0, math.log(3.0)]), 0.01)
    assert torch.allclose(probs, torch.tensor([0.99 * 0.25 + 0.005, 0.99 * 0.75 + 0.005]))


def test_unimix_kl():
    # Two variables of two classes; the mixture turns probabilities (1, 0) into (0.995, 0.005).
    p = unimix_probs(torch.tensor([[100.0, -100.0], [100.0, -100.0]])).log()
    q = unimix_probs(torch.tensor([[0.0, 0.0], [-100.0, 100.0]])).log()
    first = 0.995 * math.log(0.995 / 0.5) + 0.005 * math.log(0.005 / 0.5)
    second = 0.995 * math.log(0.995 / 0.005) + 0.005 * math.log(0.005 / 0.995)
    assert kl_divergence(p, q).item() == pytest.approx(first + second, rel=1e-4)
    assert kl_divergence(p, p).item() == pytest.approx(0.0, abs=1e-6)


def test_entropy_sums_over_variables():
    log_p = torch.full((3, 5, 4), 0.25).log()
    assert torch.allclose(entropy(log_p), torch.full((3,), 5 * math.log(4.0)))


def test_sample_index():
    probs = torch.tensor([0.2, 0.5, 0.3])
    noise = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71, 0.9999999])
    assert sample_index(probs.expand(6, 3), noise).tolist() == [0, 0, 1, 1, 2, 2]


def test_sample_index_stays_in_range():
    assert sample_index(torch.tensor([[0.3, 0.3, 0.3]]), torch.tensor([0.99])).tolist() == [2]


def test_sample_frequencies():
    probs = torch.tensor([0.1, 0.2, 0.3, 0.4])
    noise = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(sample_index(probs.expand(20000, 4), noise), minlength=4) / 20000
    assert torch.allclose(counts, probs, atol=0.015)


def test_straight_through_sample_and_gradient():
    logits = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    probs = unimix_probs(logits)
    noise = torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    sample = straight_through(probs, noise)
    assert torch.equal(sample.detach(), one_hot(sample_index(probs.detach(), noise), 4))
    direction = torch.randn(6, 3, 4, generator=torch.Generator().manual_seed(2))
    (through,) = torch.autograd.grad((sample * direction).sum(), logits, retain_graph=True)
    (direct,) = torch.autograd.grad((probs * direction).sum(), logits)
    assert torch.allclose(through, direct)
