import pytest
import torch

from rl_lab.components.nn.categorical import unimix_probs
from rl_lab.components.representation_learners.rssm import RSSM
from rl_lab.records import ActionSpec, ArraySpec, Spec

SPEC = Spec("test", {"vector": ArraySpec((4,), "float32")}, ActionSpec("discrete", (), (3,)))
B, T, S, C, E = 3, 6, 4, 5, 7


@pytest.fixture
def rssm():
    torch.manual_seed(0)
    return RSSM(spec=SPEC, deter=8, hidden=6, stoch=S, classes=C, blocks=2, embed_dim=E)


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return {
        "action": torch.randint(3, (B, T), generator=generator),
        "embed": torch.randn(B, T, E, generator=generator),
        "is_first": torch.zeros(B, T, dtype=torch.bool),
        "noise": torch.rand(B, T, S, generator=generator),
    }


def test_sequence_matches_steps(rssm, inputs):
    inputs["is_first"][1, 3] = True
    start = {"deter": torch.randn(B, 8), "stoch": rssm.initial_state(B)["stoch"]}
    states, log_probs = rssm.observe_sequence(start, **inputs)
    assert states["deter"].shape == (B, T, 8)
    assert states["stoch"].shape == log_probs.shape == (B, T, S, C)
    state = start
    for t in range(T):
        state, log_probs_t = rssm.observe(state, **{key: value[:, t] for key, value in inputs.items()})
        assert torch.allclose(state["deter"], states["deter"][:, t], atol=1e-6)
        assert torch.equal(state["stoch"], states["stoch"][:, t])
        assert torch.allclose(log_probs_t, log_probs[:, t], atol=1e-6)


def test_step_matches_paper(rssm, inputs):
    """deter from (deter, stoch, action); posterior from (deter, embedding), prior from deter."""
    start = {
        "deter": torch.randn(B, 8),
        "stoch": torch.nn.functional.one_hot(torch.randint(C, (B, S)), C).float(),
    }
    action = inputs["action"][:, 0]
    encoded = torch.nn.functional.one_hot(action, 3).float()
    deter = rssm.gru(start["deter"], rssm.stoch_in(start["stoch"].flatten(1)), rssm.action_in(encoded))
    joined = torch.cat([deter, inputs["embed"][:, 0]], -1)
    hidden = torch.nn.functional.silu(rssm.posterior_norm(rssm.posterior_in(joined)))
    expected = unimix_probs(rssm.posterior_out(hidden).unflatten(-1, (S, C))).log()
    state, log_probs = rssm.observe(
        start, action, inputs["embed"][:, 0], inputs["is_first"][:, 0], inputs["noise"][:, 0]
    )
    assert torch.allclose(state["deter"], deter, atol=1e-6)
    assert torch.allclose(log_probs, expected, atol=1e-5)
    imagined = rssm.imagine_step(start, action, inputs["noise"][:, 0])
    assert torch.allclose(imagined["deter"], deter, atol=1e-6)
    prior = unimix_probs(rssm.prior_net(deter).unflatten(-1, (S, C))).log()
    assert torch.allclose(rssm.prior(deter), prior, atol=1e-6)


def test_is_first_resets_state_and_action(rssm, inputs):
    inputs["is_first"][:, 2] = True
    reference, _ = rssm.observe_sequence(rssm.initial_state(B), **inputs)
    # A different past and previous action do not change anything from the reset row on.
    changed = {key: value.clone() for key, value in inputs.items()}
    changed["embed"][:, :2] += 1.0
    changed["action"][:, :3] = (changed["action"][:, :3] + 1) % 3
    start = {"deter": torch.randn(B, 8), "stoch": rssm.initial_state(B)["stoch"]}
    other, _ = rssm.observe_sequence(start, **changed)
    assert torch.equal(other["deter"][:, 2:], reference["deter"][:, 2:])
    assert torch.equal(other["stoch"][:, 2:], reference["stoch"][:, 2:])
    assert not torch.allclose(other["deter"][:, 1], reference["deter"][:, 1])
    # The reset row starts from a zero state and a zero action vector (not "action 0").
    fresh = rssm.gru(
        torch.zeros(B, 8), rssm.stoch_in(torch.zeros(B, S * C)), rssm.action_in(torch.zeros(B, 3))
    )
    assert torch.allclose(reference["deter"][:, 2], fresh, atol=1e-6)


def test_reset_does_not_affect_previous_row(rssm, inputs):
    plain, _ = rssm.observe_sequence(rssm.initial_state(B), **inputs)
    inputs["is_first"][0, 3] = True
    reset, _ = rssm.observe_sequence(rssm.initial_state(B), **inputs)
    assert torch.equal(plain["deter"][0, :3], reset["deter"][0, :3])
    assert not torch.allclose(plain["deter"][0, 3], reset["deter"][0, 3])
    assert torch.equal(plain["deter"][1:], reset["deter"][1:])


def test_gradients_flow_through_time(rssm, inputs):
    inputs["embed"].requires_grad_()
    states, _ = rssm.observe_sequence(rssm.initial_state(B), **inputs)
    states["deter"][:, -1].sum().backward()
    assert (inputs["embed"].grad[:, 0].abs().sum() > 0).item()
    assert (
        inputs["embed"].grad[:, -1].abs().sum() == 0
    )  # the last deter does not depend on the last observation


def test_stoch_is_one_hot(rssm, inputs):
    states, _ = rssm.observe_sequence(rssm.initial_state(B), **inputs)
    assert torch.equal(states["stoch"].sum(-1), torch.ones(B, T, S))
    assert rssm.feature(states).shape == (B, T, 8 + S * C) == (B, T, rssm.features)


def test_zero_action_layers_keep_action_size():
    """A normed layer with zero bias depends on the direction of an action only, not on its size."""
    continuous = Spec("test", SPEC.observations, ActionSpec("continuous", (2,), (), (-1.0, -1.0), (1.0, 1.0)))
    action, noise = torch.tensor([[0.2, -0.4], [0.4, -0.8]]), torch.rand(1, S).expand(2, S)
    memory, changes = torch.rand(1, 8).expand(2, 8), []
    for layers in (1, 0):
        torch.manual_seed(0)
        rssm = RSSM(
            spec=continuous,
            deter=8,
            hidden=6,
            stoch=S,
            classes=C,
            blocks=2,
            embed_dim=E,
            action_layers=layers,
        )
        state = {**rssm.initial_state(2), "deter": memory}
        small, large = rssm.imagine_step(state, action, noise)["deter"].detach()
        changes.append(float((large - small).norm() / small.norm()))
    assert changes[1] > 10 * changes[0], changes


def test_default_embed_dim():
    made = RSSM(spec=SPEC, deter=8, hidden=6, stoch=S, classes=C, blocks=2, units=11, depth=2)
    assert made.embed_dim == 11
