"""Dreamer that plans: it learns as DreamerV3 does, and acts by searching its own world model.

The actor proposes some of the action sequences and the critic says what comes after the horizon, so that a plan is at
least as good in the model's eyes as what the actor would do alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_lab.components.nn.actions import ActionEncoder, stored_action
from rl_lab.records import ActionSpec, ActMode, NoiseSpec
from rl_lab.workflows.base import PolicyState
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow

# --------------------
# A recurrent state-space model as a planner sees it: next, reward, value, policy.


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


PLAN = "plan"


class DreamerMPCWorkflow(DreamerWorkflow):
    """Parts of DreamerWorkflow, and a controller `planner`."""

    def _bind_context(self, context: WorkflowContext) -> None:
        super()._bind_context(context)
        self.planner = context.controller("planner", "plan", "noise", "memory")
        self.planning_model = RSSMModel(
            rssm=self.rssm,
            reward_head=self.reward_head,
            continue_head=self.continue_head,
            actor=self.actor,
            critic=self.critic,
            action=self.spec.action,
            discount=self.settings.discount,
            device=self.device,
        )

    def initial_policy_state(self, num_envs: int) -> PolicyState:
        return {
            **super().initial_policy_state(num_envs),
            PLAN: self.planner.memory(num_envs, self.device),
        }

    @torch.no_grad()
    def act(
        self, obs: dict[str, torch.Tensor], policy_state: PolicyState, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, PolicyState, dict[str, torch.Tensor]]:
        state = {key: value for key, value in policy_state.items() if key != PLAN}
        # The posterior step, and the actor's opinion, which is replaced; random actions stay what they are.
        action, state, extras = super().act(obs, state, is_first, mode)
        if mode.epsilon >= 1.0:
            return action, {**state, PLAN: self.planner.memory(len(is_first), self.device)}, extras
        action, memory = self._plan(state, policy_state[PLAN], is_first, mode)
        return action, {**state, "action": action, PLAN: memory}, extras

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        going_on = torch.zeros(len(state["deter"]), dtype=torch.bool, device=self.device)
        memory = state.get(PLAN)
        if memory is None:
            memory = self.planner.memory(len(going_on), self.device)
        action, memory = self._plan(state, memory, going_on, mode)
        return action, {**state, PLAN: memory}

    def _plan(
        self, state: PolicyState, memory: torch.Tensor, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (N, …) as stored, and the plan to go on from."""
        draw = {"normal": torch.randn, "uniform": torch.rand}
        noise = {
            name: draw[spec.kind](spec.shape, generator=mode.generator, device=self.device)
            for name, spec in self.planner.noise(len(is_first), self.planning_model.noise).items()
        }
        latent = {key: state[key] for key in ("deter", "stoch")}
        with self.autocast():
            plan = self.planner.plan(
                self.planning_model,
                latent,
                memory,
                is_first,
                noise,
                discount=self.settings.discount,
                explore=1.0 if mode.sample else 0.0,
            )
        return stored_action(plan.action, self.spec.action), plan.memory
