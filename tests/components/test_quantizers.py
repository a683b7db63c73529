"""Quantizers: a learned codebook, an averaged codebook with revival, and FSQ."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from rl_lab.components.nn.quantizers import FSQ, EMAQuantizer, VectorQuantizer, entropy_bits
from rl_lab.errors import ConfigError

QUANTIZERS = {
    "vq": lambda: VectorQuantizer(vocab=12, dim=3),
    "ema": lambda: EMAQuantizer(vocab=12, dim=3),
    "fsq": lambda: FSQ(levels=(4, 3, 5)),
}


@pytest.fixture(params=sorted(QUANTIZERS))
def quantizer(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    return QUANTIZERS[request.param]()


def test_tokens_match_vectors(quantizer):
    vectors = torch.randn(50, 3, requires_grad=True)
    found = quantizer(vectors)
    assert found.tokens.dtype == torch.int64 and int(found.tokens.max()) < quantizer.vocab
    torch.testing.assert_close(found.vectors, quantizer.embed(found.tokens).float(), atol=1e-6, rtol=1e-5)
    assert found.loss.shape == (50,)
    found.vectors.sum().backward()
    assert vectors.grad is not None and vectors.grad.abs().sum() > 0  # straight through


def test_vector_quantizer():
    quantizer = VectorQuantizer(vocab=2, dim=2, commitment=0.5)
    quantizer.codes.weight.data = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    vectors = torch.tensor([[0.2, 0.0], [0.9, 1.0]], requires_grad=True)
    found = quantizer(vectors)
    assert found.tokens.tolist() == [0, 1]
    torch.testing.assert_close(found.loss, 1.5 * torch.tensor([0.04, 0.01]) / 2)
    found.loss.sum().backward()
    torch.testing.assert_close(
        vectors.grad, 0.5 * torch.tensor([[0.2, 0.0], [-0.1, 0.0]]), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        quantizer.codes.weight.grad, -torch.tensor([[0.2, 0.0], [-0.1, 0.0]]), atol=1e-6, rtol=1e-5
    )


def test_ema_codes_follow_vectors():
    torch.manual_seed(0)
    quantizer = EMAQuantizer(vocab=2, dim=2, code_rate=0.9, usage_rate=0.5)
    quantizer.table.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    vectors = torch.tensor([[3.0, 0.3], [2.0, 0.5], [0.0, 9.0]])
    tokens = quantizer(vectors).tokens
    assert tokens.tolist() == [0, 0, 1]
    quantizer.learn(vectors, tokens, torch.tensor([True, True, False]), torch.zeros(2))
    mean = F.normalize(vectors[:2], dim=-1).mean(0)
    expected = F.normalize(0.9 * torch.tensor([1.0, 0.0]) + 0.1 * mean, dim=-1)
    torch.testing.assert_close(quantizer.table[0], expected)
    assert quantizer.table[1].tolist() == [0.0, 1.0]  # its only vector was masked
    assert quantizer.usage.tolist() == [0.75, 0.25]
    assert int(quantizer.updates) == 1


def collapse(quantizer: EMAQuantizer, updates: int, codes: int = 1) -> None:
    """All vectors are assigned to a few codes."""
    tokens, mask = torch.arange(64) % codes, torch.ones(64, dtype=torch.bool)
    for _ in range(updates):
        quantizer.learn(quantizer.table[tokens], tokens, mask, torch.rand(quantizer.vocab))


def test_dead_codes_are_revived():
    torch.manual_seed(0)
    vocab = 64
    quantizer = EMAQuantizer(vocab=vocab, dim=4, usage_rate=0.5, revive_updates=1000)
    dead = quantizer.table[1:].clone()
    collapse(quantizer, 12)
    assert float(entropy_bits(quantizer.usage)) < 4.0  # log2(64) - 2
    assert not torch.allclose(quantizer.table[1:], dead)
    torch.testing.assert_close(
        quantizer.table[1:], quantizer.table[:1].expand(vocab - 1, 4), atol=1e-5, rtol=1e-5
    )


def test_revival_ends():
    torch.manual_seed(0)
    quantizer = EMAQuantizer(vocab=64, dim=4, usage_rate=0.5, revive_updates=0)
    before = quantizer.table[4:].clone()
    collapse(quantizer, 12, codes=4)
    assert 1.0 < float(entropy_bits(quantizer.usage)) < 4.0
    assert float(quantizer.usage[4:].max()) < 0.1 / 64
    torch.testing.assert_close(quantizer.table[4:], before)
    collapse(quantizer, 12)  # below one bit revival is always allowed
    assert float(entropy_bits(quantizer.usage)) < 1.0
    assert not torch.allclose(quantizer.table[4:], before)


def test_revival_ignores_masked_vectors():
    torch.manual_seed(0)
    quantizer = EMAQuantizer(vocab=16, dim=2, usage_rate=0.0, revive_updates=10)
    vectors = torch.tensor([[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 3)
    mask = torch.tensor([False] * 5 + [True] * 3)
    quantizer.learn(vectors, torch.zeros(8, dtype=torch.int64), mask, torch.rand(16))
    torch.testing.assert_close(quantizer.table[1:], torch.tensor([[1.0, 0.0]]).expand(15, 2))


def test_fsq_codes_are_one_to_one():
    quantizer = FSQ(levels=(4, 3, 5))
    tokens = torch.arange(quantizer.vocab)
    codes = quantizer.embed(tokens)
    assert len(torch.unique(codes, dim=0)) == 60 == quantizer.vocab
    reached = quantizer(torch.randn(20000, 3) * 3).tokens
    assert len(torch.unique(reached)) == 60
    with pytest.raises(ConfigError, match="two levels"):
        FSQ(levels=(1, 3))
