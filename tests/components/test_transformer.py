"""The transformer with its cache, the GRU backbone, and dropout from seeds."""

from __future__ import annotations

import pytest
import torch

from rl_lab.components.dynamics.backbones import GRUBackbone, copy_state
from rl_lab.components.nn.transformer import Transformer, seeded_dropout, seeded_uniform
from rl_lab.errors import ConfigError

B, T, D = 3, 9, 8
BACKBONES = {
    "transformer": lambda: Transformer(dim=D, layers=2, heads=2, length=T),
    "gru": lambda: GRUBackbone(dim=D, layers=2, length=T),
}


@pytest.fixture(params=sorted(BACKBONES))
def backbone(request: pytest.FixtureRequest):
    torch.manual_seed(0)
    return BACKBONES[request.param]()


@torch.no_grad()
@pytest.mark.parametrize("parts", [(9,), (1,) * 9, (4, 1, 3, 1)])
def test_steps_match_sequence(backbone, parts):
    x = torch.randn(B, T, D)
    state, found = backbone.init_state(B), []
    for part in x.split(parts, 1):
        hidden, state = backbone.step(part, state)
        found.append(hidden)
    torch.testing.assert_close(torch.cat(found, 1), backbone(x), atol=1e-5, rtol=1e-5)
    assert all(len(value) == B for value in state.values())


@torch.no_grad()
def test_backbones_are_causal(backbone):
    x = torch.randn(B, T, D)
    changed = x.clone()
    changed[:, 5:] += 1.0
    torch.testing.assert_close(backbone(x)[:, :5], backbone(changed)[:, :5])
    assert not torch.allclose(backbone(x)[:, 5:], backbone(changed)[:, 5:])


@torch.no_grad()
def test_copied_state(backbone):
    _, state = backbone.step(torch.randn(B, 3, D), backbone.init_state(B))
    x, y = torch.randn(2, B, 1, D)
    first, _ = backbone.step(x, copy_state(state))
    backbone.step(y, copy_state(state))
    again, _ = backbone.step(x, copy_state(state))
    torch.testing.assert_close(first, again)


@torch.no_grad()
def test_cache_rows_of_different_length():
    model = Transformer(dim=D, layers=1, heads=2, length=T)
    x = torch.randn(1, 5, D)
    _, state = model.step(torch.cat([x[:, :4], x[:, :4]]), model.init_state(2))
    empty = model.init_state(2)
    mixed = {
        name: torch.where(torch.tensor([True, False]).view(2, *[1] * (value.ndim - 1)), value, empty[name])
        for name, value in state.items()
    }
    hidden, _ = model.step(torch.cat([x[:, 4:], x[:, :1]]), mixed)
    torch.testing.assert_close(hidden[0, 0], model(x)[0, 4], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(hidden[1, 0], model(x[:, :1])[0, 0], atol=1e-5, rtol=1e-5)


def test_dropout_depends_on_seed_only():
    x, seed = torch.ones(40, 50), torch.tensor(0.3)
    dropped = seeded_dropout(x, 0.25, seed)
    assert torch.equal(dropped, seeded_dropout(x, 0.25, seed))
    assert not torch.equal(dropped, seeded_dropout(x, 0.25, torch.tensor(0.31)))
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.04
    torch.testing.assert_close(dropped.max(), torch.tensor(4.0 / 3.0))
    uniform = seeded_uniform((20000,), seed)
    assert float(uniform.min()) >= 0.0 and float(uniform.max()) < 1.0
    assert abs(float(uniform.mean()) - 0.5) < 0.01
    assert (
        abs(float((uniform[:-1] * uniform[1:]).mean()) - 0.25) < 0.01
    )  # neighbouring elements are uncorrelated


def test_dropout_in_training_only():
    torch.manual_seed(0)
    model = Transformer(dim=D, layers=2, heads=2, length=T, dropout=0.5)
    x, seeds = torch.randn(B, T, D), torch.rand(model.seeds)
    assert not torch.allclose(model(x), model(x, seeds))
    torch.testing.assert_close(model(x, seeds), model(x, seeds))
    plain = Transformer(dim=D, layers=2, heads=2, length=T)
    assert plain.seeds == 0
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(x), plain(x))


def test_indivisible_heads():
    with pytest.raises(ConfigError, match="3 heads"):
        Transformer(dim=D, layers=1, heads=3, length=T)
