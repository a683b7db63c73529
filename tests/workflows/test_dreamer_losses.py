"""Losses against values computed by hand, with fake actor and critic."""

import math

import pytest
import torch

from rl_lab.components.nn.categorical import unimix_probs
from rl_lab.components.nn.moving_averages import ReturnNormalizer
from rl_lab.components.return_computers.td_lambda import TDLambdaReturns
from rl_lab.workflows.dreamer.losses import (
    actor_critic_losses,
    evaluate_rollouts,
    kl_losses,
    replay_value_loss,
    total_loss,
)
from tests.workflows.dreamer_case import make_batch, make_dreamer, run_hook


class FakeActor:
    """Log probability is the feature at the state, times the action taken there."""

    def __init__(self):
        self.return_normalizer = ReturnNormalizer()

    def log_prob_and_entropy(self, feature, action):
        return feature[..., 0] * action, torch.full(feature.shape[:-1], 0.5)


class FakeCritic:
    """The value is the second feature; the loss is a plain distance, so that its arguments are visible."""

    def __call__(self, feature):
        return feature[..., 1:2]

    def mean(self, logits):
        return logits[..., 0]

    def slow_value(self, feature):
        return torch.zeros(feature.shape[:-1])

    def loss(self, logits, target, slow_target):
        return target - logits[..., 0]


def test_actor_critic_losses_by_hand():
    # One rollout of two steps: log-prob features 1, 2, 3; values 10, 20, 30; actions 1 and 2.
    feature = torch.tensor([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]])
    rollouts = evaluate_rollouts(
        FakeCritic(),
        TDLambdaReturns(lam=0.5),
        feature=feature,
        action=torch.tensor([[1.0, 2.0]]),
        reward=torch.tensor([[100.0, 1.0, 2.0]]),
        cont=torch.tensor([[0.9, 0.5, 0.25]]),
    )
    losses, metrics = actor_critic_losses(FakeActor(), FakeCritic(), rollouts, entropy_scale=0.1)
    # R[1] = 2 + 0.25·30 = 9.5; R[0] = 1 + 0.5·(0.5·20 + 0.5·9.5) = 8.375; the first reward is unused.
    assert torch.allclose(rollouts.returns, torch.tensor([[8.375, 9.5]]))
    # Weights: 0.9 in the first state, 0.9·0.5 in the second. The return range is under 1, so nothing is scaled.
    advantage = torch.tensor([[8.375 - 10.0, 9.5 - 20.0]])
    log_prob = torch.tensor([[1.0, 4.0]])  # the action of a state is scored in that state
    expected = -torch.tensor([[0.9, 0.45]]) * (log_prob * advantage + 0.1 * 0.5)
    assert torch.allclose(losses["actor"], expected)
    assert torch.allclose(losses["critic"], torch.tensor([[0.9, 0.45]]) * advantage)
    assert metrics["return_scale"].item() == 1.0
    assert metrics["value_rise"].item() == 20.0
    assert metrics["reward_share"].item() == 1.0  # of the two steps, without the start


def test_replay_value_loss_by_hand():
    feature = torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 4.0]]])
    loss = replay_value_loss(
        FakeCritic(),
        TDLambdaReturns(lam=0.5),
        feature=feature,
        reward=torch.tensor([[0.0, 1.0, 2.0, 0.0]]),
        terminated=torch.tensor([[False, False, True, False]]),
        last=torch.tensor([[False, False, True, False]]),
        bootstrap=torch.tensor([[10.0, 20.0, 30.0, 40.0]]),
        discount=0.9,
    )
    # Row 2 is terminal: R[1] = 2. R[0] = 1 + 0.9·(0.5·20 + 0.5·2) = 10.9. Row 2 itself has weight 0.
    assert torch.allclose(loss, torch.tensor([[10.9 - 1.0, 2.0 - 2.0, 0.0]]))


def test_truncation_bootstraps_and_cuts():
    common = {
        "feature": torch.zeros(1, 3, 2),
        "reward": torch.tensor([[0.0, 1.0, 5.0]]),
        "terminated": torch.zeros(1, 3, dtype=torch.bool),
        "bootstrap": torch.tensor([[10.0, 20.0, 30.0]]),
        "discount": 0.9,
    }
    last = torch.tensor([[False, True, False]])
    loss = replay_value_loss(FakeCritic(), TDLambdaReturns(lam=0.5), last=last, **common)
    assert torch.allclose(loss, torch.tensor([[1 + 0.9 * 20.0, 0.0]]))


def test_free_nats_clip_each_step():
    logits = torch.zeros(1, 2, 2, 3, requires_grad=True)
    other = torch.zeros(1, 2, 2, 3)
    other[0, 1] = torch.tensor([5.0, 0.0, -5.0])  # only the second step differs by more than a nat
    posterior, prior = unimix_probs(logits).log(), unimix_probs(other).log()
    losses, metrics = kl_losses(posterior, prior, free_nats=1.0)
    assert losses["representation"][0, 0].item() == 1.0
    assert losses["representation"][0, 1].item() > 1.0
    losses["representation"].sum().backward()
    assert logits.grad[0, 0].abs().sum() == 0
    assert logits.grad[0, 1].abs().sum() > 0
    assert metrics["posterior_entropy"].item() == pytest.approx(2 * math.log(3.0), rel=1e-5)


def test_kl_losses_stop_gradients():
    a, b = torch.randn(1, 1, 2, 3, requires_grad=True), torch.randn(1, 1, 2, 3, requires_grad=True)
    losses, _ = kl_losses(unimix_probs(a).log(), unimix_probs(b).log(), free_nats=0.0)
    grads = torch.autograd.grad(losses["dynamics"].sum(), [a, b], allow_unused=True, retain_graph=True)
    assert grads[0] is None or grads[0].abs().sum() == 0
    assert grads[1].abs().sum() > 0
    grads = torch.autograd.grad(losses["representation"].sum(), [a, b], allow_unused=True)
    assert grads[0].abs().sum() > 0
    assert grads[1] is None or grads[1].abs().sum() == 0


def test_reward_share_of_replay():
    workflow = make_dreamer()
    batch = make_batch(workflow)
    batch.reward[:] = 0.0
    batch.reward[0, -2:] = torch.tensor([1.0, -1.0])  # the mean is 0
    metrics = run_hook(workflow, "update", batch=batch).metrics
    assert metrics["reward_share"].item() == pytest.approx(
        2 / (workflow.settings.batch_size * workflow.settings.batch_length)  # without context rows
    )


def test_every_loss_needs_a_scale():
    losses = {"a": torch.tensor(1.0), "b": torch.tensor(3.0)}
    assert total_loss(losses, {"a": 2.0, "b": 0.5}).item() == pytest.approx(3.5)
    with pytest.raises(AssertionError, match="scales"):
        total_loss(losses, {"a": 1.0})


def only(**kept):
    names = (
        "reconstruction",
        "reward",
        "continue",
        "dynamics",
        "representation",
        "actor",
        "critic",
        "replay_value",
    )
    return {name: float(kept.get(name, 0.0)) for name in names}


@pytest.mark.parametrize(
    ("loss", "reached"),
    [
        ("actor", {"actor"}),
        ("critic", {"critic"}),
        ("replay_value", {"critic", "encoder", "rssm"}),
        ("reward", {"reward_head", "encoder", "rssm"}),
        ("continue", {"continue_head", "encoder", "rssm"}),
        ("reconstruction", {"decoder", "encoder", "rssm"}),
        ("dynamics", {"rssm", "encoder"}),
        ("representation", {"rssm", "encoder"}),
    ],
)
def test_parts_reached_by_each_loss(loss, reached):
    workflow = make_dreamer(algorithm__loss_scales=only(**{loss: 1.0}), algorithm__free_nats=0.0)
    # Output layers that start at zero would block the gradient to earlier layers.
    for head in (workflow.reward_head, workflow.critic.head):
        head.mlp.out.weight.data.normal_()
    run_hook(workflow, "update", make_batch(workflow))
    touched = {
        name
        for name, parameters in workflow.parts.items()
        if any(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)
    }
    assert touched == reached
