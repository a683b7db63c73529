"""A dream: the world model, stepped by you or the agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rl_lab.environments.dreams import Dreams
from rl_lab.records import ActMode, Batch
from rl_lab.tools.play.moment import Moment, Panel
from rl_lab.tools.play.panels import observation_picture
from rl_lab.workflows.base import WorldModelWorkflow


class DreamSource:
    """One dream.

    dreams: of a workflow that can dream
    starts: rows (1, T, …) that a new dream begins with
    """

    def __init__(
        self, dreams: Dreams, starts: Callable[[], Batch], *, sample: bool = False, seed: int = 0
    ) -> None:
        self.dreams = dreams
        self.starts = starts
        self.sample = sample
        self.workflow: Any = dreams.workflow
        self._generator = torch.Generator(dreams.device).manual_seed(seed)
        self._choice: np.ndarray | None = None
        self._obs: dict[str, np.ndarray] = {}
        self._began: np.ndarray | None = None  # the last real frame

    def reset(self) -> Moment:
        return self.begin(self.starts())

    def begin(self, batch: Batch) -> Moment:
        """Dream on from the last of these rows."""
        self._began = observation_picture(
            {name: value[0, -1].cpu().numpy() for name, value in batch.obs.items()}
        )
        self._arrived(self.dreams.start(batch))
        return Moment(self._obs)

    def step(self, action: np.ndarray) -> Moment:
        taken = np.asarray(action, dtype=self.dreams.spec.action.dtype)
        step = self.dreams.step(torch.as_tensor(taken)[None])
        self._arrived(step.obs)
        extra = {"end chance": float(step.end_chance[0])}
        return Moment(
            self._obs, taken, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), extra
        )

    def agent_action(self) -> np.ndarray:
        if self._choice is None:
            mode = ActMode(sample=self.sample, generator=self._generator)
            self._choice = self.dreams.act(mode)[0].cpu().numpy()
        return self._choice

    def think(self) -> dict[str, float]:
        if type(self.workflow).inspect_policy is WorldModelWorkflow.inspect_policy:
            return {}
        self.agent_action()
        return {
            name: float(value[0]) for name, value in self.workflow.inspect_policy(self.dreams.state).items()
        }

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("dream", observation_picture(self._obs))]
        if parts and self._began is not None:
            shown.insert(0, Panel("began from", self._began))
        return shown

    def _arrived(self, obs: dict[str, torch.Tensor]) -> None:
        self._obs = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self._choice = None
