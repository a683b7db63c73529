"""A recurrent state-space model as a planner sees it: next, reward, value, policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_lab.components.nn.action_encoder import ActionEncoder
from rl_lab.components.nn.stored_action import stored_action
from rl_lab.records import ActionSpec, NoiseSpec

State = Mapping[str, torch.Tensor]


class RSSMModel:
    """The RSSM with its reward, continue, actor and critic heads. Latents are states: deter and stoch.

    discount: what the continue head has learned to multiply the chance of going on with
    """

    def __init__(
        self,
        *,
        rssm: Any,
        reward_head: Any,
        continue_head: Any,
        actor: Any,
        critic: Any,
        action: ActionSpec,
        discount: float,
        device: torch.device | str,
    ) -> None:
        self.rssm, self.reward_head, self.continue_head = rssm, reward_head, continue_head
        self.actor, self.critic = actor, critic
        self.action, self.discount = action, discount
        self.action_encoder = ActionEncoder(action).to(device)
        self.noise = {"next": NoiseSpec((rssm.stoch,), "uniform"), "policy": actor.noise_spec()}

    def next(self, latent: State, action: torch.Tensor, noise: torch.Tensor) -> State:
        return self.rssm.imagine_step(latent, stored_action(action, self.action), noise)

    def reward(self, latent: State, action: torch.Tensor, following: State) -> torch.Tensor:
        """A reward belongs to the state it arrives with."""
        return self.reward_head.predict(self.rssm.feature(following))

    def alive(self, following: State) -> torch.Tensor:
        chance = self.continue_head.predict(self.rssm.feature(following)) / self.discount
        return chance.clamp(max=1.0)

    def value(self, latent: State, noise: torch.Tensor | None = None) -> torch.Tensor:
        return self.critic.value(self.rssm.feature(latent))

    def policy(self, latent: State, noise: torch.Tensor) -> torch.Tensor:
        return self.action_encoder(self.actor.sample(self.rssm.feature(latent), noise))
