import pytest
import torch

from rl_lab.components.controllers.dreamer import DreamerActorController
from rl_lab.components.controllers.random_policy import RandomPolicyController
from rl_lab.components.nn.actions import ActionEncoder, make_policy
from rl_lab.records import ActionSpec, ActMode, ArraySpec, Spec

DISCRETE = ActionSpec("discrete", (), (3,))
MULTI = ActionSpec("multi_discrete", (2,), (2, 3))
CONTINUOUS = ActionSpec("continuous", (2,), low=(-1.0, -1.0), high=(1.0, 1.0))
KINDS = [DISCRETE, MULTI, CONTINUOUS]


def spec_of(action):
    return Spec("test", {"vector": ArraySpec((4,), "float32")}, action)


def test_action_encoder():
    assert ActionEncoder(DISCRETE)(torch.tensor([[2], [0]])).tolist() == [[[0, 0, 1]], [[1, 0, 0]]]
    assert ActionEncoder(MULTI)(torch.tensor([[1, 2]])).tolist() == [[0, 1, 0, 0, 1]]
    assert ActionEncoder(CONTINUOUS)(torch.tensor([[0.5, -4.0]])).tolist() == [[0.5, -1.0]]


def test_categorical_policy_matches_torch():
    raw = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    action = torch.tensor([0, 1, 2, 0, 1])
    log_prob, entropy = make_policy(DISCRETE).log_prob_and_entropy(raw, action)
    reference = torch.distributions.Categorical(logits=raw)
    assert torch.allclose(log_prob, reference.log_prob(action))
    assert torch.allclose(entropy, reference.entropy())


def test_multi_discrete_sums_over_variables():
    raw = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    action = torch.tensor([[0, 2], [1, 0], [0, 1], [1, 1]])
    log_prob, entropy = make_policy(MULTI).log_prob_and_entropy(raw, action)
    first = torch.distributions.Categorical(logits=raw[:, :2])
    second = torch.distributions.Categorical(logits=raw[:, 2:])
    assert torch.allclose(log_prob, first.log_prob(action[:, 0]) + second.log_prob(action[:, 1]))
    assert torch.allclose(entropy, first.entropy() + second.entropy())
    assert torch.equal(
        make_policy(MULTI).mode(raw), torch.stack([raw[:, :2].argmax(-1), raw[:, 2:].argmax(-1)], -1)
    )


def test_normal_policy_matches_torch():
    raw = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    mean, std = torch.tanh(raw[:, :2]), 0.9 * torch.sigmoid(raw[:, 2:] + 2.0) + 0.1
    reference = torch.distributions.Normal(mean, std)
    action = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    policy = make_policy(CONTINUOUS)
    log_prob, entropy = policy.log_prob_and_entropy(raw, action)
    assert torch.allclose(log_prob, reference.log_prob(action).sum(-1), atol=1e-5)
    assert torch.allclose(entropy, reference.entropy().sum(-1), atol=1e-5)
    noise = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(policy.sample(raw, noise), mean + std * noise)


def test_unimix_gives_all_actions_probability():
    raw = torch.tensor([[50.0, -50.0, -50.0]])
    log_prob, _ = make_policy(DISCRETE, unimix=0.03).log_prob_and_entropy(raw, torch.tensor([1]))
    assert log_prob.exp().item() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("action", KINDS, ids=lambda a: a.kind)
def test_actor_action_shapes(action):
    actor = DreamerActorController(spec=spec_of(action), features=6, units=8, layers=1)
    feature = torch.randn(7, 6)
    for mode in (ActMode(), ActMode(sample=False), ActMode(epsilon=1.0), ActMode(temperature=0.5)):
        chosen = actor.act(feature, mode)
        assert chosen.shape == (7, *action.shape)
        assert str(chosen.dtype) == f"torch.{action.dtype}"
    noise_spec = actor.noise_spec(3, 7)
    draw = torch.rand if noise_spec.kind == "uniform" else torch.randn
    sampled = actor.sample(feature.expand(3, 7, 6), draw(noise_spec.shape))
    assert sampled.shape == (3, 7, *action.shape)


@pytest.mark.parametrize("action", KINDS, ids=lambda a: a.kind)
def test_actor_is_deterministic_with_generator(action):
    actor = DreamerActorController(spec=spec_of(action), features=6, units=8, layers=1)
    feature = torch.randn(7, 6)
    draws = [
        actor.act(feature, ActMode(epsilon=0.3, generator=torch.Generator().manual_seed(3))) for _ in range(2)
    ]
    assert torch.equal(*draws)


def test_low_temperature_gives_mode():
    actor = DreamerActorController(spec=spec_of(DISCRETE), features=6, units=8, layers=1, out_scale=1.0)
    feature = torch.randn(50, 6)
    cold = actor.act(feature, ActMode(temperature=1e-4))
    assert torch.equal(cold, actor.act(feature, ActMode(sample=False)))


@pytest.mark.parametrize("action", KINDS, ids=lambda a: a.kind)
def test_random_policy_covers_space(action):
    policy = RandomPolicyController(spec=spec_of(action))
    mode = ActMode(generator=torch.Generator().manual_seed(0))
    actions = policy.act({"vector": torch.zeros(600, 4)}, mode)
    assert actions.shape == (600, *action.shape)
    if action.kind == "continuous":
        assert actions.abs().max() <= 1.0
        assert actions.min() < -0.9
        assert actions.max() > 0.9
    else:
        columns = actions.reshape(600, -1)
        for column, count in zip(columns.unbind(1), action.choices):
            assert sorted(column.unique().tolist()) == list(range(count))
