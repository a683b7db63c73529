"""DreamerV3 that acts by planning in its world model; training is unchanged.

The actor proposes some of the candidate action sequences and the critic gives the value after the horizon,
so the model rates a plan at least as high as the actor's own actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_lab.components.nn.actions import ActionEncoder, stored_action
from rl_lab.records import ActionSpec, ActMode
from rl_lab.workflows.base import PolicyState
from rl_lab.workflows.context import WorkflowContext
from rl_lab.workflows.dreamer.settings import DreamerMPCSettings, DreamerSettings
from rl_lab.workflows.dreamer.workflow import DreamerWorkflow

State = Mapping[str, torch.Tensor]


class RSSMModel:
    """Planning model of an RSSM: next, reward, alive, value, policy. Latents are states (deter, stoch).

    discount: the factor of the continue head's prediction that is not the probability of continuing
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
        self.noise = {"next": rssm.noise_spec(), "policy": actor.noise_spec()}

    def next(self, latent: State, action: torch.Tensor, noise: torch.Tensor) -> State:
        return self.rssm.imagine_step(latent, stored_action(action, self.action), noise)

    def reward(self, latent: State, action: torch.Tensor, following: State) -> torch.Tensor:
        """The reward that arrives with the following state."""
        return self.reward_head.predict(self.rssm.feature(following))

    def alive(self, following: State) -> torch.Tensor:
        probability = self.continue_head.predict(self.rssm.feature(following)) / self.discount
        return probability.clamp(max=1.0)

    def value(self, latent: State, noise: torch.Tensor | None = None) -> torch.Tensor:
        return self.critic.value(self.rssm.feature(latent))

    def policy(self, latent: State, noise: torch.Tensor) -> torch.Tensor:
        return self.action_encoder(self.actor.sample(self.rssm.feature(latent), noise))


PLAN = "plan"  # key of the planner's memory in the policy state


class DreamerMPCWorkflow(DreamerWorkflow):
    """DreamerWorkflow with one more controller, `planner`, that chooses the actions."""

    settings_type: type[DreamerSettings] = DreamerMPCSettings
    has_temperature = False

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
            discount=self.settings.discount if self.settings.discount_in_continue else 1.0,
            device=self.device,
        )
        self.planning_model.action_encoder.fast = self.fast

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
        # Updates the posterior. The plan replaces the actor's action, but not a random one.
        action, state, extras = super().act(obs, state, is_first, mode)
        if mode.epsilon >= 1.0:
            return action, {**state, PLAN: self.planner.memory(len(is_first), self.device)}, extras
        action, memory = self._plan(state, policy_state[PLAN], is_first, mode)
        return action, {**state, "action": action, PLAN: memory}, extras

    @torch.no_grad()
    def dream_act(self, state: PolicyState, mode: ActMode) -> tuple[torch.Tensor, PolicyState]:
        is_first = torch.zeros(len(state["deter"]), dtype=torch.bool, device=self.device)
        memory = state.get(PLAN)
        if memory is None:
            memory = self.planner.memory(len(is_first), self.device)
        action, memory = self._plan(state, memory, is_first, mode)
        return action, {**state, PLAN: memory}

    def _plan(
        self, state: PolicyState, memory: torch.Tensor, is_first: torch.Tensor, mode: ActMode
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions (N, …) in the stored format, and the planner memory for the next step."""
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
