"""Switches of danijar/dreamerv3 @ e3f0224 that no version uses, against loops, numbers by hand and the fast path."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from rl_lab.components.controllers.dreamer import DreamerActorController, DreamerCriticController
from rl_lab.components.nn.moving_averages import MomentNormalizer, ReturnNormalizer, make_normalizer
from rl_lab.errors import ConfigError
from rl_lab.workflows.dreamer.losses import ImaginedRollouts, actor_critic_losses, mean_losses, total_loss
from tests.workflows.dreamer_case import (
    CONTINUOUS,
    draw_noise,
    image_spec,
    make_batch,
    make_dreamer,
    run_hook,
    vector_spec,
)
from tests.workflows.test_dreamer_fast_path import assert_fast_is_plain

# Heads that start at 0 would pass no gradients on; values of moderate size.
OUTPUTS = {
    "components__reward_head__out_scale": 1.0,
    "controllers__critic__out_scale": 1.0,
    "algorithm__size__bin_limit": 2.0,
}

# ---------------------------------------------------------------- normalizers


def test_debiased_percentiles_by_hand():
    """5th and 95th percentile of 0 … 100 are 5 and 95; at rate 0.5 the first averages are halves of them."""
    returns = torch.arange(101.0)
    assert ReturnNormalizer(rate=0.5).update(returns).item() == 45.0
    debiased = ReturnNormalizer(rate=0.5, debias=True)
    assert debiased.update(returns).item() == 90.0 and debiased.offset().item() == 5.0
    # 0.5 · (0.5 · 90) + 0.5 · 180 = 112.5, of the weights 0.75
    assert debiased.update(2.0 * returns).item() == pytest.approx(112.5 / 0.75)


def test_moments_match_loop():
    normalizer, generator = (
        MomentNormalizer(rate=0.1, limit=1e-8, debias=True),
        torch.Generator().manual_seed(0),
    )
    mean = squares = weight = 0.0
    for _ in range(5):
        values = torch.randn(7, generator=generator) * 3.0 + 2.0
        scale = normalizer.update(values)
        listed = values.tolist()
        mean = 0.9 * mean + 0.1 * sum(listed) / 7
        squares = 0.9 * squares + 0.1 * sum(v * v for v in listed) / 7
        weight = 0.9 * weight + 0.1
        deviation = (squares / weight - (mean / weight) ** 2) ** 0.5
        assert scale.item() == pytest.approx(deviation, rel=1e-4)
        assert normalizer.offset().item() == pytest.approx(mean / weight, rel=1e-4)
    assert torch.allclose(normalizer.restore(normalizer.normalize(values)), values, atol=1e-5)
    before = {key: value.clone() for key, value in normalizer.state_dict().items()}
    normalizer.update(torch.tensor([1.0, float("inf")]))
    assert all(torch.equal(value, before[key]) for key, value in normalizer.state_dict().items())


def test_normalizers_that_are_not_used_store_nothing():
    critic, actor = DreamerCriticController(features=4, units=8), DreamerActorController(**ACTOR)
    assert not [
        key for part in (critic, actor) for key in part.state_dict() if "value_norm" in key or "given" in key
    ]
    assert make_normalizer("key", "none") is None


ACTOR: dict[str, Any] = {"spec": vector_spec(), "features": 4, "units": 8}


@pytest.mark.parametrize("kind", ["meanstd", "perc"])
@pytest.mark.parametrize("slow_weight", [1.0, 0.5])
def test_critic_predicts_normalized_returns(kind: str, slow_weight: float):
    torch.manual_seed(0)
    words: dict[str, Any] = {
        "features": 4,
        "units": 8,
        "bins": 41,
        "out_scale": 1.0,
        "slow_weight": slow_weight,
    }
    critic = DreamerCriticController(**words, value_norm=kind)
    torch.manual_seed(0)
    plain = DreamerCriticController(**words)
    feature, returns = torch.randn(6, 4), torch.linspace(-50.0, 350.0, 6)
    slow = critic.slow_value(feature)
    loss = critic.loss(critic(feature), returns, slow)
    # One update at rate 0.01, debiased: the statistics of these returns.
    if kind == "meanstd":
        offset, scale = returns.mean(), returns.std(unbiased=False)
    else:
        offset = returns.quantile(0.05)
        scale = returns.quantile(0.95) - offset
    expected = plain.loss(plain(feature), (returns - offset) / scale, plain.slow_value(feature))
    assert torch.allclose(loss, expected, rtol=1e-3)
    assert torch.allclose(critic.value(feature), plain.value(feature) * scale + offset, rtol=1e-3)
    assert torch.allclose(
        critic.target_value(feature), plain.target_value(feature) * scale + offset, rtol=1e-3
    )
    assert torch.allclose(critic.mean(critic(feature)), critic.value(feature))


def test_advantages_are_normalized():
    """A = (R - v) / S, then (A - mean) / deviation of this batch, as the first update is debiased."""
    torch.manual_seed(0)
    losses = {}
    critic = DreamerCriticController(features=4, units=8, bins=41)
    rollouts = ImaginedRollouts(
        feature=torch.randn(5, 4, 4),
        action=torch.randint(3, (5, 3)),
        reward=torch.randn(5, 4),
        cont=torch.ones(5, 4),
        value_logits=torch.randn(5, 4, 41),
        value=torch.randn(5, 4),
        returns=torch.randn(5, 3) * 10.0,
    )
    for kind in ("none", "meanstd"):
        torch.manual_seed(1)
        actor = DreamerActorController(**ACTOR, out_scale=1.0, advantage_norm=kind)
        losses[kind] = actor_critic_losses(actor, critic, rollouts, entropy_scale=0.0)[0]["actor"]
    log_prob, _ = actor.log_prob_and_entropy(rollouts.feature[:, :-1], rollouts.action)
    scale = actor.return_normalizer.scale()
    advantage = (rollouts.returns - rollouts.value[:, :-1]) / scale
    assert torch.allclose(losses["none"], -log_prob * advantage, atol=1e-5)
    normalized = (advantage - advantage.mean()) / advantage.std(unbiased=False)
    assert torch.allclose(losses["meanstd"], -log_prob * normalized, atol=1e-4)


# ---------------------------------------------------------------- gradients of actor and critic in the world model


def reached(w: Any) -> dict[str, torch.Tensor]:
    parts = ("encoder", "rssm")
    return {
        f"{name}.{key}": p.grad.clone()
        for name in parts
        for key, p in getattr(w, name).named_parameters()
        if p.grad is not None
    }


@pytest.mark.parametrize("last", [0, 3])
def test_actor_and_critic_reach_the_world_model_through_the_first_state(last: int):
    changes = {**OUTPUTS, "algorithm__imagination_last": last}
    torch.manual_seed(0)
    w = make_dreamer(**changes, algorithm__actor_critic_gradient=True)
    metrics = run_hook(w, "update").metrics
    found = reached(w)
    torch.manual_seed(0)
    w = make_dreamer(**changes)
    off = run_hook(w, "update").metrics
    assert not all(
        torch.allclose(found[key], value, rtol=1e-3, atol=1e-7) for key, value in reached(w).items()
    )
    assert float(metrics["loss"]) == pytest.approx(float(off["loss"]), rel=1e-5)

    # Written out: one loss of everything, whose actor and critic see the replayed feature in the first state.
    torch.manual_seed(0)
    w = make_dreamer(**changes)
    batch, noise = make_batch(w), draw_noise(w, "update")
    states, posterior = w.infer(batch, noise["posterior"])
    feature = w.rssm.feature(states)
    losses, _ = w._world_model_losses(batch, states, posterior, feature)
    rollouts = w._imagine_rollouts(states, noise, batch.terminated)
    first = feature[:, -w.settings.starts :].flatten(0, 1)
    whole = torch.cat([first.unsqueeze(1), rollouts.feature[:, 1:]], 1)
    seen = rollouts._replace(value_logits=w.critic(whole))
    both, _ = actor_critic_losses(w.actor, w.critic, rollouts, entropy_scale=w.settings.entropy, start=first)
    assert torch.allclose(
        both["critic"],
        actor_critic_losses(w.actor, w.critic, seen, entropy_scale=0.0)[0]["critic"],
        atol=1e-5,
    )
    losses |= mean_losses(both) | w._replay_value_loss(batch, feature, rollouts.returns)
    total_loss(losses, {name: w.settings.loss_scales[name.split("/")[0]] for name in losses}).backward()
    expected = reached(w)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.allclose(found[key], value, rtol=1e-3, atol=1e-6), key


def test_parts_of_a_batch_have_that_gradient_too():
    # With parts the scale of returns is that of before the update: a rate of 0 keeps it.
    changes = {**OUTPUTS, "algorithm__actor_critic_gradient": True, "controllers__actor__return_rate": 0.0}
    found = {}
    for parts in (1, 2):
        torch.manual_seed(0)
        w = make_dreamer(**changes, algorithm__grad_acc_steps=parts)
        run_hook(w, "update")
        found[parts] = reached(w)
    assert found[1].keys() == found[2].keys()
    for key, value in found[1].items():
        assert torch.allclose(found[2][key], value, rtol=1e-3, atol=1e-5), key


# ---------------------------------------------------------------- fast path, refusals

SWITCHES: dict[str, dict[str, Any]] = {
    "value_norm": {"controllers__critic__value_norm": "meanstd"},
    "advantage_norm": {
        "controllers__actor__advantage_norm": "meanstd",
        "controllers__actor__return_debias": True,
    },
    "actor_critic_gradient": {"algorithm__actor_critic_gradient": True},
    "layers": {"components__rssm__posterior_layers": 2, "components__rssm__dynamics_layers": 2},
    "absolute": {"components__rssm__absolute": True},
}


@pytest.mark.parametrize("kernel", [5, 3])
def test_fast_path_equals_plain_with_other_convolutions(kernel: int):
    """Other channels are folded, too; other kernels stay plain."""
    parts = ("components__encoder", "components__decoder")
    changes: dict[str, Any] = {f"{part}__kernel": kernel for part in parts}
    changes |= {f"{part}__multipliers": [1, 2, 3] for part in parts} | {
        "components__rssm__multipliers": [1, 2, 3]
    }
    changes |= {"algorithm__size__blocks": 1, "algorithm__size__bin_limit": 2.0}
    fast = make_dreamer(image_spec(), training__fast_path="on", **changes)
    assert fast.encoder.parts[0].fast == fast.decoder.parts[0].fast == (kernel == 5)
    assert_fast_is_plain(image_spec(), "update", **changes)


@pytest.mark.parametrize("name", SWITCHES)
def test_fast_path_equals_plain(name: str):
    assert_fast_is_plain(vector_spec(CONTINUOUS), "update", **OUTPUTS, **SWITCHES[name])


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"algorithm__actor_critic_gradient": True, "controllers__actor__gradient": "dynamics"},
            "algorithm.actor_critic_gradient=true needs controllers.actor.gradient=reinforce",
        ),
        (
            {"controllers__actor__advantage_norm": "meanstd", "controllers__actor__gradient": "dynamics"},
            "controllers.actor.advantage_norm is meanstd: set it to none",
        ),
        ({"controllers__critic__value_norm": "std"}, "controllers.critic.value_norm"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        make_dreamer(vector_spec(CONTINUOUS), **changes)
