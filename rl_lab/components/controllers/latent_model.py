"""TD-MPC's parts as a planner sees them: next, reward, value, policy."""

from __future__ import annotations

from typing import Any

import torch

from rl_lab.components.controllers.latent_returns import LatentReturns, can_be_joined
from rl_lab.components.nn.ensemble import Weights
from rl_lab.components.nn.normed_mlp import NormedMLP, cast_wide


def control(action: torch.Tensor, *task: torch.Tensor) -> torch.Tensor:
    """What dynamics, reward and value see beside the latent: the action, and the task's embedding where there is one."""
    return torch.cat([action, *(part.to(action.dtype) for part in task)], -1) if task else action


class LatentModel:
    """A latent world model bound to the tasks of N environments and to two members of its critic.

    Rows are grouped by environment: (N · S, …), or (N · S, H, …) for several steps at once.
    """

    rewards_on_arrival = False

    def __init__(
        self,
        *,
        dynamics: Any,
        reward_head: Any,
        policy: Any,
        critic: Any,  # for `mean` and `combine`
        online: Any,  # the critic's ensemble, perhaps in another number format
        pair: Weights,  # of two of its members
        termination_head: Any = None,
        task: torch.Tensor | None = None,  # (N, D) embeddings
        mask: torch.Tensor | None = None,  # (N, A)
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        # Layers of our own take an action with zeros behind it, as wide as their weights.
        own_layers = isinstance(getattr(dynamics, "mlp", None), NormedMLP)
        # With a task beside the action, the layer itself sees to the width.
        self.action_width = pair[0]["input1"].shape[1] if own_layers and task is None else None
        if termination_head is None and can_be_joined(dynamics, reward_head, pair):
            self.returns = self._returns  # planners look whether there is one
        self._dynamics, self._reward, self._policy = dynamics, reward_head, policy
        self._critic, self._online, self._pair = critic, online, pair
        self._termination = termination_head
        self._task, self._mask = task, mask
        self._work: LatentReturns | None = None
        self.noise = {"policy": policy.noise, "value": policy.noise}
        if termination_head is not None:
            self.alive = self._alive  # planners look whether there is one

    def next(
        self, latent: torch.Tensor, action: torch.Tensor, noise: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._dynamics(latent, control(action, *self._of_rows(self._task, latent)))

    def _returns(
        self, latent: torch.Tensor, actions: torch.Tensor, weight: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        """From N latents, the same in every call, R sequences: (N, L), (R, H, A), weight (R, H + 1) -> (R,)."""
        if self._work is None:
            self._work = LatentReturns(
                dynamics=self._dynamics,
                reward_head=self._reward,
                online=self._online,
                pair=self._pair,
                latent=latent,
                actions=actions,
                task=self._of_rows(self._task, actions[:, 0]),
            )
        end = self._work.roll_out(actions)
        return self._work.total(self.policy(end, noise), weight, self._critic)

    def reward(
        self, latent: torch.Tensor, action: torch.Tensor, following: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._reward.predict(latent, control(action, *self._of_rows(self._task, latent)))

    def policy(self, latent: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        masks = self._of_rows(self._mask, latent)
        return self._policy.sample(
            latent, noise, *self._of_rows(self._task, latent), mask=masks[0] if masks else None
        )

    def value(self, latent: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The critic's opinion of what the policy would do."""
        task = self._of_rows(self._task, latent)
        action = self.policy(latent, noise)
        action = cast_wide(action, self.dtype, self.action_width or action.shape[-1])
        logits = self._online(latent, control(action, *task), weights=self._pair)
        return self._critic.combine(self._critic.mean(logits))

    def _alive(self, following: torch.Tensor) -> torch.Tensor:
        """1 where the episode goes on, 0 where its end is likelier: as the original plans."""
        return (self._termination(following, *self._of_rows(self._task, following)) <= 0.0).float()

    def _of_rows(self, value: torch.Tensor | None, latent: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(N, D) for each row of (N · S, …, L): a tuple of one (N · S, …, D), empty where there is no such thing."""
        if value is None:
            return ()
        rows = latent.shape[0] // len(value)
        steps = latent.shape[1:-1]
        spread = value.view(len(value), 1, *[1] * len(steps), value.shape[-1])
        return (spread.expand(-1, rows, *steps, -1).flatten(0, 1).to(latent.dtype),)
