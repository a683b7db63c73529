"""Quantizers: learned and averaged codebooks, FSQ, LFQ, residual codebooks, and none."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from rl_lab.components.nn.quantizers import (
    FSQ,
    LFQ,
    Continuous,
    EMAQuantizer,
    ResidualVQ,
    VectorQuantizer,
    entropy_bits,
)
from rl_lab.errors import ConfigError

QUANTIZERS = {
    "vq": lambda: VectorQuantizer(vocab=12, dim=3),
    "ema": lambda: EMAQuantizer(vocab=12, dim=3),
    "fsq": lambda: FSQ(levels=(4, 3, 5)),
    "lfq": lambda: LFQ(dim=3),
    "residual": lambda: ResidualVQ(codes=4, stages=3, dim=3),
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
    quantizer.learn(vectors, tokens, torch.tensor([True, True, False]), torch.zeros(5))
    mean = F.normalize(F.normalize(vectors[:2], dim=-1).mean(0), dim=-1)
    expected = F.normalize(0.9 * torch.tensor([1.0, 0.0]) + 0.1 * mean, dim=-1)
    torch.testing.assert_close(quantizer.table[0], expected)
    assert quantizer.table[1].tolist() == [0.0, 1.0]  # its only vector was masked
    assert quantizer.usage.tolist() == [0.75, 0.25]
    assert int(quantizer.updates) == 1


def test_ema_wide_clusters_move_codes_as_fast():
    """Worked by hand: vectors at 0° and 90° have the mean direction 45°, whatever the length of their mean."""
    quantizer = EMAQuantizer(vocab=2, dim=2, code_rate=0.5)
    quantizer.table.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    wide = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    quantizer.learn(wide, torch.tensor([0, 0]), torch.tensor([True, True]), torch.zeros(4))
    half = math.radians(22.5)  # half of the way from 0° to 45°
    torch.testing.assert_close(quantizer.table[0], torch.tensor([math.cos(half), math.sin(half)]))
    assert quantizer.table[1].tolist() == [-1.0, 0.0]


def collapse(quantizer: EMAQuantizer, updates: int, codes: int = 1) -> None:
    """All vectors are assigned to a few codes."""
    tokens, mask = torch.arange(64) % codes, torch.ones(64, dtype=torch.bool)
    for _ in range(updates):
        quantizer.learn(quantizer.table[tokens], tokens, mask, torch.rand(quantizer.noise_size(64)))


def test_dead_codes_are_revived():
    torch.manual_seed(0)
    vocab = 64
    quantizer = EMAQuantizer(vocab=vocab, dim=4, usage_rate=0.5, revive_updates=1000)
    dead = quantizer.table[1:].clone()
    collapse(quantizer, 3)
    assert float(entropy_bits(quantizer.usage)) < 4.0  # log2(64) - 2
    torch.testing.assert_close(
        quantizer.table[1:], dead
    )  # their usage, (1/8) / vocab, is not below (1/10) / vocab
    collapse(quantizer, 1)
    torch.testing.assert_close(
        quantizer.table[1:], quantizer.table[:1].expand(vocab - 1, 4), atol=1e-5, rtol=1e-5
    )


def learned_by_loop(quantizer, vectors, tokens, mask, noise):
    """Table and usage after one update, one code and one vector at a time."""
    vocab, rate = quantizer.vocab, quantizer.usage_rate
    table, usage = [list(row) for row in quantizer.table.tolist()], quantizer.usage.tolist()
    real = [n for n in range(len(tokens)) if mask[n]]
    unit = F.normalize(vectors, dim=-1)
    for code in range(vocab):
        mine = [n for n in real if int(tokens[n]) == code]
        usage[code] = rate * usage[code] + (1.0 - rate) * len(mine) / len(real)
        if mine:
            mean = F.normalize(sum(unit[n] for n in mine) / len(mine), dim=-1)
            old = quantizer.table[code]
            moved = quantizer.code_rate * old + (1.0 - quantizer.code_rate) * mean
            table[code] = F.normalize(moved, dim=-1).tolist()
    bits = -sum(share * math.log2(share) for share in usage if share > 0.0)
    allowed = bits < 1.0 or int(quantizer.updates) < quantizer.revive_updates
    if allowed and bits < math.log2(vocab) - 2.0:
        expired = [code for code in range(vocab) if usage[code] < 0.1 / vocab]
        expired.sort(key=lambda code: float(noise[len(tokens) + code]))
        real.sort(key=lambda n: float(noise[n]))
        for code, n in zip(expired, real):  # the shorter list ends it
            table[code], usage[code] = unit[n].tolist(), 1.0 / vocab
    return torch.tensor(table), torch.tensor(usage)


@pytest.mark.parametrize("count", [100, 20], ids=["more vectors than codes", "fewer vectors than codes"])
def test_learning_equals_plain_loop(count: int):
    generator = torch.Generator().manual_seed(0)
    quantizer = EMAQuantizer(vocab=64, dim=4, usage_rate=0.3, revive_updates=4)
    for update in range(6):
        vectors = torch.randn(count, 4, generator=generator)
        tokens = torch.randint(5, (count,), generator=generator)  # five codes: entropy below four bits
        mask = torch.rand(count, generator=generator) < 0.7
        noise = torch.rand(quantizer.noise_size(count), generator=generator)
        table, usage = learned_by_loop(quantizer, vectors, tokens, mask, noise)
        quantizer.learn(vectors, tokens, mask, noise)
        torch.testing.assert_close(quantizer.table, table)
        torch.testing.assert_close(quantizer.usage, usage)
        assert int(quantizer.updates) == update + 1


def test_revived_codes_are_different_vectors():
    quantizer = EMAQuantizer(vocab=16, dim=3, usage_rate=0.0, revive_updates=10)
    vectors = F.normalize(torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), dim=-1)
    noise = torch.rand(quantizer.noise_size(40), generator=torch.Generator().manual_seed(1))
    quantizer.learn(vectors, torch.zeros(40, dtype=torch.int64), torch.ones(40, dtype=torch.bool), noise)
    places = [int((vectors - code).abs().sum(-1).argmin()) for code in quantizer.table[1:]]
    torch.testing.assert_close(quantizer.table[1:], vectors[places])
    assert len(set(places)) == 15


def test_usage_of_revived_codes_is_reset():
    """Worked by hand: with a new usage of 1/vocab a code is not replaced again in the next update."""
    quantizer = EMAQuantizer(vocab=16, dim=2, usage_rate=0.5, revive_updates=100)
    quantizer.usage.copy_(torch.tensor([1.0] + [0.0] * 15))
    collapse(quantizer, 1)
    assert quantizer.usage.tolist() == [1.0] + [1.0 / 16] * 15
    revived = quantizer.table[1:].clone()
    collapse(quantizer, 3)  # usage 1/128, not below 1/160
    assert quantizer.usage.tolist() == [1.0] + [1.0 / 128] * 15
    torch.testing.assert_close(quantizer.table[1:], revived)


def test_revival_ends():
    torch.manual_seed(0)
    quantizer = EMAQuantizer(vocab=64, dim=4, usage_rate=0.5, revive_updates=0)
    before = quantizer.table[4:].clone()
    collapse(quantizer, 12, codes=4)
    assert 1.0 < float(entropy_bits(quantizer.usage)) < 4.0
    assert float(quantizer.usage[4:].max()) < 0.1 / 64
    torch.testing.assert_close(quantizer.table[4:], before)
    quantizer.usage.copy_(torch.tensor([1.0] + [0.0] * 63))
    collapse(quantizer, 1)  # below one bit revival is always allowed
    assert not torch.allclose(quantizer.table[4:], before)


def test_revival_ignores_masked_vectors():
    torch.manual_seed(0)
    quantizer = EMAQuantizer(vocab=16, dim=2, usage_rate=0.0, revive_updates=10)
    before = quantizer.table[1:].clone()
    vectors = torch.tensor([[0.0, 1.0]] * 5 + [[1.0, 0.0]] * 3)
    mask = torch.tensor([False] * 5 + [True] * 3)
    quantizer.learn(vectors, torch.zeros(8, dtype=torch.int64), mask, torch.rand(quantizer.noise_size(8)))
    revived = quantizer.usage[1:] == 1.0 / 16
    assert int(revived.sum()) == 3  # three vectors for 15 expired codes
    torch.testing.assert_close(quantizer.table[1:][revived], torch.tensor([[1.0, 0.0]]).expand(3, 2))
    torch.testing.assert_close(quantizer.table[1:][~revived], before[~revived])


def test_fsq_codes_are_one_to_one():
    quantizer = FSQ(levels=(4, 3, 5))
    tokens = torch.arange(quantizer.vocab)
    codes = quantizer.embed(tokens)
    assert len(torch.unique(codes, dim=0)) == 60 == quantizer.vocab
    reached = quantizer(torch.randn(20000, 3) * 3).tokens
    assert len(torch.unique(reached)) == 60
    with pytest.raises(ConfigError, match="two levels"):
        FSQ(levels=(1, 3))


# --- LFQ, residual quantization, none ---


def test_lfq_codes_are_signs():
    quantizer = LFQ(dim=3, entropy_weight=0.0, commitment=2.0)
    vectors = torch.tensor([[0.5, -0.1, 2.0], [-3.0, -1.0, -0.2]])
    found = quantizer(vectors)
    assert found.tokens.tolist() == [0b101, 0]
    assert found.vectors.tolist() == [[1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]]
    torch.testing.assert_close(found.loss, 2.0 * torch.tensor([0.25 + 0.81 + 1.0, 4.0 + 0.0 + 0.64]) / 3)


def test_lfq_entropy_by_a_loop():
    quantizer = LFQ(dim=2, entropy_weight=1.0, commitment=0.0, temperature=0.5)
    vectors, mask = torch.tensor([[0.3, -0.2], [0.1, 0.4], [9.0, 9.0]]), torch.tensor([True, True, False])
    rows, mean = [], [0.0] * 4
    for x, y in vectors.tolist():
        scores = [math.exp(2 / 0.5 * (x * a + y * b)) for b in (-1, 1) for a in (-1, 1)]
        rows.append([score / sum(scores) for score in scores])
    for row in rows[:2]:
        mean = [m + share / 2 for m, share in zip(mean, row)]
    batch = -sum(m * math.log(m) for m in mean)
    wanted = [-sum(share * math.log(share) for share in row) - batch for row in rows[:2]]
    torch.testing.assert_close(quantizer(vectors, mask).loss[:2], torch.tensor(wanted), atol=1e-5, rtol=1e-4)


def test_residual_stages_quantize_what_is_left():
    quantizer = ResidualVQ(codes=2, stages=2, dim=1, commitment=0.5)
    quantizer.stages[0].codes.weight.data = torch.tensor([[0.0], [1.0]])
    quantizer.stages[1].codes.weight.data = torch.tensor([[-0.2], [0.3]])
    found = quantizer(torch.tensor([[0.9], [0.25]]))  # 1 - 0.2, 0 + 0.3
    assert found.tokens.tolist() == [1 + 2 * 0, 0 + 2 * 1]
    torch.testing.assert_close(found.vectors, torch.tensor([[0.8], [0.3]]))
    wanted = 1.5 * torch.tensor([0.1**2 + 0.1**2, 0.25**2 + 0.05**2])
    torch.testing.assert_close(found.loss, wanted)
    torch.testing.assert_close(quantizer.embed(torch.tensor([1, 2])), found.vectors)


def test_no_quantizer_limits_vectors():
    quantizer = Continuous(dim=2)
    vectors = torch.tensor([[0.5, -9.0]], requires_grad=True)
    found = quantizer(vectors)
    torch.testing.assert_close(found.vectors, torch.tanh(vectors))
    assert quantizer.vocab == 0 and quantizer.embed(found.tokens) is found.tokens


@pytest.mark.parametrize("wrong", [lambda: LFQ(dim=0), lambda: ResidualVQ(stages=0, dim=2)])
def test_impossible_sizes_are_errors(wrong):
    with pytest.raises(ConfigError, match="must be"):
        wrong()


@pytest.mark.extras
@pytest.mark.parametrize("name", ["vq", "fsq", "lfq", "residual"])
def test_quantizers_agree_with_vector_quantize_pytorch(name: str):
    """The library that many use, lucidrains/vector-quantize-pytorch: the same codes for the same codebook."""
    library = pytest.importorskip("vector_quantize_pytorch")
    torch.manual_seed(0)
    vectors = torch.randn(1, 64, 3)
    if name == "fsq":
        theirs, ours = library.FSQ(levels=[8, 5, 4]), FSQ(levels=(8, 5, 4))
        wanted, indices = theirs(vectors)
    elif name == "lfq":
        theirs, ours = library.LFQ(codebook_size=8, dim=3).eval(), LFQ(dim=3)
        wanted, indices, _ = theirs(vectors)
        bits = torch.tensor([1, 2, 4])
        indices = (indices.unsqueeze(-1) // torch.tensor([4, 2, 1]) % 2 * bits).sum(
            -1
        )  # theirs: first bit high
    elif name == "residual":
        theirs = library.ResidualVQ(dim=3, num_quantizers=2, codebook_size=8).eval()
        ours = ResidualVQ(codes=8, stages=2, dim=3)
        for stage, layer in zip(ours.stages, theirs.layers):
            stage.codes.weight.data = layer.codebook.clone()
        wanted, indices, _ = theirs(vectors)
        indices = indices[..., 0] + 8 * indices[..., 1]
    else:
        theirs = library.VectorQuantize(dim=3, codebook_size=16).eval()
        ours = VectorQuantizer(vocab=16, dim=3)
        ours.codes.weight.data = theirs.codebook.clone()
        wanted, indices, _ = theirs(vectors)
    found = ours(vectors[0])
    torch.testing.assert_close(found.vectors, wanted[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(found.tokens, indices[0].long())
