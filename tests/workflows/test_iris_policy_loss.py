"""The loss of the actor-critic of IRIS teaches continuous and discrete actions, in a world with a known optimum."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rl_lab.components.controllers.recurrent_actor_critic import RecurrentActorCritic, ResidualTrunk
from rl_lab.components.return_computers.td_lambda import TDLambdaReturns
from rl_lab.records import ActionSpec, ArraySpec, Batch, Spec
from rl_lab.workflows.iris.policy_loss import ImaginedPolicyLoss

SIDE, SIZE, HORIZON = 8, 64, 5


@dataclass
class Outcome:
    reward: torch.Tensor
    ended: torch.Tensor


class Tokens:
    key, contextual = "image", False

    def policy_view(self, frames: torch.Tensor) -> torch.Tensor:
        return frames


class BarWorld:
    """A dark column at a random place of each frame.

    The reward of a continuous action is 1 minus its squared distance to the place; a discrete one names the half of the
    frame, for 1 or -1.
    """

    def __init__(self, continuous: bool) -> None:
        self.continuous = continuous
        self.generator = torch.Generator().manual_seed(0)

    def begin(self, tokenizer: Any, frames: torch.Tensor, action: Any, start: Any) -> dict[str, torch.Tensor]:
        place = torch.randint(0, SIDE, (len(frames),), generator=self.generator)
        frame = torch.ones(len(frames), 3, SIDE, SIDE)
        frame[torch.arange(len(frames)), :, :, place] = 0.0
        return {"frame": frame, "place": place / (SIDE - 1) * 2.0 - 1.0}

    def advance(
        self, tokenizer: Any, state: Any, action: torch.Tensor, noise: Any, features: Any
    ) -> tuple[dict[str, torch.Tensor], Outcome]:
        if self.continuous:
            reward = 1.0 - (action[:, 0].clamp(-1.0, 1.0) - state["place"]).square()
        else:
            reward = (action * 2.0 - 1.0) * state["place"].sign()
        outcome = Outcome(reward, torch.zeros(len(action), dtype=torch.bool))
        return self.begin(tokenizer, state["frame"], None, None), outcome

    def read_pending(self, state: Any) -> Any:
        return state


@pytest.mark.parametrize(("kind", "updates"), [("continuous", 80), ("discrete", 120)])
def test_policy_finds_the_known_optimum(kind: str, updates: int) -> None:
    torch.manual_seed(0)
    action = ActionSpec("continuous", (1,)) if kind == "continuous" else ActionSpec("discrete", (), (2,))
    spec = Spec("bar", {"image": ArraySpec((3, SIDE, SIDE), "uint8")}, action)
    network = RecurrentActorCritic(
        spec,
        lambda spec: ResidualTrunk(spec, width=8, latent=4, widths=[1, 2], halve=[True, False]),
        units=32,
    )
    objective = ImaginedPolicyLoss(TDLambdaReturns(lam=0.95), 0.9, 0.003, True, contextlib.nullcontext)
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    world = BarWorld(kind == "continuous")
    rewards = []
    for _ in range(updates):
        batch = a_batch(kind)
        noise = torch.randn(SIZE, HORIZON, 1) if kind == "continuous" else torch.rand(SIZE, HORIZON, 1)
        loss, metrics = objective(
            batch, network, Tokens(), world, action_noise=noise, model_noise=torch.zeros(SIZE, HORIZON - 1, 1)
        )
        optimizer.zero_grad()
        loss.loss_total.backward()
        optimizer.step()
        rewards.append(float(metrics["reward_mean"]))
    # The smallest deviation of a continuous policy alone costs 0.01. A random discrete one has 0.
    assert rewards[0] < 0.4 and sum(rewards[-5:]) / 5 > 0.9, rewards[::10]


def a_batch(kind: str) -> Batch:
    no = torch.zeros(SIZE, 2, dtype=torch.bool)
    shape = (SIZE, 2, 1) if kind == "continuous" else (SIZE, 2)
    columns = {
        "obs/image": torch.zeros(SIZE, 2, 3, SIDE, SIDE, dtype=torch.uint8),
        "action": torch.zeros(shape),
        "reward": torch.zeros(SIZE, 2),
        "is_first": no,
        "terminated": no,
        "truncated": no,
    }
    return Batch(columns)
