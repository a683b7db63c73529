"""How IRIS' and Δ-IRIS' actor and critic learn: REINFORCE with a value baseline on λ-returns of dreams."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rl_lab.components.nn.fast_path import Aside
from rl_lab.components.nn.losses import LossWithIntermediateLosses, masked_mean
from rl_lab.components.representation_learners.tokenizer import to_frames
from rl_lab.records import Batch

# --------------------
# A policy dreams in a token world model: fixed length, no gradient, no look by the host.


@dataclass
class Dream:
    """H frames of B dreams. What arrived with frame t stands at t; reward and ended are 0 at the first."""

    frames: torch.Tensor  # (B, H, C, H, W) in [0, 1]
    action: torch.Tensor  # (B, H) taken at each frame; the last one's outcome is not dreamed
    reward: torch.Tensor  # (B, H)
    ended: torch.Tensor  # (B, H) bool: the episode ended with this frame
    alive: torch.Tensor  # (B, H) bool: the dream had not ended before or with this frame


@torch.no_grad()
def imagine(
    actor_critic: Any,
    tokenizer: Any,
    world_model: Any,
    *,
    frames: torch.Tensor,  # (B, T, C, H, W) real frames; the dream begins at the last
    action: torch.Tensor,  # (B, T)
    memory: dict[str, torch.Tensor],  # the policy's, before the last frame
    action_noise: torch.Tensor,  # (B, H, k)
    model_noise: torch.Tensor,  # (B, H - 1, world_model.step_noise) uniform
    autocast: Callable[[], AbstractContextManager[object]],
    start: torch.Tensor | None = None,  # (B, C, H, W) the last frame as the policy sees it
) -> Dream:
    """A dream that has ended goes on, and is marked: shapes never change, and nobody has to ask whether it has.

    Three networks look at a new frame, and none waits for the others: the policy's, the world model's, and the
    tokenizer's, which is not needed before the next frame is decoded.
    """
    size, horizon = action_noise.shape[:2]
    nothing = torch.zeros(size, device=frames.device)
    # One block around all steps: autocast then turns every weight into bfloat16 once, not once a step.
    with autocast():
        state = world_model.begin(tokenizer, frames, action, start)
        seen, actions, rewards, ends = [state["frame"]], [], [nothing], [nothing.bool()]
        absorbed: Aside[dict[str, torch.Tensor]] | None = None
        looked = _look(tokenizer, seen[-1])
        for t in range(horizon):
            with torch.autocast(frames.device.type, enabled=False):
                memory = actor_critic.watch(seen[-1], memory)
                raw = actor_critic.raw_policy(memory["h"])
                actions.append(actor_critic.policy.sample(raw, action_noise[:, t]))
            if t + 1 == horizon:
                break
            state = state if absorbed is None else absorbed.join()
            state, outcome = world_model.advance(tokenizer, state, actions[-1], model_noise[:, t], looked)
            seen.append(state["frame"])
            rewards.append(outcome.reward)
            ends.append(outcome.ended)
            if t + 2 < horizon:  # the last frame is only looked at by the policy
                absorbed = Aside(world_model.absorb, state, device=frames.device)
                looked = _look(tokenizer, state["frame"])
    ended = torch.stack(ends, 1)
    return Dream(
        torch.stack(seen, 1).float(),
        torch.stack(actions, 1),
        torch.stack(rewards, 1).float(),
        ended,
        ended.long().cumsum(1) == 0,
    )


def _look(tokenizer: Any, frame: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """Begins what the decoder will want of this frame. What is given back has to be called: it is, for the next one."""
    return Aside(tokenizer.look, frame, device=frame.device, lane=1).join if tokenizer.contextual else None


@dataclass
class ImaginedPolicyLoss:
    """burn_in rows give the policy its memory, the row after them is where the dream begins.

    returns:        computes λ-returns (components/return_computers)
    mask_ended:     whether frames after an imagined end count no more (Δ-IRIS), or are trained on as well (IRIS)
    """

    returns: Callable[..., torch.Tensor]
    discount: float
    entropy: float
    mask_ended: bool
    autocast: Callable[[], AbstractContextManager[object]]

    def compute_loss(
        self,
        batch: Batch,  # (B, burn_in + 1) rows, padded on the left
        actor_critic: Any,
        tokenizer: Any,
        world_model: Any,
        *,
        action_noise: torch.Tensor,  # (B, H, k)
        model_noise: torch.Tensor,  # (B, H - 1, world_model.step_noise)
        slow: Any = None,  # a slowly moving copy, where targets come from one
        entropy: torch.Tensor | None = None,  # 0-d: replaces the configured weight
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        frames = to_frames(batch.obs[tokenizer.key])
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        with torch.no_grad():
            shown = self._shown(tokenizer, frames)
            memory = self._burn_in(actor_critic, shown, real)
            dream = imagine(
                actor_critic,
                tokenizer,
                world_model,
                frames=frames,
                action=batch.action,
                memory=memory,
                action_noise=action_noise,
                model_noise=model_noise,
                autocast=self.autocast,
                start=shown[:, -1],
            )
        # A dream from a row where the episode is over, or that is padding, teaches nothing.
        valid = (real[:, -1] & ~batch.terminated[:, -1]).unsqueeze(1).expand(dream.alive.shape)
        hidden, _ = actor_critic.watch_sequence(dream.frames, memory)
        target = self._targets(slow, shown, real, dream, hidden, actor_critic)
        mask = (valid & dream.alive if self.mask_ended else valid)[:, :-1]
        return self._losses(actor_critic, dream, hidden, target, mask, entropy)

    def _shown(self, tokenizer: Any, frames: torch.Tensor) -> torch.Tensor:
        """What the policy sees of real frames (B, T, C, H, W)."""
        with self.autocast():
            return tokenizer.policy_view(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).float()

    def _burn_in(self, network: Any, shown: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        memory: dict[str, torch.Tensor] = network.initial_state(len(shown))
        if shown.shape[1] > 1:
            _, memory = network.watch_sequence(shown[:, :-1], memory, real[:, :-1])
        return memory

    @torch.no_grad()
    def _targets(
        self,
        slow: Any,
        shown: torch.Tensor,
        real: torch.Tensor,
        dream: Dream,
        hidden: torch.Tensor,
        actor_critic: Any,
    ) -> torch.Tensor:
        """Values (B, H) that returns and advantages go by."""
        if slow is None:
            return actor_critic.value(hidden)
        hidden, _ = slow.watch_sequence(dream.frames, self._burn_in(slow, shown, real))
        return slow.value(hidden)

    def _losses(
        self,
        actor_critic: Any,
        dream: Dream,
        hidden: torch.Tensor,  # (B, H, units)
        target: torch.Tensor,  # (B, H)
        mask: torch.Tensor,  # (B, H - 1)
        entropy_weight: torch.Tensor | None,
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        cont = self.discount * (~dream.ended).float()
        returns = self.returns(dream.reward, cont, target)
        raw, action = actor_critic.raw_policy(hidden[:, :-1]), dream.action[:, :-1]
        log_prob, entropy = actor_critic.policy.log_prob_and_entropy(raw, action)
        advantage = returns - target[:, :-1]
        value_loss = actor_critic.regression.loss(actor_critic.critic(hidden[:, :-1]), returns)
        weight = self.entropy if entropy_weight is None else entropy_weight
        loss = LossWithIntermediateLosses.of(
            actor=-masked_mean(log_prob * advantage, mask),
            critic=masked_mean(value_loss, mask),
            entropy=-weight * masked_mean(entropy, mask),
        )
        with torch.no_grad():
            metrics = {
                "return_mean": masked_mean(returns, mask),
                "value_mean": masked_mean(target[:, :-1], mask),
                "reward_mean": masked_mean(dream.reward[:, 1:], mask),
                "policy_entropy": masked_mean(entropy, mask),
                "ended": dream.ended.any(1).float().mean(),
            }
        return loss, metrics
