"""B dreams of one learned model, stepped together: their ends, their horizon and the flush of their memory.

The model is any workflow that can dream (`dream_start`, `dream_observation`, `dream_act`, `dream_step`; see
workflows/base.py). Actions and observations are tensors on its device; `world_model_env` puts Gymnasium's interface
around this, and play uses it as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_lab.errors import ConfigError
from rl_lab.records import OBS_PREFIX, ActMode, Batch, Spec

Tensors = dict[str, torch.Tensor]


@dataclass
class DreamStep:
    """What arrived in each of B dreams."""

    obs: Tensors  # name -> (B, …) as stored; empty for a model without a decoder
    reward: torch.Tensor  # (B,) float32
    terminated: torch.Tensor  # (B,) bool: the model says that the episode ends here
    truncated: torch.Tensor  # (B,) bool: the horizon is reached
    end_chance: torch.Tensor = field(default_factory=lambda: torch.zeros(0))  # (B,) in [0, 1]


class Dreams:
    """Steps B dreams.

    ends:        "sample" draws an end with the model's own probability; a number in [0, 1] ends where the probability
                 reaches it; None never ends
    horizon:     steps after which a dream is truncated; None: never
    flush_every: steps after which the model's memory is begun anew from its own last frames; None: never. It bounds
                 what a model with a growing memory costs. (IRIS' play flushes after 20 frames, from one.)
    flush_rows:  how many frames it begins anew from
    """

    def __init__(
        self,
        workflow: Any,
        spec: Spec,
        *,
        device: torch.device | str = "cpu",
        ends: str | float | None = "sample",
        horizon: int | None = None,
        flush_every: int | None = None,
        flush_rows: int = 1,
        seed: int = 0,
    ) -> None:
        if not getattr(workflow, "can_dream", False):
            raise ConfigError(
                f"{type(workflow).__name__} has no world model that can be stepped: its dream_step is not written"
            )
        if isinstance(ends, str) and ends != "sample":
            raise ConfigError(
                f"ends={ends!r}: use 'sample', a probability between 0 and 1, or null for never"
            )
        if isinstance(ends, float | int) and not 0.0 <= ends <= 1.0:
            raise ConfigError(f"ends={ends!r} must be a probability between 0 and 1")
        for name, value in (("horizon", horizon), ("flush_every", flush_every), ("flush_rows", flush_rows)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value!r} must be at least 1")
        self.workflow = workflow
        self.spec = spec
        self.device = torch.device(device)
        self.ends = ends
        self.horizon = horizon
        self.flush_every = flush_every
        self.state: Tensors = {}
        self.steps = torch.zeros(0, dtype=torch.int64)  # (B,) on the host
        self._rows: deque[Tensors] = deque(maxlen=flush_rows)  # the newest, to begin the memory anew from
        self._since_flush = 0
        self._generator = torch.Generator(self.device)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begin the model's and the ends' randomness anew."""
        self._generator.manual_seed(seed)

    @property
    def count(self) -> int:
        return len(self.steps)

    def start(self, batch: Batch) -> Tensors:
        """Dream on from the last of the rows (B, T, …); returns the model's picture of it, name -> (B, …)."""
        batch = self._on_device(batch)
        self.state = self.workflow.dream_start(batch, generator=self._generator)
        self.steps = torch.zeros(len(batch.reward), dtype=torch.int64)
        self._since_flush = 0
        self._rows.clear()
        for t in range(max(0, batch.reward.shape[1] - (self._rows.maxlen or 0)), batch.reward.shape[1]):
            self._rows.append({name: value[:, t] for name, value in self._kept(batch).items()})
        return self.observe()

    def restart(self, which: torch.Tensor, batch: Batch) -> Tensors:
        """Begin some dreams anew, (B,) bool, from rows for all B; returns what all of them look like now."""
        batch = self._on_device(batch)
        fresh = self.workflow.dream_start(batch, generator=self._generator)
        columns, length, chosen = self._kept(batch), batch.reward.shape[1], which.to(self.device)
        for age, row in enumerate(reversed(self._rows), start=1):
            _replace(row, {name: value[:, -min(age, length)] for name, value in columns.items()}, chosen)
        fits = self.state.keys() == fresh.keys() and all(
            self.state[name].shape == value.shape for name, value in fresh.items()
        )
        if fits:
            state = {name: value.clone() for name, value in self.state.items()}
            _replace(state, fresh, chosen)
            self.state = state
        else:  # a memory that grows with its age: what goes on begins anew from its own frames, beside the fresh ones
            self.flush()
        self.steps[which.cpu()] = 0
        return self.observe()

    def observe(self) -> Tensors:
        """The current states decoded: name -> (B, …)."""
        return dict(self.workflow.dream_observation(self.state))

    def act(self, mode: ActMode) -> torch.Tensor:
        """What the agent does in each dream, (B, …); its memory moves on."""
        action, self.state = self.workflow.dream_act(self.state, mode)
        return action

    @torch.no_grad()
    def step(self, action: torch.Tensor) -> DreamStep:
        """Take (B, …) actions, as stored."""
        action = action.to(self.device)
        self.state, dreamed = self.workflow.dream_step(self.state, action, generator=self._generator)
        chance = dreamed.terminated.float()
        self.steps += 1
        late = (
            self.steps >= self.horizon
            if self.horizon is not None
            else torch.zeros(self.count, dtype=torch.bool)
        )
        terminated = self._end(chance)
        truncated = late.to(self.device) & ~terminated
        self._remember(action, dreamed.reward.float(), dreamed.obs)
        self._since_flush += 1
        if self.flush_every is not None and self._since_flush >= self.flush_every:
            self.flush()
        return DreamStep(dict(dreamed.obs), dreamed.reward.float(), terminated, truncated, chance)

    def flush(self) -> None:
        """Begin the model's memory anew from the newest frames: its own, where it has dreamt that many."""
        predicted = [name for name in self.spec.observations if OBS_PREFIX + name in self._rows[-1]]
        message = "a memory that begins anew (flush_every) needs a model with a decoder for all that it sees"
        if not predicted:
            raise ConfigError(message)
        columns = {name: torch.stack([row[name] for row in self._rows], 1) for name in self._rows[-1]}
        try:
            self.state = self.workflow.dream_start(Batch(columns), generator=self._generator)
        except KeyError as error:
            if len(predicted) == len(self.spec.observations):
                raise
            raise ConfigError(f"{message}: this one predicts only {', '.join(predicted)}") from error
        self._since_flush = 0

    # ---------------------------------------------------------------- inside

    def _end(self, chance: torch.Tensor) -> torch.Tensor:
        if self.ends is None:
            return torch.zeros_like(chance, dtype=torch.bool)
        if self.ends == "sample":
            return torch.rand(chance.shape, generator=self._generator, device=self.device) < chance
        return chance >= float(self.ends)

    def _remember(self, action: torch.Tensor, reward: torch.Tensor, obs: Tensors) -> None:
        """The action belongs to the row before; what it led to is a new row whose action is still open."""
        self._rows[-1]["action"] = action
        no = torch.zeros(self.count, dtype=torch.bool, device=self.device)
        row = {OBS_PREFIX + name: value for name, value in obs.items()}
        row |= {"action": torch.zeros_like(action), "reward": reward}
        self._rows.append(row | {"terminated": no, "truncated": no.clone(), "is_first": no.clone()})

    def _kept(self, batch: Batch) -> Tensors:
        """Columns of a stored row, without what a policy stores beside them."""
        return {name: batch[name] for name in self.spec.row_columns()}

    def _on_device(self, batch: Batch) -> Batch:
        return Batch({name: batch[name].to(self.device) for name in self.spec.row_columns()})


def _replace(target: Tensors, source: Tensors, which: torch.Tensor) -> None:
    for name, value in source.items():
        if name in target:
            target[name] = torch.where(which.view(-1, *[1] * (value.ndim - 1)), value, target[name])
