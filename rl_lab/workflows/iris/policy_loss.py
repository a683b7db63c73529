"""Loss of the actor-critic of IRIS and Δ-IRIS: REINFORCE with a value baseline on imagined λ-returns.

The actor-critic's `compute_loss` calls it, as the tokenizer's and the world model's `compute_loss` have theirs.
eloialonso/iris src/models/actor_critic.py: `compute_loss` and `imagine`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rl_lab.components.nn.fast_path import SideStream
from rl_lab.components.nn.losses import LossWithIntermediateLosses, masked_mean, reward_share
from rl_lab.components.representation_learners.tokenizer import to_frames
from rl_lab.records import Batch


@dataclass
class ImaginedPolicyLoss:
    """Loss of the actor-critic. Burn-in rows set the policy's memory; imagination starts at the next row.

    returns:        computes λ-returns (components/return_computers)
    mask_ended:     whether frames after an imagined end are masked (Δ-IRIS) or trained on (IRIS)
    """

    returns: Callable[..., torch.Tensor]
    discount: float
    entropy: float
    mask_ended: bool
    autocast: Callable[[], AbstractContextManager[object]]
    fast: bool = False  # side streams, as the fast path of the parts

    def __call__(
        self,
        batch: Batch,  # (B, burn_in + 1) rows, padded on the left
        actor_critic: Any,
        tokenizer: Any,
        world_model: Any,
        *,
        action_noise: torch.Tensor,  # (B, H, k)
        model_noise: torch.Tensor,  # (B, H - 1, world_model.step_noise)
        slow: Any = None,  # moving average of the actor-critic, used for the targets if given
        entropy: torch.Tensor | None = None,  # 0-d: overrides the configured weight
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        if hasattr(world_model, "starts"):  # it has rows of its own
            batch = world_model.starts(batch)
        frames = to_frames(batch.obs[tokenizer.key])
        real = torch.ones_like(batch.is_first) if batch.mask is None else batch.mask
        with torch.no_grad():
            view = self._policy_view(tokenizer, frames)
            memory = self._burn_in(actor_critic, view, real)
            imagined = imagine(
                actor_critic,
                tokenizer,
                world_model,
                frames=frames,
                action=batch.action,
                memory=memory,
                action_noise=action_noise,
                model_noise=model_noise,
                autocast=self.autocast,
                start=view[:, -1],
                fast=self.fast,
            )
        # Trajectories that start from a terminal or padded row are masked.
        valid = (real[:, -1] & ~batch.terminated[:, -1]).unsqueeze(1).expand(imagined.alive.shape)
        hidden, _ = actor_critic.observe_sequence(imagined.frames, memory)
        target = self._targets(slow, view, real, imagined, hidden, actor_critic)
        mask = (valid & imagined.alive if self.mask_ended else valid)[:, :-1]
        return self._losses(actor_critic, imagined, hidden, target, mask, entropy)

    def _policy_view(self, tokenizer: Any, frames: torch.Tensor) -> torch.Tensor:
        """The policy's input for real frames (B, T, C, H, W)."""
        with self.autocast():
            return tokenizer.policy_view(frames.flatten(0, 1)).unflatten(0, frames.shape[:2]).float()

    def _burn_in(self, network: Any, view: torch.Tensor, real: torch.Tensor) -> dict[str, torch.Tensor]:
        memory: dict[str, torch.Tensor] = network.initial_state(len(view))
        if view.shape[1] > 1:
            _, memory = network.observe_sequence(view[:, :-1], memory, real[:, :-1])
        return memory

    @torch.no_grad()
    def _targets(
        self,
        slow: Any,
        view: torch.Tensor,
        real: torch.Tensor,
        imagined: ImaginedTrajectories,
        hidden: torch.Tensor,
        actor_critic: Any,
    ) -> torch.Tensor:
        """Values (B, H) for returns and advantages."""
        if slow is None:
            return actor_critic.value(hidden)
        hidden, _ = slow.observe_sequence(imagined.frames, self._burn_in(slow, view, real))
        return slow.value(hidden)

    def _losses(
        self,
        actor_critic: Any,
        imagined: ImaginedTrajectories,
        hidden: torch.Tensor,  # (B, H, units)
        target: torch.Tensor,  # (B, H)
        mask: torch.Tensor,  # (B, H - 1)
        entropy_weight: torch.Tensor | None,
    ) -> tuple[LossWithIntermediateLosses, dict[str, torch.Tensor]]:
        """−log π(a) sg(R − v) for the actor, regression of R for the critic, −η H[π]; R are the λ-returns."""
        cont = self.discount * (~imagined.ended).float()
        returns = self.returns(imagined.reward, cont, target)
        raw, action = actor_critic.raw_policy(hidden[:, :-1]), imagined.action[:, :-1]
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
                "reward_mean": masked_mean(imagined.reward[:, 1:], mask),
                "reward_share": reward_share(imagined.reward[:, 1:], mask),
                "policy_entropy": masked_mean(entropy, mask),
                "ended": imagined.ended.any(1).float().mean(),
            }
        return loss, metrics


# ---------------------------------------------------------------- imagination


@dataclass
class ImaginedTrajectories:
    """B trajectories of H frames. Rewards and ends are indexed by the frame they arrive with."""

    frames: torch.Tensor  # (B, H, C, H, W) in [0, 1]
    action: torch.Tensor  # (B, H) taken at each frame; the outcome of the last one is not predicted
    reward: torch.Tensor  # (B, H); 0 at the first frame
    ended: torch.Tensor  # (B, H) bool: the episode ended with this frame; False at the first
    alive: torch.Tensor  # (B, H) bool: the episode had not ended before or with this frame


@torch.no_grad()
def imagine(
    actor_critic: Any,
    tokenizer: Any,
    world_model: Any,
    *,
    frames: torch.Tensor,  # (B, T, C, H, W) real frames; imagination starts from the last
    action: torch.Tensor,  # (B, T)
    memory: dict[str, torch.Tensor],  # of the policy, before the last frame
    action_noise: torch.Tensor,  # (B, H, k)
    model_noise: torch.Tensor,  # (B, H - 1, world_model.step_noise) uniform
    autocast: Callable[[], AbstractContextManager[object]],
    start: torch.Tensor | None = None,  # (B, C, H, W) the last frame as the policy sees it
    fast: bool = False,
) -> ImaginedTrajectories:
    """Imagine H frames with the policy's actions, without gradient.

    Trajectories continue after their end, which `ended` and `alive` mark: shapes are fixed, and the host
    never waits. Policy, world model and tokenizer encode a new frame concurrently; the tokenizer's encoding
    is needed only when the next frame is decoded.
    """
    size, horizon = action_noise.shape[:2]
    zeros = torch.zeros(size, device=frames.device)
    # One autocast block for all steps: each weight is cast to bfloat16 once instead of once per step.
    with autocast():
        state = world_model.begin(tokenizer, frames, action, start)
        imagined_frames, actions, rewards, ends = [state["frame"]], [], [zeros], [zeros.bool()]
        pending: SideStream[dict[str, torch.Tensor]] | None = None
        features = _start_frame_features(tokenizer, imagined_frames[-1], fast)
        for t in range(horizon):
            with torch.autocast(frames.device.type, enabled=False):
                memory = actor_critic.observe(imagined_frames[-1], memory)
                raw = actor_critic.raw_policy(memory["h"])
                actions.append(actor_critic.policy.sample(raw, action_noise[:, t]))
            if t + 1 == horizon:
                break
            state = state if pending is None else pending.join()
            state, outcome = world_model.advance(tokenizer, state, actions[-1], model_noise[:, t], features)
            imagined_frames.append(state["frame"])
            rewards.append(outcome.reward)
            ends.append(outcome.ended)
            if t + 2 < horizon:  # only the policy reads the last frame
                pending = SideStream(world_model.read_pending, state, fast=fast, device=frames.device)
                features = _start_frame_features(tokenizer, state["frame"], fast)
    ended = torch.stack(ends, 1)
    return ImaginedTrajectories(
        torch.stack(imagined_frames, 1).float(),
        torch.stack(actions, 1),
        torch.stack(rewards, 1).float(),
        ended,
        ended.long().cumsum(1) == 0,
    )


def _start_frame_features(
    tokenizer: Any, frame: torch.Tensor, fast: bool
) -> Callable[[], torch.Tensor] | None:
    """Start encoding a frame for the decoder of the next one on a side stream. The result must be called."""
    if not tokenizer.contextual:
        return None
    return SideStream(tokenizer.frame_features, frame, fast=fast, device=frame.device, stream=1).join
