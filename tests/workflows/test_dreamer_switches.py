"""Switches of earlier Dreamer versions in the losses and the workflow, against loops and numbers by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_lab.components.controllers.dreamer import DreamerCriticController
from rl_lab.components.nn.heads import ConstantContinue, ContinueHead
from rl_lab.components.nn.latents import GaussianLatent
from rl_lab.components.nn.training_step import clip_gradients
from rl_lab.components.return_computers.td_lambda import TDLambdaReturns
from rl_lab.errors import ConfigError
from rl_lab.workflows.dreamer.losses import evaluate_rollouts, kl_losses, rollout_weights
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow
from tests.workflows.dreamer_case import (
    CONTINUOUS,
    DISCRETE,
    MULTI,
    draw_noise,
    make_batch,
    make_dreamer,
    run_hook,
    vector_spec,
)


def test_free_nats_on_the_mean():
    """Two steps with KL 0 and 4: each step alone has the floor 1 for the first; their mean 2 is above it."""
    latent = GaussianLatent(1)
    posterior = torch.tensor([[[[0.0, 1.0]], [[8.0**0.5, 1.0]]]])
    prior = torch.tensor([[[[0.0, 1.0]], [[0.0, 1.0]]]])
    by_step, _ = kl_losses(posterior, prior, 1.0, latent=latent)
    assert by_step["dynamics"][0].tolist() == pytest.approx([1.0, 4.0])
    on_mean, metrics = kl_losses(posterior, prior, 1.0, latent=latent, free_mean=True)
    assert on_mean["dynamics"].item() == pytest.approx(2.0)
    assert metrics["kl"].item() == pytest.approx(2.0)
    clipped, _ = kl_losses(posterior, prior, 3.0, latent=latent, free_mean=True)
    assert clipped["representation"].item() == 3.0


class Values:
    """A critic whose value is the first feature; the slow one's is twice that."""

    slow_targets = False

    def __call__(self, feature):
        return feature[..., :1]

    def mean(self, logits):
        return logits[..., 0]

    def value(self, feature):
        return feature[..., 0]

    def target_value(self, feature):
        return 2.0 * feature[..., 0]


ROLLOUT: dict[str, Any] = {
    "feature": torch.tensor([[[10.0], [20.0], [30.0]]]),
    "action": torch.zeros(1, 2),
    "reward": torch.tensor([[1.0, 2.0, 4.0]]),
    "cont": torch.tensor([[0.5, 0.25, 0.125]]),
}


def test_values_with_their_own_reward():
    found = evaluate_rollouts(Values(), TDLambdaReturns(lam=0.5), own_reward=True, **ROLLOUT)
    # R[1] = 2 + 0.25·30 = 9.5; R[0] = 1 + 0.5·(0.5·20 + 0.5·9.5) = 8.375; the last reward is unused.
    assert found.returns.tolist() == [[8.375, 9.5]]
    assert rollout_weights(ROLLOUT["cont"], own_reward=True).tolist() == [[1.0, 0.5]]
    assert rollout_weights(ROLLOUT["cont"]).tolist() == [[0.5, 0.125]]


def test_returns_from_the_slow_critic():
    critic = Values()
    critic.slow_targets = True
    found = evaluate_rollouts(critic, TDLambdaReturns(lam=0.5), **ROLLOUT)
    # R[1] = 4 + 0.125·60 = 11.5; R[0] = 2 + 0.25·(0.5·40 + 0.5·11.5) = 8.4375
    assert found.returns.tolist() == [[8.4375, 11.5]]
    assert found.value.tolist() == [[20.0, 40.0, 60.0]]
    assert found.value_logits[..., 0].tolist() == [[10.0, 20.0, 30.0]]  # the critic itself is trained


# ---------------------------------------------------------------- the actor's loss, state by state

V2: dict[str, Any] = {
    "algorithm__own_reward": True,
    "algorithm__first_continue": "real",
    "algorithm__size__bins": 0,
    "controllers__critic__slow_targets": True,
    "controllers__critic__slow_weight": 0.0,
    "controllers__actor__return_rate": 0.0,
    "controllers__critic__out_scale": 1.0,
    "components__reward_head__out_scale": 1.0,
    "controllers__actor__out_scale": 1.0,
}
NO_REPLAY_VALUE = {"algorithm__loss_scales__replay_value": 0.0}


def make(action=CONTINUOUS, **changes: Any) -> DreamerWorkflow:
    torch.manual_seed(0)
    workflow = make_dreamer(vector_spec(action), **NO_REPLAY_VALUE, **changes)
    for buffer in workflow.critic.slow.network.buffers():  # so that the slow critic is another
        if buffer.dtype == torch.float32:
            buffer.mul_(1.2)
    return workflow


def slow_losses(
    w: DreamerWorkflow, noise: dict[str, torch.Tensor], *, entropy: float, critic_start: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Actor and critic loss of danijar/dreamerv2 agent.py (`actor_loss`, `critic_loss`), one state after the other."""
    batch, horizon, gradient = make_batch(w), w.settings.imagination_horizon, w.actor.gradient
    with torch.no_grad():
        states, _ = w.infer(batch, noise["posterior"])
    state = {key: value.flatten(0, 1) for key, value in states.items()}
    discrete = w.spec.action.kind != "continuous"
    features, actions, policies = [w.rssm.feature(state)], [], []
    for t in range(horizon):
        seen = features[-1].detach()
        policies.append(seen)
        action = w.actor.sample_encoded(seen, noise["action"][t])
        actions.append(action)
        state = w.rssm.imagine_step(state, action, noise["prior"][t], encoded=discrete)
        features.append(w.rssm.feature(state))
    reward = [w.reward_head.predict(f) for f in features]
    discount = [w.continue_head.predict(f) for f in features]  # it predicts the product
    terminated = batch.terminated[:, w.settings.replay_context :].flatten()
    discount[0] = (1.0 - terminated.float()) * w.settings.discount
    slow = [w.critic.target_value(f) for f in features]
    targets = [slow[-1]]
    for t in reversed(range(horizon)):
        targets.insert(0, reward[t] + discount[t] * (0.05 * slow[t + 1] + 0.95 * targets[0]))
    weight = [torch.ones_like(reward[0])]
    for t in range(horizon):
        weight.append(weight[-1] * discount[t].detach())
    losses = []
    for t in range(horizon - 1):
        log_prob, ent = w.actor.log_prob_of_encoded(
            policies[t], actions[t] if gradient == "both" else actions[t].detach()
        )
        advantage = (targets[t + 1] - slow[t]).detach()
        objective = {
            "dynamics": targets[t + 1],
            "reinforce": log_prob * advantage,
            "both": 0.1 * targets[t + 1] + 0.9 * log_prob * advantage,
        }[gradient]
        losses.append(-(weight[t] * (objective + entropy * ent)))
    begin = [weight[t] / weight[critic_start] for t in range(critic_start, horizon)]
    critic = [
        begin[t - critic_start] * (w.critic.value(features[t].detach()) - targets[t].detach()).square()
        for t in range(critic_start, horizon)
    ]
    return torch.stack(losses).mean(), torch.stack(critic).mean()


@pytest.mark.parametrize(
    ("action", "gradient"),
    [
        (CONTINUOUS, "dynamics"),
        (CONTINUOUS, "both"),
        (DISCRETE, "reinforce"),
        (DISCRETE, "dynamics"),
        (DISCRETE, "both"),
        (MULTI, "both"),
    ],
)
def test_losses_of_v2_match_the_slow_loop(action, gradient: str):
    distribution = "truncated_normal" if action is CONTINUOUS else "bounded_normal"
    w = make(
        action,
        **V2,
        controllers__actor__gradient=gradient,
        controllers__actor__distribution=distribution,
    )
    noise = draw_noise(w, "update")
    actor, critic = slow_losses(w, noise, entropy=0.1)
    states, _ = w.infer(make_batch(w), noise["posterior"])
    rollouts = w._imagine_rollouts(states, noise, make_batch(w).terminated)
    losses, _ = w._actor_critic_losses(rollouts, {"entropy": torch.tensor(0.1)})
    assert float(losses["actor"]) == pytest.approx(float(actor), rel=1e-4, abs=1e-6)
    assert float(losses["critic"]) == pytest.approx(float(critic), rel=1e-4)
    for loss, ours, part in ((actor, losses["actor"], w.actor), (critic, losses["critic"], w.critic)):
        parameters = list(part.parameters())
        expected = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        found = torch.autograd.grad(ours, parameters, retain_graph=True, allow_unused=True)
        assert max(float(g.abs().max()) for g in expected) > 1e-5
        for one, other in zip(expected, found):
            assert torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def test_critic_of_v1_leaves_out_the_first_state():
    """danijar/dreamer: states that are imagined, weights from 1; one state less than V2."""
    w = make(**V2, algorithm__critic_start=1, controllers__actor__gradient="dynamics")
    noise = draw_noise(w, "update")
    batch = make_batch(w)
    batch.terminated[:] = False
    states, _ = w.infer(batch, noise["posterior"])
    rollouts = w._imagine_rollouts(states, noise, batch.terminated)
    losses, _ = w._actor_critic_losses(rollouts, {"entropy": torch.tensor(0.0)})
    cont = rollouts.cont.detach()
    total = 0.0
    for t in range(1, rollouts.returns.shape[1]):
        weight = cont[:, 1:t].prod(1)
        error = (rollouts.value_logits[:, t, 0] - rollouts.returns[:, t]).square()
        total += float((weight * error).mean())
    assert float(losses["critic"].detach()) == pytest.approx(
        total / (rollouts.returns.shape[1] - 1), rel=1e-4
    )


def test_real_first_continue_without_discount():
    """2023 and 2024: the first weight is the stored flag; the others are predicted."""
    w = make(DISCRETE, algorithm__first_continue="real", algorithm__imagination_last=2)
    batch, noise = make_batch(w), draw_noise(w, "update")
    batch.terminated[:] = False
    batch.terminated[0, -1] = True
    states, _ = w.infer(batch, noise["posterior"])
    rollouts = w._imagine_rollouts(states, noise, batch.terminated)
    assert rollouts.cont[:, 0].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert (rollouts.cont[:, 1:] < 1.0).all()


def test_continue_of_2023():
    """Target 1 - terminated; in rollouts the most probable flag × the discount."""
    changes = {"algorithm__discount_in_continue": False, "components__continue_head__estimate": "mode"}
    w = make(DISCRETE, algorithm__discount_horizon=4, **changes)
    feature = torch.randn(50, w.rssm.features)
    found, logit = w.continues(feature), w.continue_head(feature)
    assert torch.equal(found, torch.where(logit > 0, 0.75, 0.0))
    assert make(DISCRETE, algorithm__discount_horizon=4).continues(feature).max() < 1.0
    head = ContinueHead(features=2, units=2, layers=1, estimate="mode")
    assert torch.equal(head.predict(torch.zeros(1, 2)), torch.zeros(1))  # a probability of 1/2 is no 1
    with pytest.raises(ConfigError, match=r"components.continue_head.estimate"):
        ContinueHead(features=2, units=2, layers=1, estimate="most")


def test_constant_continue():
    head = ConstantContinue()
    feature = torch.randn(2, 3, 4)
    assert head.predict(feature).tolist() == [[1.0] * 3] * 2 and list(head.parameters()) == []
    assert head.loss(head(feature), torch.zeros(2, 3)).abs().sum() == 0.0


def test_slow_critic_is_copied_every_third_update():
    critic = DreamerCriticController(features=2, units=2, layers=1, bins=0, out_scale=1.0, slow_every=3)
    feature, copied = torch.randn(4, 2), []
    for _ in range(5):
        critic.head.mlp.out.bias.data.add_(1.0)
        critic.update_slow(1.0)
        copied.append(torch.equal(critic.slow_value(feature), critic.value(feature).detach()))
    assert copied == [True, False, False, True, False]
    state = critic.state_dict()
    assert int(state["slow.calls"]) == 5
    with pytest.raises(ConfigError, match="slow_every"):
        DreamerCriticController(features=2, units=2, slow_every=0)


def test_weight_of_the_slow_critic_in_the_loss():
    logits, target, slow = torch.tensor([[3.0]]), torch.tensor([1.0]), torch.tensor([0.0])
    expected = {1.0: 4.0 + 9.0, 0.5: 4.0 + 4.5, 0.0: 4.0}
    for weight, loss in expected.items():
        critic = DreamerCriticController(features=2, units=2, bins=0, slow_weight=weight)
        assert critic.loss(logits, target, slow).tolist() == [loss]


def test_clipping_by_optimizer():
    big, small = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    big.grad, small.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5])
    for parameter, limit in ((big, 1.0), (small, 1.0)):
        clip_gradients(torch.optim.SGD([parameter], lr=1.0), limit)
    assert big.grad.tolist() == pytest.approx([0.6, 0.8]) and small.grad.tolist() == [0.5]
    clip_gradients(torch.optim.SGD([big], lr=1.0), 0.0)
    assert big.grad.tolist() == pytest.approx([0.6, 0.8])
    w = make_dreamer(algorithm__clip_norms={"model": 1e-3})
    run_hook(w, "update")
    total = torch.stack(
        [p.grad.norm() for part in w.parts.values() for p in part if p.grad is not None]
    ).norm()
    assert float(total) == pytest.approx(1e-3, rel=1e-3)


def test_rewards_are_transformed_before_they_are_learned():
    for transform, expected in (("tanh", torch.tanh), ("sign", torch.sign), ("none", lambda x: x)):
        w = make(algorithm__reward_transform=transform)
        batch = make_batch(w)
        assert torch.equal(w._rewards(batch), expected(batch.reward))


def test_gradients_that_can_be_stopped():
    changes = {
        "components__reward_head__out_scale": 1.0,
        "controllers__critic__out_scale": 1.0,
        "algorithm__free_nats": 100.0,
        "algorithm__loss_scales__reconstruction": 0.0,
        "algorithm__loss_scales__continue": 0.0,
    }
    reached = {}
    for allowed in (True, False):
        torch.manual_seed(0)
        w = make_dreamer(
            **changes, algorithm__reward_gradient=allowed, algorithm__replay_value_gradient=allowed
        )
        run_hook(w, "update")
        reached[allowed] = sum(float(p.grad.abs().sum()) for p in w.parts["encoder"] if p.grad is not None)
    assert reached[True] > 0.0 and reached[False] == 0.0


def test_settings_that_do_not_fit():
    for changes, text in (
        ({"algorithm__own_reward": True}, "replay_value must be 0"),
        ({"algorithm__critic_start": 9}, "critic_start is 9"),
        ({"algorithm__first_continue": "true"}, "first_continue"),
        ({"algorithm__reward_transform": "clip"}, "reward_transform"),
    ):
        with pytest.raises(ConfigError, match=text):
            make_dreamer(**changes)
