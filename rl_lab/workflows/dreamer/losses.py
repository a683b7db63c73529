"""Losses of DreamerV3 as pure functions (Hafner et al. 2025; danijar/dreamerv3 @ e3f0224 agent.py, rssm.py).

Shapes: B sequences, T steps, F features; N imagined rollouts of H steps, thus H+1 states. Rewards and
continue probabilities are indexed by the state they arrive with, actions by the state they are taken in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rl_lab.components.nn.categorical import entropy, kl_divergence
from rl_lab.components.nn.losses import reward_share

Losses = dict[str, torch.Tensor]


def mean_losses(losses: Losses) -> Losses:
    return {name: loss.mean() for name, loss in losses.items()}


def total_loss(losses: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> torch.Tensor:
    """Σ scale × loss (0-d each). `losses` and `scales` must have the same keys."""
    assert losses.keys() == scales.keys(), f"losses {sorted(losses)} but scales {sorted(scales)}"
    scaled = [losses[name] if scales[name] == 1.0 else losses[name] * scales[name] for name in losses]
    return torch.stack(scaled).sum()


def kl_losses(
    posterior: torch.Tensor,  # (B, T, S, C) log probabilities
    prior: torch.Tensor,  # (B, T, S, C)
    free_nats: float,
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """KL losses of the RSSM (rssm.py: `RSSM.loss`), (B, T) each, with free nats; metrics.

    dynamics        max(free_nats, KL(sg(posterior) ‖ prior)) trains the prior
    representation  max(free_nats, KL(posterior ‖ sg(prior))) trains the posterior

    The KL is summed over the S variables of a step before it is clipped.
    """
    dynamics = kl_divergence(posterior.detach(), prior)
    representation = kl_divergence(posterior, prior.detach())
    losses = {
        "dynamics": dynamics.clamp(min=free_nats),
        "representation": representation.clamp(min=free_nats),
    }
    metrics = {
        "kl": dynamics.detach().mean(),
        "prior_entropy": entropy(prior.detach()).mean(),
        "posterior_entropy": entropy(posterior.detach()).mean(),
    }
    return losses, metrics


class ImaginedRollouts(NamedTuple):
    """N imagined rollouts of H steps with their values and λ-returns."""

    feature: torch.Tensor  # (N, H+1, F); has a gradient if the actor learns through the dynamics
    action: torch.Tensor  # (N, H, …)
    reward: torch.Tensor  # (N, H+1)
    cont: torch.Tensor  # (N, H+1) discount × P(continue)
    value_logits: torch.Tensor  # (N, H+1, bins) with gradient for the critic only
    value: torch.Tensor  # (N, H+1); has a gradient if `feature` has one
    returns: torch.Tensor  # (N, H); has a gradient if `feature` has one


def evaluate_rollouts(
    critic: Any,
    return_computer: Any,
    *,
    feature: torch.Tensor,
    action: torch.Tensor,
    reward: torch.Tensor,
    cont: torch.Tensor,
) -> ImaginedRollouts:
    """Add values and returns; λ-returns by default: R_t = r_{t+1} + c_{t+1} ((1 − λ) v_{t+1} + λ R_{t+1})."""
    value_logits = critic(feature.detach())
    with torch.set_grad_enabled(feature.requires_grad):
        value = critic.value(feature) if feature.requires_grad else critic.mean(value_logits)
        returns = return_computer(reward, cont, value)
    return ImaginedRollouts(feature, action, reward, cont, value_logits, value, returns)


def actor_critic_losses(
    actor: Any, critic: Any, rollouts: ImaginedRollouts, *, entropy_scale: torch.Tensor | float
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Losses of actor and critic (agent.py: `imag_loss`), (N, H) each; metrics.

    actor   −w (log π(a) sg(A) + η H[π]), REINFORCE with advantage A = (R − v) / max(1, S) and return range S;
            −w (A + η H[π]) if the rollouts have gradients, which then flow through the dynamics
    critic  w × (two-hot cross-entropy to sg(R) + cross-entropy to the slow critic's value)

    w is the discounted probability that the rollout has not ended.
    """
    feature, action, returns = rollouts.feature.detach(), rollouts.action.detach(), rollouts.returns.detach()
    with torch.no_grad():
        scale = actor.return_normalizer.update(returns)
        # Discounted probability of having reached each state, including the continue of the starting state.
        weight = torch.cumprod(rollouts.cont, 1)[:, :-1]
        slow = critic.slow_value(feature)[:, :-1]
    advantage = (rollouts.returns - rollouts.value[:, :-1]) / scale
    # The last state only bootstraps and has no action. It is sliced off after the networks, because slicing
    # the features first would copy them.
    padded = torch.cat([action, action[:, -1:]], 1)
    log_prob, policy_entropy = (x[:, :-1] for x in actor.log_prob_and_entropy(feature, padded))
    gain = advantage if advantage.requires_grad else log_prob * advantage
    losses = {
        "actor": -weight * (gain + entropy_scale * policy_entropy),
        "critic": weight * critic.loss(rollouts.value_logits[:, :-1], returns, slow),
    }
    normalizer = actor.return_normalizer
    metrics = {
        "entropy": policy_entropy.detach().mean(),
        "return_mean": returns.mean(),
        "return_low": normalizer.low.clone(),
        "return_high": normalizer.high.clone(),
        "return_scale": scale,
        "value_mean": rollouts.value.detach().mean(),
        "value_rise": (rollouts.value[:, -1] - rollouts.value[:, 0]).detach().mean(),
        "advantage_size": advantage.detach().abs().mean(),
        "reward_mean": rollouts.reward.detach().mean(),
        "reward_share": reward_share(rollouts.reward[:, 1:]),
        "alive_mean": weight.mean(),
    }
    return losses, metrics


def replay_value_loss(
    critic: Any,
    return_computer: Any,
    *,
    feature: torch.Tensor,  # (B, T, F) with gradient into the world model
    reward: torch.Tensor,  # (B, T) as stored
    terminated: torch.Tensor,  # (B, T) bool
    last: torch.Tensor,  # (B, T) bool
    bootstrap: torch.Tensor,  # (B, T) imagined return of each replayed state
    discount: float,
) -> torch.Tensor:
    """Critic loss on replayed rewards (agent.py: `repl_loss`), (B, T-1).

    The returns bootstrap from imagined returns. The last state of an episode has no return: its weight is 0.
    """
    logits = critic(feature[:, :-1])
    with torch.no_grad():
        cont = (~terminated).float() * discount
        returns = return_computer(reward, cont, bootstrap, last=last)
        slow = critic.slow_value(feature[:, :-1])
        weight = (~last[:, :-1]).float()
    return weight * critic.loss(logits, returns, slow)
