"""A workflow whose model is known: it counts. For whatever steps a world model without caring how it was learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_lab.records import ActionSpec, ActMode, ArraySpec, Batch, ImaginedStep, Spec
from rl_lab.workflows.base import WorldModelWorkflow

SPEC = Spec("counting", {"image": ArraySpec((3, 8, 8), "uint8")}, ActionSpec("discrete", (), (3,)))
SHADE = 10  # every pixel of the picture is SHADE times the count


class CountingModel(WorldModelWorkflow):
    """Action 1 adds one to the count, action 2 adds two; the reward is the action; the end's chance is `chances[count]`.

    grows: the state has a tensor that becomes longer with every step, as a transformer's memory does
    """

    def __init__(self, chances: dict[int, float] | None = None, *, grows: bool = False) -> None:
        super().__init__()
        self.chances = chances or {}
        self.grows = grows
        self.starts: list[int] = []  # rows of each dream_start
        self.acted: list[int] = []  # the action remembered at each act

    def initialize(self, context: Any) -> None:
        pass

    def initial_policy_state(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"action": torch.zeros(num_envs, dtype=torch.int64)}

    def act(
        self,
        obs: dict[str, torch.Tensor],
        policy_state: dict[str, torch.Tensor],
        is_first: torch.Tensor,
        mode: ActMode,
    ) -> Any:
        self.acted.append(-1 if bool(is_first[0]) else int(policy_state["action"][0]))
        action = torch.ones(len(is_first), dtype=torch.int64)
        return action, {"action": action}, {}

    def inspect_policy(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        some = next(iter(state.values()))
        return {"value": torch.full((len(some),), 0.5), "entropy": torch.full((len(some),), 1.25)}

    def dream_start(
        self, batch: Batch, *, generator: torch.Generator | None = None
    ) -> dict[str, torch.Tensor]:
        rows = batch.reward.shape[1]
        self.starts.append(rows)
        count = batch.obs["image"][:, -1, 0, 0, 0].long() // SHADE
        return self._state(count, rows)

    def dream_observation(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shade = (state["count"] * SHADE).clamp(0, 255).to(torch.uint8)
        return {"image": shade.view(-1, 1, 1, 1).expand(-1, 3, 8, 8).contiguous()}

    def dream_act(
        self, state: dict[str, torch.Tensor], mode: ActMode
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return torch.ones_like(state["count"]), state

    def dream_step(
        self,
        state: dict[str, torch.Tensor],
        action: torch.Tensor,
        *,
        generator: torch.Generator | None = None,
    ) -> tuple[dict[str, torch.Tensor], ImaginedStep]:
        after = self._state(state["count"] + action, int(state["age"][0]) + 1)
        chance = torch.tensor([self.chances.get(int(count), 0.0) for count in after["count"]])
        return after, ImaginedStep(action.float(), chance, self.dream_observation(after))

    def _state(self, count: torch.Tensor, age: int) -> dict[str, torch.Tensor]:
        state = {"count": count, "age": torch.full_like(count, age)}
        return {**state, "memory": torch.zeros(len(count), age)} if self.grows else state


def rows(*counts: int, size: int = 1) -> Batch:
    """A batch (size, T) of rows that show these counts."""
    image = np.array(counts, np.uint8) * SHADE
    shape = (size, len(counts))
    columns = {
        "obs/image": torch.from_numpy(
            np.broadcast_to(image[None, :, None, None, None], (*shape, 3, 8, 8)).copy()
        ),
        "action": torch.zeros(shape, dtype=torch.int64),
        "reward": torch.zeros(shape),
        **{flag: torch.zeros(shape, dtype=torch.bool) for flag in ("terminated", "truncated", "is_first")},
    }
    return Batch(columns)


class CountingEnv:
    """The real thing, as a vector environment of one: counts to `last`, or past it, and ends there."""

    spec = SPEC
    num_envs = 1
    render_mode = "rgb_array"

    def __init__(self, last: int = 12) -> None:
        self.last = last
        self.count = 0
        self.closed = False
        self.seeds: list[int | None] = []

    def reset(
        self, *, seed: int | None = None, options: Any = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.seeds.append(seed)
        self.count = 0
        return self._obs(), {}

    def step(self, actions: Any) -> Any:
        self.count += int(actions[0])
        end = self.count >= self.last
        reward = np.array([float(actions[0])], np.float32)
        return self._obs(), reward, np.array([end]), np.array([False]), {}

    def frame(self) -> np.ndarray:
        return np.full((40, 60, 3), min(255, self.count * SHADE), np.uint8)

    def close(self) -> None:
        self.closed = True

    def _obs(self) -> dict[str, np.ndarray]:
        return {"image": np.full((1, 3, 8, 8), min(255, self.count * SHADE), np.uint8)}
