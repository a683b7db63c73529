"""A policy dreams in a token world model: fixed length, no gradient, no look by the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from rl_lab.components.nn.side_stream import Aside


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
