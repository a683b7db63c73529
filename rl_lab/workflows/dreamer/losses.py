"""The losses of DreamerV3 as pure functions (Hafner et al. 2025; danijar/dreamerv3 agent.py, current form).

Shapes: B sequences, T steps, F features; N imagined dreams of H steps, so H+1 states. A reward and a continue
probability belong to the state they arrive with, an action to the state it is taken in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rl_lab.components.nn.categorical import entropy, kl_divergence

Losses = dict[str, torch.Tensor]


def mean_losses(losses: Losses) -> Losses:
    return {name: loss.mean() for name, loss in losses.items()}


def total_loss(losses: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> torch.Tensor:
    """Σ scale × loss (0-d each). Both have the same keys: a loss without a scale is a mistake, and so is the reverse."""
    assert losses.keys() == scales.keys(), f"losses {sorted(losses)} but scales {sorted(scales)}"
    scaled = [losses[name] if scales[name] == 1.0 else losses[name] * scales[name] for name in losses]
    return torch.stack(scaled).sum()


def kl_losses(
    posterior: torch.Tensor,  # (B, T, S, C) log probabilities
    prior: torch.Tensor,  # (B, T, S, C)
    free_nats: float,
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Two halves of the KL: the prior learns to predict, and (scaled less) the posterior to be predictable.

    Free nats apply to a step's sum over all variables, each half by itself.
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


class Dreams(NamedTuple):
    """N dreams of H steps: what is known of them before anything is learned from them."""

    feature: torch.Tensor  # (N, H+1, F); with gradient where the policy learns through the dynamics
    action: torch.Tensor  # (N, H, …)
    reward: torch.Tensor  # (N, H+1)
    cont: torch.Tensor  # (N, H+1) discount included
    value_logits: torch.Tensor  # (N, H+1, bins) with gradient for the critic alone
    value: torch.Tensor  # (N, H+1); with gradient where the features have one
    returns: torch.Tensor  # (N, H); likewise


def value_dreams(
    critic: Any,
    return_computer: Any,
    *,
    feature: torch.Tensor,
    action: torch.Tensor,
    reward: torch.Tensor,
    cont: torch.Tensor,
) -> Dreams:
    """The critic's opinion of dreamed states, and the returns that follow from it."""
    value_logits = critic(feature.detach())
    with torch.set_grad_enabled(feature.requires_grad):
        value = critic.value(feature) if feature.requires_grad else critic.mean(value_logits)
        returns = return_computer(reward, cont, value)
    return Dreams(feature, action, reward, cont, value_logits, value, returns)


def actor_critic_losses(
    actor: Any, critic: Any, dreams: Dreams, *, entropy_scale: torch.Tensor | float
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """The actor's loss, and the critic's: two-hot regression on the returns.

    The actor learns by REINFORCE with a baseline, for discrete and continuous actions alike; in dreams with gradient by
    that of the advantage itself. returns: losses (N, H) each, metrics.
    """
    feature, action, returns = dreams.feature.detach(), dreams.action.detach(), dreams.returns.detach()
    with torch.no_grad():
        scale = actor.return_normalizer.update(returns)
        # Probability of still being alive in each state; the starting state's own continue is part of it.
        weight = torch.cumprod(dreams.cont, 1)[:, :-1]
        slow = critic.slow_value(feature)[:, :-1]
    advantage = (dreams.returns - dreams.value[:, :-1]) / scale
    # The last state is only judged, not acted in. It is left out behind the networks: cut off before, all the other
    # features would have to be copied.
    padded = torch.cat([action, action[:, -1:]], 1)
    log_prob, policy_entropy = (x[:, :-1] for x in actor.log_prob_and_entropy(feature, padded))
    gain = advantage if advantage.requires_grad else log_prob * advantage
    losses = {
        "actor": -weight * (gain + entropy_scale * policy_entropy),
        "critic": weight * critic.loss(dreams.value_logits[:, :-1], returns, slow),
    }
    normalizer = actor.return_normalizer
    metrics = {
        "entropy": policy_entropy.detach().mean(),
        "return_mean": returns.mean(),
        "return_low": normalizer.low.clone(),
        "return_high": normalizer.high.clone(),
        "return_scale": scale,
        "value_mean": dreams.value.detach().mean(),
        "value_rise": (dreams.value[:, -1] - dreams.value[:, 0]).detach().mean(),
        "advantage_size": advantage.detach().abs().mean(),
        "reward_mean": dreams.reward.detach().mean(),
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
    """The critic on real rewards: (B, T-1). A last state has no return of its own, so it weighs nothing."""
    logits = critic(feature[:, :-1])
    with torch.no_grad():
        cont = (~terminated).float() * discount
        returns = return_computer(reward, cont, bootstrap, last=last)
        slow = critic.slow_value(feature[:, :-1])
        weight = (~last[:, :-1]).float()
    return weight * critic.loss(logits, returns, slow)
