"""Sources of play: the real environment, the world model, and both side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl_lab.environments.world_model_env import DreamState, ImaginedEpisodes
from rl_lab.errors import LabError
from rl_lab.protocols import InspectablePolicy, ObservationDecoder
from rl_lab.records import OBS_PREFIX, ActMode, Batch, Spec
from rl_lab.tools.play.frame import Frame, Panel, difference, has_image
from rl_lab.tools.play.pictures import Pictures

RECONSTRUCTED_ROWS = 4  # encoded for the reconstruction of the newest row; more are slower and look the same
TRIES = 20  # episodes that end within the context; after them a context of one row is used


class Acting:
    """How the agent chooses actions: the most likely one (temperature 0), or sampled at a temperature."""

    def __init__(self, sample: bool, seed: int, device: torch.device) -> None:
        self.temperature = 1.0 if sample else 0.0
        self.generator = torch.Generator(device).manual_seed(seed)

    def mode(self) -> ActMode:
        if self.temperature == 0.0:
            return ActMode(sample=False, generator=self.generator)
        return ActMode(sample=True, temperature=self.temperature, generator=self.generator)


class RealSource:
    """A vector environment with one evaluation environment of the run, stepped by the user or the agent.

    context: number of kept rows; a dream starts from them, and the reconstruction uses them
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
        pictures: Pictures | None = None,
    ) -> None:
        self.workflow = workflow
        self.pictures = pictures or Pictures(environment.spec)
        self.environment = environment
        self.spec: Spec = environment.spec
        self.device = device
        self.acting = Acting(sample, seed, device)
        self.rows: deque[dict[str, np.ndarray]] = deque(maxlen=context)
        self._seed: int | None = seed  # of the first episode; later seeds are derived from it
        self._policy_state: dict[str, torch.Tensor] | None = None  # None: not updated in this episode
        self._action: np.ndarray | None = None  # the agent's action here, if it was computed
        self._image: np.ndarray | None = None
        self._reconstruction: np.ndarray | None = None

    def reset(self) -> Frame:
        obs, _ = self.environment.reset(seed=self._seed)
        self._seed = None
        self.rows.clear()
        self._policy_state = None
        self._add_row(obs, 0.0, False, False, first=True)
        return Frame(self.observation())

    def step(self, action: np.ndarray) -> Frame:
        taken = np.asarray(action, dtype=self.spec.action.dtype)
        self._set_action(taken)
        obs, reward, terminated, truncated, _ = self.environment.step(taken[None])
        flags = float(reward[0]), bool(terminated[0]), bool(truncated[0])
        self._add_row(obs, *flags, first=False)
        return Frame(self.observation(), taken, *flags)

    def agent_action(self) -> np.ndarray:
        if self._action is None:
            self._act()
        assert self._action is not None
        return self._action

    def inspect(self) -> dict[str, float]:
        # While the user plays, the policy runs only if it returns values here: act() is slow for a planner. A
        # policy that did not run starts with an initial policy state when it takes over.
        if not isinstance(self.workflow, InspectablePolicy):
            return {}
        if self._action is None:
            self._act()
        assert self._policy_state is not None
        return {
            name: float(value[0]) for name, value in self.workflow.inspect_policy(self._policy_state).items()
        }

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("environment", self.rendered())]
        if parts:
            shown.append(Panel("model input", self.pictures.values(self.observation())))
            reconstruction = self.reconstruction()
            if reconstruction is not None:
                shown.append(Panel("reconstruction", reconstruction))
        return shown

    def reconstruction(self) -> np.ndarray | None:
        """Return the model's reconstruction of the newest row; None without a decoder."""
        workflow = self.workflow
        if self._reconstruction is None and workflow.can_dream and isinstance(workflow, ObservationDecoder):
            state = self.workflow.dream_start(self.batch(RECONSTRUCTED_ROWS), generator=self.acting.generator)
            decoded = workflow.dream_observation(state)
            if decoded:
                self._reconstruction = self.pictures.values(
                    {name: value[0].cpu().numpy() for name, value in decoded.items()}
                )
        return self._reconstruction

    @property
    def ended(self) -> bool:
        """Whether the current episode has ended."""
        return bool(self.rows[-1]["terminated"] or self.rows[-1]["truncated"])

    def batch(self, most: int | None = None) -> Batch:
        """Return the newest rows, (1, T, …), on the model's device."""
        rows = list(self.rows)[-(most or len(self.rows)) :]
        columns = {name: np.stack([row[name] for row in rows])[None] for name in rows[-1]}
        return Batch({name: torch.as_tensor(value).to(self.device) for name, value in columns.items()})

    def warm_up(self, length: int) -> Batch:
        """Start a new episode and return its first rows, with the agent's actions."""
        for attempt in range(TRIES + 1):
            frame = self.reset()
            wanted = min(length, self.rows.maxlen or 1) if attempt < TRIES else 1
            while len(self.rows) < wanted and not frame.done:
                frame = self.step(self.agent_action())
            if not frame.done:
                break
        return self.batch()

    def close(self) -> None:
        self.environment.close()

    # --- Private methods ---

    def observation(self) -> dict[str, np.ndarray]:
        row = self.rows[-1]
        return {n.removeprefix(OBS_PREFIX): value for n, value in row.items() if n.startswith(OBS_PREFIX)}

    def _add_row(
        self, obs: dict[str, np.ndarray], reward: float, terminated: bool, truncated: bool, *, first: bool
    ) -> None:
        action = self.spec.action
        self.rows.append(
            {
                **{OBS_PREFIX + name: np.array(value[0]) for name, value in obs.items()},
                "action": np.zeros(action.shape, action.dtype),
                "reward": np.asarray(reward, np.float32),
                "terminated": np.asarray(terminated, np.bool_),
                "truncated": np.asarray(truncated, np.bool_),
                "is_first": np.asarray(first, np.bool_),
            }
        )
        self._action = self._image = self._reconstruction = None

    def _set_action(self, action: np.ndarray) -> None:
        self.rows[-1]["action"] = action
        if self._action is None:
            self._policy_state = None  # the policy skipped this step: it restarts when it acts again
        elif self._policy_state is not None and "action" in self._policy_state:
            self._policy_state = {
                **self._policy_state,
                "action": torch.as_tensor(action[None]).to(self.device),
            }

    @torch.no_grad()
    def _act(self) -> None:
        """Compute the agent's action and its next policy state."""
        first = self._policy_state is None
        state = self.workflow.initial_policy_state(1) if self._policy_state is None else self._policy_state
        obs = {
            name: torch.as_tensor(value[None]).to(self.device) for name, value in self.observation().items()
        }
        mode = self.acting.mode()
        is_first = torch.tensor([first], device=self.device)
        action, self._policy_state, _ = self.workflow.act(obs, state, is_first, mode)
        self._action = action[0].cpu().numpy()

    def rendered(self) -> np.ndarray:
        """Return (H, W, 3) uint8: the rendered environment, or the observation if it cannot be rendered."""
        if self._image is None:
            try:
                self._image = self.environment.frame() if self.environment.render_mode else None
            except LabError:  # the environment cannot be rendered
                if self.environment.closed:
                    raise
            if self._image is None:
                self._image = self.pictures.show(self.observation())
        return self._image


@dataclass(frozen=True)
class Moment:
    """A step of a dream that can be returned to."""

    dream: DreamState
    obs: dict[str, np.ndarray]

    @property
    def nbytes(self) -> int:
        return self.dream.nbytes + sum(value.nbytes for value in self.obs.values())


class DreamSource:
    """The world model, stepped by the user or the agent.

    imagined: one imagined episode at a time
    starts: returns the rows (1, T, …) that a new dream starts from
    """

    def __init__(
        self,
        imagined: ImaginedEpisodes,
        starts: Callable[[], Batch],
        *,
        sample: bool = False,
        seed: int = 0,
        pictures: Pictures | None = None,
    ) -> None:
        self.imagined = imagined
        self.starts = starts
        self.workflow: Any = imagined.workflow
        self.pictures = pictures or Pictures(imagined.spec)
        self.acting = Acting(sample, seed, imagined.device)
        self.start: Batch | None = None  # the rows of the current dream
        self._action: np.ndarray | None = None
        self._obs: dict[str, np.ndarray] = {}

    def reset(self) -> Frame:
        return self.start_from(self.starts())

    def start_from(self, batch: Batch) -> Frame:
        """Continue from the last of these rows."""
        self.start = batch
        self._set_obs(self.imagined.start(batch))
        return Frame(self._obs)

    def step(self, action: np.ndarray) -> Frame:
        taken = np.asarray(action, dtype=self.imagined.spec.action.dtype)
        step = self.imagined.step(torch.as_tensor(taken)[None])
        self._set_obs(step.obs)
        extra = {"end chance": float(step.end_chance[0])}
        return Frame(
            self._obs, taken, float(step.reward[0]), bool(step.terminated[0]), bool(step.truncated[0]), extra
        )

    def moment(self) -> Moment:
        return Moment(self.imagined.get_state(), self._obs)

    def return_to(self, moment: Moment) -> None:
        """Go back to a step. What follows is sampled anew."""
        self.imagined.set_state(moment.dream)
        self._obs, self._action = moment.obs, None

    @property
    def temperature(self) -> float | None:
        """Temperature of the model's own sampling; None if it has none."""
        found = getattr(self.workflow, "temperature", None)
        return found if isinstance(found, float) else None

    @temperature.setter
    def temperature(self, value: float) -> None:
        self.workflow.temperature = value

    def agent_action(self) -> np.ndarray:
        if self._action is None:
            self._action = self.imagined.act(self.acting.mode())[0].cpu().numpy()
        return self._action

    def inspect(self) -> dict[str, float]:
        if not isinstance(self.workflow, InspectablePolicy):
            return {}
        self.agent_action()
        return {
            name: float(value[0]) for name, value in self.workflow.inspect_policy(self.imagined.state).items()
        }

    def panels(self, parts: bool) -> list[Panel]:
        shown = [Panel("dream", self.pictures.show(self._obs))]
        if parts and self.start is not None:
            shown.insert(0, Panel("start", self.pictures.show(last_observation(self.start))))
        if parts and self.pictures.draws(self._obs):
            shown.append(Panel("dream values", self.pictures.values(self._obs)))
        return shown

    def _set_obs(self, obs: dict[str, torch.Tensor]) -> None:
        self._obs = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self._action = None


def last_observation(batch: Batch) -> dict[str, np.ndarray]:
    """Return the observation of the last row of (1, T, …)."""
    return {name: value[0, -1].cpu().numpy() for name, value in batch.obs.items()}


class BothSource:
    """The real environment and the model's open-loop prediction from the same actions, side by side.

    The prediction restarts from the real rows after `horizon` steps and at every new episode.
    """

    def __init__(self, real: RealSource, imagined: ImaginedEpisodes, *, horizon: int) -> None:
        self.real = real
        self.imagined = imagined
        self.horizon = horizon
        self.open_loop_steps = 0  # since the prediction last restarted
        self._predicted: dict[str, np.ndarray] = {}

    def reset(self) -> Frame:
        self.real.warm_up(self.real.rows.maxlen or 1)
        return self.restart_prediction()

    def restart_prediction(self) -> Frame:
        """Start the prediction from the current state of the real environment."""
        self._predict_from_real()
        return Frame(self.real.observation())

    def step(self, action: np.ndarray) -> Frame:
        if self.open_loop_steps >= self.horizon:
            self._predict_from_real()
        frame = self.real.step(action)
        predicted = self.imagined.step(torch.as_tensor(np.asarray(frame.action))[None])
        self.open_loop_steps += 1
        self._predicted = {name: value[0].cpu().numpy() for name, value in predicted.obs.items()}
        frame.extra |= {
            "dream reward": float(predicted.reward[0]),
            "end chance": float(predicted.end_chance[0]),
            "error": self._error(),
            "steps dreamed": self.open_loop_steps,
        }
        return frame

    def agent_action(self) -> np.ndarray:
        return self.real.agent_action()

    def inspect(self) -> dict[str, float]:
        return self.real.inspect()

    def panels(self, parts: bool) -> list[Panel]:
        pictures, real, predicted = self.real.pictures, self.real.observation(), self._predicted
        if has_image(real) or pictures.draws(real):
            shown = [Panel("real", pictures.show(real)), Panel("dream", pictures.show(predicted))]
        else:  # the picture of the environment, and the values of both
            shown = [Panel("real", self.real.rendered())]
            shown += [
                Panel("real values", pictures.values(real)),
                Panel("dream values", pictures.values(predicted)),
            ]
        if parts and has_image(real):
            shown.append(Panel("difference", difference(shown[0].image, shown[1].image)))
        elif parts:
            gap = {name: value - real[name] for name, value in predicted.items()}
            shown.append(Panel("dream minus real", pictures.values(gap)))
        return shown

    def _predict_from_real(self) -> None:
        obs = self.imagined.start(self.real.batch())
        self._predicted = {name: value[0].cpu().numpy() for name, value in obs.items()}
        self.open_loop_steps = 0

    def _error(self) -> float:
        """Return the root mean squared error over all observations, images in [0, 1]."""
        errors = []
        for name, real in self.real.observation().items():
            if name in self._predicted:
                scale = 255.0 if real.dtype == np.uint8 else 1.0
                error = (real.astype(np.float32) - self._predicted[name].astype(np.float32)) / scale
                errors.append(float(np.mean(error**2)))
        return float(np.sqrt(np.mean(errors))) if errors else float("nan")
