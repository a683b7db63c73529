"""Cells, latents and initial states of earlier RSSMs: against a loop over single steps, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_lab.components.nn.mlp import layer_style
from rl_lab.components.representation_learners.rssm import RSSM, LayerNormGRU, PlainGRU
from rl_lab.errors import ConfigError
from tests.workflows.dreamer_case import CONTINUOUS, vector_spec

SIZES = {"deter": 6, "hidden": 5, "stoch": 3, "embed_dim": 4, "prior_layers": 1}
KINDS: dict[str, dict[str, Any]] = {
    "v1": {"cell": "gru", "latent": "gaussian", "classes": 1, "layer": "elu", "init": "glorot"},
    "v2": {"cell": "layer_norm_gru", "classes": 4, "unimix": 0.0, "layer": "elu", "init": "glorot"},
    "v2_crafter": {"cell": "layer_norm_gru", "classes": 4, "unimix": 0.0, "layer": "layer+elu"},
    "2023": {
        "cell": "layer_norm_gru",
        "classes": 4,
        "layer": "layer+silu",
        "init": "fan_avg",
        "bias": False,
        "initial": "learned",
    },
    "more_layers": {"classes": 4, "blocks": 2, "posterior_layers": 3, "dynamics_layers": 2},
    "absolute": {"classes": 4, "blocks": 2, "absolute": True},
    "absolute_v1": {"cell": "gru", "latent": "gaussian", "classes": 1, "layer": "elu", "absolute": True},
    "block_gru_gaussian": {"classes": 1, "latent": "gaussian", "std_form": "sigmoid2", "blocks": 2},
}


def make(kind: str) -> RSSM:
    torch.manual_seed(0)
    rssm = RSSM(spec=vector_spec(CONTINUOUS), **SIZES, **KINDS[kind])
    for parameter in rssm.parameters():  # a learned state and biases away from 0
        parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return rssm


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_is_the_slow_loop(kind: str):
    rssm = make(kind)
    size, steps = 2, 5
    action, embed = torch.rand(size, steps, 2) * 2 - 1, torch.randn(size, steps, 4)
    is_first = torch.tensor([[True, False, False, True, False], [False, False, True, False, False]])
    noise = rssm.draw_noise(size, steps)
    state = {key: value + 0.3 for key, value in rssm.initial_state(size).items()}
    states, statistics = rssm.observe_sequence(state, action, embed, is_first, noise)
    start = rssm.initial_state(1)
    for b in range(size):
        deter, stoch = state["deter"][b], state["stoch"][b].flatten()
        for t in range(steps):
            before = action[b, t]
            if is_first[b, t]:
                deter, stoch, before = start["deter"][0], start["stoch"][0].flatten(), torch.zeros(2)
            row = {"deter": deter[None], "stoch": stoch.unflatten(0, (3, -1))[None]}
            # The deter of an imagined step is that of an observed one: its noise is not used.
            deter = rssm.imagine_step(row, before[None], torch.zeros(1, 3))["deter"][0]
            x = rssm.posterior_in(embed[b, t] if rssm.absolute else torch.cat([deter, embed[b, t]]))
            x = rssm.style.activate(rssm.posterior_norm(x))
            for layer in range(KINDS[kind].get("posterior_layers", 1) - 1):
                x = rssm.posterior_more.norms[layer](rssm.posterior_more.linears[layer](x))
                x = rssm.style.activate(x)
            sample, found = rssm.latent.draw(rssm.posterior_out(x)[None], noise[b, t][None])
            stoch = sample[0].flatten()
            assert torch.allclose(states["deter"][b, t], deter, atol=1e-5)
            assert torch.allclose(states["stoch"][b, t].flatten(), stoch, atol=1e-5)
            assert torch.allclose(statistics[b, t], found[0], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_has_a_gradient(kind: str):
    rssm = make(kind)
    first = torch.tensor([[True, False, True]])
    states, statistics = rssm.observe_sequence(
        rssm.initial_state(1), torch.rand(1, 3, 2), torch.randn(1, 3, 4), first, rssm.draw_noise(1, 3)
    )
    prior = rssm.prior(states["deter"])
    loss = rssm.latent.kl_divergence(statistics, prior).sum() + rssm.feature(states).square().sum()
    loss.backward()
    for name, parameter in rssm.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_layer_norm_gru_by_hand():
    cell = LayerNormGRU(1, 1, style=layer_style("elu", "glorot"))
    cell.norm.eps = 0.0
    # Products 1, 2, 3 -> normed -√1.5, 0, √1.5: reset, candidate, update.
    cell.gates.weight.data.copy_(torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]))
    root = torch.tensor(1.5).sqrt()
    update = torch.sigmoid(root - 1.0)  # biased by -1
    after = cell(torch.tensor([[1.0]]), torch.tensor([[9.0]]))
    assert torch.allclose(
        after, (1.0 - update).reshape(1, 1)
    )  # the candidate is tanh(sigmoid(-√1.5) · 0) = 0
    cell.norm.bias.data.copy_(torch.tensor([0.0, 2.0, 0.0]))
    candidate = torch.tanh(torch.sigmoid(-root) * 2.0)
    expected = update * candidate + (1.0 - update)
    assert torch.allclose(cell(torch.tensor([[1.0]]), torch.tensor([[9.0]])), expected.reshape(1, 1))


def test_plain_gru_by_hand():
    """Keras' GRUCell with reset_after: h' = z h + (1 - z) tanh(W x + r (U h))."""
    cell = PlainGRU(3, 2)
    h, x = torch.randn(1, 3), torch.randn(1, 2)
    into, back = cell.cell.weight_ih.chunk(3), cell.cell.weight_hh.chunk(3)  # reset, update, candidate
    reset, update = (torch.sigmoid(x @ into[i].t() + h @ back[i].t()) for i in (0, 1))
    candidate = torch.tanh(x @ into[2].t() + reset * (h @ back[2].t()))
    assert torch.allclose(cell(h, x), update * h + (1 - update) * candidate, atol=1e-6)
    gram = cell.cell.weight_hh.t() @ cell.cell.weight_hh
    assert torch.allclose(gram, torch.eye(3), atol=1e-5)  # orthogonal


def test_learned_initial_state():
    rssm = make("2023")
    state = rssm.initial_state(2)
    deter = torch.tanh(rssm.initial)
    assert torch.allclose(state["deter"], deter.expand(2, -1))
    best = rssm.prior(deter).argmax(-1)
    assert torch.equal(state["stoch"][0].argmax(-1), best) and state["stoch"].sum() == 2 * 3


@pytest.mark.parametrize("kind", KINDS)
def test_only_todays_form_is_fused(kind: str):
    assert not make(kind).has_fast_form
    assert RSSM(
        spec=vector_spec(), deter=4, hidden=4, stoch=2, classes=2, blocks=2, embed_dim=2
    ).has_fast_form


def test_wrong_choices():
    with pytest.raises(ConfigError, match=r"components.rssm.cell is 'lstm'"):
        RSSM(spec=vector_spec(), **SIZES, classes=2, cell="lstm")
    with pytest.raises(ConfigError, match=r"components.rssm.initial"):
        RSSM(spec=vector_spec(), **SIZES, classes=2, initial="random")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ({"posterior_layers": 0}, "components.rssm.posterior_layers is 0"),
        ({"dynamics_layers": 0}, "components.rssm.dynamics_layers is 0"),
        ({"dynamics_layers": 2, "cell": "gru"}, "components.rssm.dynamics_layers is 2, but cell=gru"),
    ],
)
def test_layers_that_do_not_fit(words: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        RSSM(spec=vector_spec(CONTINUOUS), classes=4, blocks=2, **{**SIZES, **words})


def test_default_layers_add_no_parameters():
    names = dict(RSSM(spec=vector_spec(CONTINUOUS), classes=4, blocks=2, **SIZES).named_parameters())
    assert not [name for name in names if "more" in name]
