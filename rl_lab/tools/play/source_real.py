"""The real environment: one of the run's evaluation environments, stepped by you or the agent."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from rl_lab.errors import LabError
from rl_lab.records import OBS_PREFIX, ActMode, Batch, Spec
from rl_lab.tools.play.moment import Moment, Panel
from rl_lab.tools.play.panels import observation_picture
from rl_lab.workflows.base import WorldModelWorkflow

RECONSTRUCTED_ROWS = (
    4  # that the model looks at for its picture of the newest: more cost time, and hardly show
)
TRIES = 20  # episodes that end before a dream could start, until one of a single frame is taken


class RealSource:
    """A vector environment of one, and the agent's memory of it.

    context: rows that are kept, for a dream to start from and for the model's picture of the present
    """

    def __init__(
        self,
        workflow: Any,
        environment: Any,
        *,
        device: torch.device,
        sample: bool = False,
        context: int = 8,
        seed: int = 0,
    ) -> None:
        self.workflow = workflow
        self.environment = environment
        self.spec: Spec = environment.spec
        self.device = device
        self.sample = sample
        self.rows: deque[dict[str, np.ndarray]] = deque(maxlen=context)
        self._seed: int | None = seed  # of the first episode; the others follow from it
        self._generator = torch.Generator(device).manual_seed(seed)
        self._memory: dict[str, torch.Tensor] | None = None  # None: the agent has not followed this episode
        self._choice: np.ndarray | None = None  # what the agent would do now, where it has thought
        self._frame: np.ndarray | None = None
        self._model: np.ndarray | None = None

    def reset(self) -> Moment:
        obs, _ = self.environment.reset(seed=self._seed)
        self._seed = None
        self.rows.clear()
        self._memory = None
        self._arrived(obs, 0.0, False, False, first=True)
        return Moment(self.observation())

    def step(self, action: np.ndarray) -> Moment:
        taken = np.asarray(action, dtype=self.spec.action.dtype)
        self._acted(taken)
        obs, reward, terminated, truncated, _ = self.environment.step(taken[None])
        flags = float(reward[0]), bool(terminated[0]), bool(truncated[0])
        self._arrived(obs, *flags, first=False)
        return Moment(self.observation(), taken, *flags)

    def agent_action(self) -> np.ndarray:
        if self._choice is None:
            self._look()
        assert self._choice is not None
        return self._choice

    def think(self) -> dict[str, float]:
        # It follows you only where it tells something: looking costs an act(), which for a planner is a lot. A policy
        # that has not followed begins with fresh memory when it takes over.
        if type(self.workflow).inspect_policy is WorldModelWorkflow.inspect_policy:
            return {}
        if self._choice is None:
            self._look()
        assert self._memory is not None
        return {name: float(value[0]) for name, value in self.workflow.inspect_policy(self._memory).items()}

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("environment", self.rendered())]
        if parts:
            shown.append(Panel("model input", observation_picture(self.observation())))
            reconstruction = self.reconstruction()
            if reconstruction is not None:
                shown.append(Panel("reconstruction", reconstruction))
        return shown

    def reconstruction(self) -> np.ndarray | None:
        """What the model makes of the newest rows; None without a decoder."""
        if self._model is None and self.workflow.can_dream:
            state = self.workflow.dream_start(self.batch(RECONSTRUCTED_ROWS), generator=self._generator)
            decoded = self.workflow.dream_observation(state)
            if decoded:
                self._model = observation_picture(
                    {name: value[0].cpu().numpy() for name, value in decoded.items()}
                )
        return self._model

    @property
    def ended(self) -> bool:
        """Whether the open episode is over."""
        return bool(self.rows[-1]["terminated"] or self.rows[-1]["truncated"])

    def batch(self, most: int | None = None) -> Batch:
        """The newest rows, (1, T, …) on the model's device."""
        rows = list(self.rows)[-(most or len(self.rows)) :]
        columns = {name: np.stack([row[name] for row in rows])[None] for name in rows[-1]}
        return Batch({name: torch.as_tensor(value).to(self.device) for name, value in columns.items()})

    def warm_up(self, length: int) -> Batch:
        """A fresh episode's first rows, played by the agent."""
        for attempt in range(TRIES + 1):
            moment = self.reset()
            wanted = min(length, self.rows.maxlen or 1) if attempt < TRIES else 1
            while len(self.rows) < wanted and not moment.done:
                moment = self.step(self.agent_action())
            if not moment.done:
                break
        return self.batch()

    def close(self) -> None:
        self.environment.close()

    # ---------------------------------------------------------------- inside

    def observation(self) -> dict[str, np.ndarray]:
        row = self.rows[-1]
        return {n.removeprefix(OBS_PREFIX): value for n, value in row.items() if n.startswith(OBS_PREFIX)}

    def _arrived(
        self, obs: dict[str, np.ndarray], reward: float, end: bool, out_of_time: bool, *, first: bool
    ) -> None:
        action = self.spec.action
        self.rows.append(
            {
                **{OBS_PREFIX + name: np.array(value[0]) for name, value in obs.items()},
                "action": np.zeros(action.shape, action.dtype),
                "reward": np.asarray(reward, np.float32),
                "terminated": np.asarray(end, np.bool_),
                "truncated": np.asarray(out_of_time, np.bool_),
                "is_first": np.asarray(first, np.bool_),
            }
        )
        self._choice = self._frame = self._model = None

    def _acted(self, action: np.ndarray) -> None:
        self.rows[-1]["action"] = action
        if self._choice is None:
            self._memory = None  # it has not seen this step: it begins anew when it is asked again
        elif self._memory is not None and "action" in self._memory:
            self._memory = {**self._memory, "action": torch.as_tensor(action[None]).to(self.device)}

    @torch.no_grad()
    def _look(self) -> None:
        """The agent sees the present: its choice, and its memory after it."""
        first = self._memory is None
        memory = self.workflow.initial_policy_state(1) if self._memory is None else self._memory
        obs = {
            name: torch.as_tensor(value[None]).to(self.device) for name, value in self.observation().items()
        }
        mode = ActMode(sample=self.sample, generator=self._generator)
        is_first = torch.tensor([first], device=self.device)
        action, self._memory, _ = self.workflow.act(obs, memory, is_first, mode)
        self._choice = action[0].cpu().numpy()

    def rendered(self) -> np.ndarray:
        """(H, W, 3) uint8: as the environment draws itself, or the observation where it does not."""
        if self._frame is None:
            try:
                self._frame = self.environment.render() if self.environment.render_mode else None
            except LabError:  # this one draws nothing
                if self.environment.closed:
                    raise
            if self._frame is None:
                self._frame = observation_picture(self.observation())
        return self._frame
