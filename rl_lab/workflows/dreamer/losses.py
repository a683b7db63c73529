"""Losses of Dreamer as pure functions (Hafner et al. 2025; danijar/dreamerv3 @ e3f0224 agent.py, rssm.py).

Shapes: B sequences, T steps, F features; N imagined rollouts of H steps, thus H+1 states. Rewards and
continue probabilities are indexed by the state they arrive with, actions by the state they are taken in.

Two conventions of values. Today the value of a state is the return *after* it. In V1 and V2 (`own_reward`) it includes
the reward that arrives with the state: danijar/dreamerv2 agent.py, `target`, `actor_loss`, `critic_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from rl_lab.components.nn.fast_path import SideStream
from rl_lab.components.nn.latents import CategoricalLatent, Latent
from rl_lab.components.nn.losses import reward_share
from rl_lab.components.nn.training_step import Gradients
from rl_lab.utils.ranks import clamp_mean

Losses = dict[str, torch.Tensor]


def mean_losses(losses: Losses) -> Losses:
    return {name: loss.mean() for name, loss in losses.items()}


def total_loss(losses: Mapping[str, torch.Tensor], scales: Mapping[str, float]) -> torch.Tensor:
    """Σ scale × loss (0-d each). `losses` and `scales` must have the same keys."""
    assert losses.keys() == scales.keys(), f"losses {sorted(losses)} but scales {sorted(scales)}"
    scaled = [losses[name] if scales[name] == 1.0 else losses[name] * scales[name] for name in losses]
    return torch.stack(scaled).sum()


CATEGORICAL = CategoricalLatent(1, 1)  # KL and entropy depend on the statistics alone


def kl_losses(
    posterior: torch.Tensor,  # (B, T, S, C) log probabilities, or (B, T, S, 2) mean and deviation
    prior: torch.Tensor,
    free_nats: float,
    *,
    latent: Latent = CATEGORICAL,
    free_mean: bool = False,
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """KL losses of the RSSM (rssm.py: `RSSM.loss`), (B, T) each, with free nats; metrics.

    dynamics        max(free_nats, KL(sg(posterior) ‖ prior)) trains the prior
    representation  max(free_nats, KL(posterior ‖ sg(prior))) trains the posterior

    The KL is summed over the S variables of a step before it is clipped.
    free_mean: clip the mean over batch and time instead, 0-d (v1; `free_avg` in v2)
    """
    dynamics = latent.kl_divergence(posterior.detach(), prior)
    representation = latent.kl_divergence(posterior, prior.detach())
    metrics = {
        "kl": dynamics.detach().mean(),
        "prior_entropy": latent.entropy(prior.detach()).mean(),
        "posterior_entropy": latent.entropy(posterior.detach()).mean(),
    }
    losses = {"dynamics": dynamics, "representation": representation}
    if free_mean:
        return {name: clamp_mean(loss.mean(), free_nats) for name, loss in losses.items()}, metrics
    return {name: loss.clamp(min=free_nats) for name, loss in losses.items()}, metrics


class ImaginedRollouts(NamedTuple):
    """N imagined rollouts of H steps with their values and λ-returns."""

    feature: torch.Tensor  # (N, H+1, F); has a gradient if the actor learns through the dynamics
    action: torch.Tensor  # (N, H, …) as stored, or encoded (N, H, A) if the actor learns through the dynamics
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
    own_reward: bool = False,
) -> ImaginedRollouts:
    """Add values and returns; λ-returns by default: R_t = r_{t+1} + c_{t+1} ((1 − λ) v_{t+1} + λ R_{t+1}).

    own_reward: R_t = r_t + c_t ((1 − λ) v_{t+1} + λ R_{t+1})
    The values are those of the slow critic, if the critic has `slow_targets`.
    """
    value_logits = critic(feature.detach())
    slow = getattr(critic, "slow_targets", False)
    with torch.set_grad_enabled(feature.requires_grad):
        if slow:
            value = critic.target_value(feature)
        else:
            value = critic.value(feature) if feature.requires_grad else critic.mean(value_logits)
        if own_reward:  # one step later, as a return computer expects them
            unused = torch.zeros_like(reward[:, :1])
            late_reward, late_cont = (torch.cat([unused, x[:, :-1]], 1) for x in (reward, cont))
            returns = return_computer(late_reward, late_cont, value)
        else:
            returns = return_computer(reward, cont, value)
    return ImaginedRollouts(feature, action, reward, cont, value_logits, value, returns)


def rollout_weights(cont: torch.Tensor, *, own_reward: bool = False) -> torch.Tensor:
    """(N, H+1) -> (N, H): c_0 … c_t, the discounted probability that state t is reached; own_reward: c_0 … c_{t-1}."""
    if own_reward:
        cont = torch.cat([torch.ones_like(cont[:, :1]), cont[:, :-1]], 1)
    return torch.cumprod(cont, 1)[:, :-1]


def actor_critic_losses(
    actor: Any,
    critic: Any,
    rollouts: ImaginedRollouts,
    *,
    entropy_scale: torch.Tensor | float,
    own_reward: bool = False,
    critic_start: int = 0,
    start: torch.Tensor | None = None,
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Losses of actor and critic (agent.py: `imag_loss`), (N, H) each; metrics.

    actor   −w (log π(a) sg(A) + η H[π]), REINFORCE with advantage A = (R − v) / max(1, S) and return range S;
            −w (A + η H[π]) if the rollouts have gradients, which then flow through the dynamics;
            with the gradient `both`: −w (m A' + (1 − m) log π(a) sg(A) + η H[π]), A' = R / max(1, S)
    critic  w × (two-hot cross-entropy to sg(R) + cross-entropy to the slow critic's value)

    w is the discounted probability that the rollout has not ended.
    own_reward:   the action of state t is credited with R_{t+1}, and with `dynamics` no value is subtracted from it,
                  so the actor has one state less (v1, v2)
    critic_start: the critic is trained on states from this one on; 1 in V1, which leaves out the replayed state
    start:        (N, F) the first states' features, if the losses are to have gradients of them (`ac_grads`)
    """
    feature, action, returns = rollouts.feature.detach(), rollouts.action, rollouts.returns.detach()
    value_logits = rollouts.value_logits
    if start is not None:
        feature = torch.cat([start.to(feature.dtype).unsqueeze(1), feature[:, 1:]], 1)
        value_logits = critic(feature)
    gradient = getattr(actor, "gradient", "reinforce")
    with torch.no_grad():
        scale = actor.return_normalizer.update(returns)
        weight = rollout_weights(rollouts.cont, own_reward=own_reward)
        slow = critic.slow_value(feature)[:, :-1]
    if own_reward:
        gained = rollouts.returns[:, 1:]
        advantage = gained if gradient == "dynamics" else gained - rollouts.value[:, : gained.shape[1]]
        advantage = advantage / scale
    else:
        advantage = (rollouts.returns - rollouts.value[:, :-1]) / scale
    if getattr(actor, "advantage_normalizer", None) is not None:
        with torch.no_grad():
            actor.advantage_normalizer.update(advantage)
            advantage = actor.advantage_normalizer.normalize(advantage)
    steps = advantage.shape[1]
    # The last state only bootstraps and has no action. It is sliced off after the networks, because slicing
    # the features first would copy them.
    padded = torch.cat([action, action[:, -1:]], 1)
    if gradient == "both":
        found = actor.log_prob_of_encoded(feature, padded)
    elif gradient == "dynamics" and rollouts.feature.requires_grad:
        found = actor.log_prob_of_encoded(feature, padded.detach())
    else:
        found = actor.log_prob_and_entropy(feature, padded.detach())
    log_prob, policy_entropy = (x[:, :steps] for x in found)
    if gradient == "both":
        mix = actor.gradient_mix
        whole = (rollouts.returns[:, 1:] if own_reward else rollouts.returns) / scale
        gain = mix * whole + (1.0 - mix) * log_prob * advantage.detach()
    else:
        gain = advantage if advantage.requires_grad else log_prob * advantage
    critic_loss = critic.loss(value_logits[:, :-1], returns, slow)
    if critic_start:
        first = rollout_weights(rollouts.cont[:, critic_start:], own_reward=own_reward)
        critic_loss = first * critic_loss[:, critic_start:]
    else:
        critic_loss = weight * critic_loss
    losses = {
        "actor": -weight[:, :steps] * (gain + entropy_scale * policy_entropy),
        "critic": critic_loss,
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


# ---------------------------------------------------------------- results of one pass over a batch


class ActorCriticGradients(NamedTuple):
    """Result of one backward pass of actor and critic on imagined rollouts."""

    gradients: Gradients
    losses: Losses
    metrics: dict[str, torch.Tensor]
    start: torch.Tensor | None = None  # (N, F) gradient of the features where rollouts start


class Computed(NamedTuple):
    """What one pass over a batch, or over a part of it, gives to the optimizer step."""

    losses: Losses
    metrics: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor] | None = None  # latents to write back
    actor_critic: SideStream[ActorCriticGradients] | None = None
    starts: torch.Tensor | None = None  # (N, F) features that are to have the gradients of actor and critic

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of the world model, with those gradients: its value does not change."""
        if self.starts is None or self.actor_critic is None:
            return loss
        gradient = self.actor_critic.join().start
        if gradient is None:
            return loss
        product = (self.starts * gradient.to(self.starts.dtype)).sum()
        return loss + (product - product.detach())
