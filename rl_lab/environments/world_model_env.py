"""A learned world model with the interface of an environment, so that an agent can be stepped in imagination.

    agent = rl_lab.load_agent(run)
    real = rl_lab.make_env("minigrid/Empty-5x5", observe="rgb", size=64)
    env = WorldModelEnv(agent.workflow, agent.spec, EnvironmentStarts(real, length=5), horizon=50)
    obs, info = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(env.action_space.sample())

`WorldModelVectorEnv` has the interface of `VectorEnv` and steps B imagined episodes. Both contain
`ImaginedEpisodes`, which works with tensors and which play uses directly. Observations only contain what the
model decodes; without a decoder they are an empty dict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl_lab.environments.spec import action_space, observation_space
from rl_lab.errors import ConfigError, LabError
from rl_lab.protocols import ObservationDecoder, WorldModel
from rl_lab.records import OBS_PREFIX, ActMode, Batch, BatchSpec, Spec
from rl_lab.utils.media import to_image

Tensors = dict[str, torch.Tensor]
# (B, CPU generator) -> rows (B, T, …) whose last row is not the end of an episode
Starts = Callable[[int, torch.Generator], Batch]
# (observations (N, …) by name, is_first (N,)) -> actions (N, …)
Choose = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]

MAX_ATTEMPTS = 20  # resets after which `EnvironmentStarts` accepts starts of a single row

Observation = dict[str, np.ndarray]
StepResult = tuple[Observation, Any, Any, Any, dict[str, Any]]


class WorldModelEnv(gymnasium.Env):
    """One imagined episode as a Gymnasium environment; `options` are passed to `ImaginedEpisodes`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        workflow: Any,
        spec: Spec,
        starts: Starts,
        *,
        device: torch.device | str = "cpu",
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        self.lab_spec = spec
        self.starts = starts
        self.dreams = ImaginedEpisodes(workflow, spec, device=device, **options)
        self.render_mode = render_mode
        self.action_space = action_space(spec.action)
        self.observation_space = _decoded_space(workflow, spec)
        self._start_generator = torch.Generator().manual_seed(0)
        self._obs: Observation = {}
        self._needs_reset = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start an imagined episode, from `options={"batch": rows (1, T, …)}` if given."""
        super().reset(seed=seed)
        if seed is not None:
            self._start_generator.manual_seed(seed)
            self.dreams.seed(seed)
        batch = (options or {}).get("batch")
        self._obs = _first_row(
            self.dreams.start(self.starts(1, self._start_generator) if batch is None else batch)
        )
        self._needs_reset = False
        return self._obs, {}

    def step(self, action: Any) -> StepResult:
        """Step the model; `info["end_chance"]` is the predicted probability that the episode ends here."""
        if self._needs_reset:
            raise LabError("the imagined episode has ended: call reset() first")
        action_tensor = torch.as_tensor(np.asarray(action, dtype=self.lab_spec.action.dtype))[None]
        step = self.dreams.step(action_tensor)
        self._obs = _first_row(step.obs)
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self._needs_reset = terminated or truncated
        return (
            self._obs,
            float(step.reward[0]),
            terminated,
            truncated,
            {"end_chance": float(step.end_chance[0])},
        )

    def agent_action(self, mode: ActMode | None = None) -> np.ndarray:
        """Return the agent's action and update its memory of this episode."""
        return self.dreams.act(mode or ActMode(sample=False))[0].cpu().numpy()

    def render(self) -> np.ndarray | None:
        """Return the decoded image, (H, W, 3) uint8, or None if there is no image."""
        if self.render_mode is None:
            return None
        images = [value for value in self._obs.values() if value.dtype == np.uint8 and value.ndim == 3]
        return to_image(images[0]) if images else None


class WorldModelVectorEnv:
    """B imagined episodes with the interface of `VectorEnv`, including NEXT_STEP autoreset.

    A Collector or an Evaluator can step it. It has no exact resume.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (as in Gymnasium)
    render_mode = None

    def __init__(
        self,
        workflow: Any,
        spec: Spec,
        starts: Starts,
        num_envs: int,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.num_envs = num_envs
        self.spec = spec
        self.starts = starts
        self.dreams = ImaginedEpisodes(workflow, spec, device=device, seed=seed, **options)
        self.single_observation_space = _decoded_space(workflow, spec)
        self.single_action_space = action_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.is_first = np.ones(num_envs, bool)
        self.last_dones = np.zeros(num_envs, bool)
        self.last_obs: Observation = {}
        self._start_generator = torch.Generator().manual_seed(seed)
        self._sent: torch.Tensor | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start B imagined episodes."""
        if seed is not None:
            self._start_generator.manual_seed(seed)
            self.dreams.seed(seed)
        self.last_obs = _arrays(self.dreams.start(self.starts(self.num_envs, self._start_generator)))
        self.is_first = np.ones(self.num_envs, bool)
        self.last_dones = np.zeros(self.num_envs, bool)
        return self.last_obs, {}

    def step_async(self, actions: Any) -> None:
        """Store the actions (N, …) for `step_wait`, which steps the model."""
        shape = (self.num_envs, *self.spec.action.shape)
        array = np.asarray(actions, dtype=self.spec.action.dtype)
        if array.shape != shape:
            raise ConfigError(
                f"actions have shape {array.shape}: {self.num_envs} imagined episodes need shape {shape}"
            )
        if not self.dreams.count:
            raise LabError("step_async(): call reset() before the first step")
        self._sent = torch.as_tensor(array)

    def step_wait(self) -> StepResult:
        """Step the model, or restart episodes that have ended; return what `VectorEnv.step_wait` returns."""
        if self._sent is None:
            raise LabError("step_wait(): no action is in flight, call step_async() first")
        ended = self.last_dones
        step = self.dreams.step(self._sent)
        self._sent = None
        obs = step.obs
        if ended.any():
            obs = self.dreams.restart(
                torch.from_numpy(ended), self.starts(self.num_envs, self._start_generator)
            )
            if not ended.all():  # the others return the observation of their step
                obs = {n: _choose(ended, value, step.obs[n]) for n, value in obs.items()}
        self.last_obs = _arrays(obs)
        reward, chance = step.reward.cpu().numpy(), step.end_chance.cpu().numpy()
        terminated, truncated = step.terminated.cpu().numpy() & ~ended, step.truncated.cpu().numpy() & ~ended
        self.is_first = ended.copy()
        self.last_dones = terminated | truncated
        return (
            self.last_obs,
            np.where(ended, 0.0, reward).astype(np.float32),
            terminated,
            truncated,
            {"end_chance": chance},
        )

    def step(self, actions: Any) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def close(self) -> None:
        """Do nothing: the caller owns the model."""


def _choose(which: np.ndarray, yes: torch.Tensor, no: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(which).to(yes.device).view(-1, *[1] * (yes.ndim - 1))
    return torch.where(mask, yes, no)


def _arrays(obs: dict[str, torch.Tensor]) -> Observation:
    return {name: value.cpu().numpy() for name, value in obs.items()}


def _decoded_space(workflow: Any, spec: Spec) -> gymnasium.spaces.Dict:
    """Return the space of the observations that the model decodes."""
    names = workflow.dreamed_observations(spec)
    return observation_space({name: spec.observations[name] for name in names})


def _first_row(obs: dict[str, torch.Tensor]) -> Observation:
    return {name: value[0] for name, value in _arrays(obs).items()}


# --- Imagined episodes -----------------------------------------------------------------------------------


@dataclass
class DreamStep:
    """Result of one step of B imagined episodes."""

    obs: Tensors  # name -> (B, …), in the stored format; empty for a model without a decoder
    reward: torch.Tensor  # (B,) float32
    terminated: torch.Tensor  # (B,) bool: the model predicts the end of the episode
    truncated: torch.Tensor  # (B,) bool: the horizon was reached
    end_chance: torch.Tensor = field(
        default_factory=lambda: torch.zeros(0)
    )  # (B,) predicted probability of the end


@dataclass(frozen=True)
class DreamState:
    """A moment of imagined episodes, to which `ImaginedEpisodes.set_state` returns."""

    state: Tensors
    steps: torch.Tensor
    rows: tuple[Tensors, ...]
    since_flush: int

    @property
    def nbytes(self) -> int:
        groups = (self.state, *self.rows)
        return sum(value.nbytes for group in groups for value in group.values())


class ImaginedEpisodes:
    """Steps B imagined episodes of one world model together.

    The model is any `protocols.WorldModel`, with `dream_observation` if observations are to be decoded.
    Actions and observations are tensors on its device.

    ends:        "sample": sample the end with the model's probability; a threshold in [0, 1]: end when the
                 probability reaches it; None: never end
    horizon:     steps after which an episode is truncated; None: never
    flush_every: steps after which the model's memory is rebuilt from its last predicted frames; None: never.
                 It limits the cost of a model whose memory grows. (IRIS' play flushes after 20 frames and
                 keeps one.)
    flush_rows:  number of frames that the memory is rebuilt from
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
        if not isinstance(workflow, WorldModel):
            raise ConfigError(
                f"{type(workflow).__name__} has no world model that can be stepped: "
                "implement dream_start, dream_act and dream_step"
            )
        if isinstance(ends, str) and ends != "sample":
            raise ConfigError(
                f"ends={ends!r}: use 'sample', a probability between 0 and 1, or null to never end"
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
        self.steps = torch.zeros(0, dtype=torch.int64)  # (B,) on the CPU
        self._rows: deque[Tensors] = deque(maxlen=flush_rows)  # the last rows, to rebuild the memory from
        self._since_flush = 0
        self._generator = torch.Generator(self.device)
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Seed the generator of the model and of sampled ends."""
        self._generator.manual_seed(seed)

    @property
    def count(self) -> int:
        return len(self.steps)

    def start(self, batch: Batch) -> Tensors:
        """Start after the last of the rows (B, T, …); return its reconstruction, name -> (B, …)."""
        batch = self._on_device(batch)
        self.state = self.workflow.dream_start(batch, generator=self._generator)
        self.steps = torch.zeros(len(batch.reward), dtype=torch.int64)
        self._since_flush = 0
        self._rows.clear()
        for t in range(max(0, batch.reward.shape[1] - (self._rows.maxlen or 0)), batch.reward.shape[1]):
            self._rows.append({name: value[:, t] for name, value in self._row_columns(batch).items()})
        return self.observe()

    def restart(self, which: torch.Tensor, batch: Batch) -> Tensors:
        """Restart the episodes in `which` (B,) bool, from rows for all B; return all observations."""
        batch = self._on_device(batch)
        fresh = self.workflow.dream_start(batch, generator=self._generator)
        columns, length, chosen = self._row_columns(batch), batch.reward.shape[1], which.to(self.device)
        for age, row in enumerate(reversed(self._rows), start=1):
            _replace(row, {name: value[:, -min(age, length)] for name, value in columns.items()}, chosen)
        fits = self.state.keys() == fresh.keys() and all(
            self.state[name].shape == value.shape for name, value in fresh.items()
        )
        if fits:
            state = {name: value.clone() for name, value in self.state.items()}
            _replace(state, fresh, chosen)
            self.state = state
        else:  # the memory grows with its age: rebuild it for all episodes, so that the lengths are equal
            self.flush()
        self.steps[which.cpu()] = 0
        return self.observe()

    def get_state(self) -> DreamState:
        """Return the moment reached. Models do not write into a state that they were given, so nothing is copied."""
        rows = tuple(dict(row) for row in self._rows)
        return DreamState(dict(self.state), self.steps.clone(), rows, self._since_flush)

    def set_state(self, moment: DreamState) -> None:
        """Return to a moment. The generator goes on, so what follows is sampled anew."""
        self.state, self.steps = dict(moment.state), moment.steps.clone()
        self._rows.clear()
        self._rows.extend(dict(row) for row in moment.rows)
        self._since_flush = moment.since_flush

    def observe(self) -> Tensors:
        """Decode the current states: name -> (B, …)."""
        if not isinstance(self.workflow, ObservationDecoder):
            return {}
        return dict(self.workflow.dream_observation(self.state))

    def act(self, mode: ActMode) -> torch.Tensor:
        """Return the agent's actions (B, …) and update its memory."""
        action, self.state = self.workflow.dream_act(self.state, mode)
        return action

    @torch.no_grad()
    def step(self, action: torch.Tensor) -> DreamStep:
        """Step with actions (B, …), in the stored format."""
        action = action.to(self.device)
        self.state, predicted = self.workflow.dream_step(self.state, action, generator=self._generator)
        chance = predicted.terminated.float()
        self.steps += 1
        at_horizon = (
            self.steps >= self.horizon
            if self.horizon is not None
            else torch.zeros(self.count, dtype=torch.bool)
        )
        terminated = self._end(chance)
        truncated = at_horizon.to(self.device) & ~terminated
        self._append_row(action, predicted.reward.float(), predicted.obs)
        self._since_flush += 1
        if self.flush_every is not None and self._since_flush >= self.flush_every:
            self.flush()
        return DreamStep(dict(predicted.obs), predicted.reward.float(), terminated, truncated, chance)

    def flush(self) -> None:
        """Rebuild the model's memory from the last rows, predictions if there are enough of them."""
        predicted = [name for name in self.spec.observations if OBS_PREFIX + name in self._rows[-1]]
        message = "flush_every needs a model with a decoder for all of its observations"
        if not predicted:
            raise ConfigError(message)
        columns = {name: torch.stack([row[name] for row in self._rows], 1) for name in self._rows[-1]}
        try:
            self.state = self.workflow.dream_start(Batch(columns), generator=self._generator)
        except KeyError as error:
            if len(predicted) == len(self.spec.observations):
                raise
            raise ConfigError(f"{message}, and this one only predicts {', '.join(predicted)}") from error
        self._since_flush = 0

    def _end(self, chance: torch.Tensor) -> torch.Tensor:
        if self.ends is None:
            return torch.zeros_like(chance, dtype=torch.bool)
        if self.ends == "sample":
            return torch.rand(chance.shape, generator=self._generator, device=self.device) < chance
        return chance >= float(self.ends)

    def _append_row(self, action: torch.Tensor, reward: torch.Tensor, obs: Tensors) -> None:
        """Store the action in the last row, and append its result as a new row without an action."""
        self._rows[-1]["action"] = action
        no = torch.zeros(self.count, dtype=torch.bool, device=self.device)
        row = {OBS_PREFIX + name: value for name, value in obs.items()}
        row |= {"action": torch.zeros_like(action), "reward": reward}
        self._rows.append(row | {"terminated": no, "truncated": no.clone(), "is_first": no.clone()})

    def _row_columns(self, batch: Batch) -> Tensors:
        """Return the columns of a row, without the additional columns of a policy."""
        return {name: batch[name] for name in self.spec.row_columns()}

    def _on_device(self, batch: Batch) -> Batch:
        return Batch({name: batch[name].to(self.device) for name in self.spec.row_columns()})


def _replace(target: Tensors, source: Tensors, which: torch.Tensor) -> None:
    for name, value in source.items():
        if name in target:
            target[name] = torch.where(which.view(-1, *[1] * (value.ndim - 1)), value, target[name])


# --- Start sequences -------------------------------------------------------------------------------------


class BufferStarts:
    """Start sequences of `length` rows from a buffer (see buffers/replay.py)."""

    def __init__(self, buffer: Any, length: int) -> None:
        self.buffer = buffer
        self.length = length

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        # One additional row, so that the last row of the result is never the end of an episode.
        spec = BatchSpec(count, self.length + 1, boundary="within")
        batch = self.buffer.sample(spec, generator=generator)
        return Batch({name: value[:, : self.length].clone() for name, value in batch.columns.items()})


class EpisodeStarts:
    """Start sequences of `length` rows from complete episodes, columns (K+1, …) as in a buffer."""

    def __init__(self, episodes: Sequence[Mapping[str, np.ndarray]], length: int) -> None:
        self.episodes = [episode for episode in episodes if len(episode["reward"]) > length]
        self.length = length
        if not self.episodes:
            raise ConfigError(
                f"no episode has the {length} steps that an imagined episode starts from: there are {len(episodes)} "
                f"episodes, and the longest has {max([len(episode['reward']) - 1 for episode in episodes], default=0)}"
            )

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        rows = []
        for _ in range(count):
            episode = self.episodes[_draw(len(self.episodes), generator)]
            first = _draw(len(episode["reward"]) - self.length, generator)
            rows.append({name: value[first : first + self.length] for name, value in episode.items()})
        return Batch({name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})


class EnvironmentStarts:
    """Start sequences from the first `length` rows of new episodes in a real environment (a `VectorEnv`).

    choose: returns the actions; None: random actions
    """

    def __init__(self, environment: Any, length: int, choose: Choose | None = None) -> None:
        self.environment = environment
        self.length = length
        self.choose = choose or self._random
        self._rng = np.random.default_rng(0)

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        self._rng = np.random.default_rng(_draw(2**31 - 1, generator))
        collected: list[dict[str, np.ndarray]] = []
        for attempt in range(MAX_ATTEMPTS + count):
            length = self.length if attempt < MAX_ATTEMPTS else 1
            collected += self._play(_draw(2**31 - 1, generator), length)
            if len(collected) >= count:
                break
        shortest = min(len(rows["reward"]) for rows in collected[:count])
        names = collected[0].keys()
        return Batch(
            {
                n: torch.from_numpy(np.stack([rows[n][-shortest:] for rows in collected[:count]]))
                for n in names
            }
        )

    def _play(self, seed: int, length: int) -> list[dict[str, np.ndarray]]:
        """Return one sequence of each environment whose episode did not end before `length` rows."""
        environment = self.environment
        spec: Spec = environment.spec
        obs, _ = environment.reset(seed=seed)
        n = environment.num_envs
        reward, ended, is_first = np.zeros(n, np.float32), np.zeros(n, bool), np.ones(n, bool)
        steps: list[dict[str, np.ndarray]] = []
        for t in range(length):
            row = {OBS_PREFIX + name: np.array(value) for name, value in obs.items()}
            flags = {"terminated": ended.copy(), "truncated": ended.copy(), "is_first": is_first.copy()}
            row |= {"reward": reward.copy(), **flags}
            row["action"] = np.zeros((n, *spec.action.shape), spec.action.dtype)
            steps.append(row)
            if t + 1 < length:
                row["action"] = np.asarray(self.choose(obs, is_first), dtype=spec.action.dtype)
                obs, reward, terminated, truncated, _ = environment.step(row["action"])
                is_first = np.zeros(n, bool)
                ended = ended | terminated | truncated
        return [
            {name: np.stack([row[name][i] for row in steps]) for name in steps[0]}
            for i in np.flatnonzero(~ended)
        ]

    def _random(self, obs: dict[str, np.ndarray], is_first: np.ndarray) -> np.ndarray:
        action = self.environment.spec.action
        shape = (self.environment.num_envs, *action.shape)
        if action.kind == "continuous":
            return self._rng.uniform(-1.0, 1.0, shape).astype(np.float32)
        return self._rng.integers(0, np.asarray(action.choices).reshape(action.shape), shape)


def _draw(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))
