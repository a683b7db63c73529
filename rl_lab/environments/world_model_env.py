"""A learned model behind an environment's interface: whatever steps a real environment can step a dream.

    agent = rl_lab.load_agent(run)
    real = rl_lab.make_env("minigrid/Empty-5x5", observe="rgb", size=64)
    env = WorldModelEnv(agent.workflow, agent.spec, EnvironmentStarts(real, length=5), horizon=50)
    obs, info = env.reset(seed=1)
    obs, reward, terminated, truncated, info = env.step(env.action_space.sample())

`WorldModelVectorEnv` is the same for B dreams, with the interface of `VectorEnv`. What a model does
not decode is missing from its observations; without a decoder they are an empty dict. Reward and ends are there.
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
from rl_lab.records import OBS_PREFIX, ActMode, Batch, BatchSpec, Spec
from rl_lab.utils.media import picture

# --------------------
# B dreams of one learned model, stepped together: their ends, their horizon and the flush of their memory.
#
# The model is any workflow that can dream (`dream_start`, `dream_observation`, `dream_act`, `dream_step`; see
# workflows/base.py). Actions and observations are tensors on its device; `world_model_env` puts Gymnasium's interface
# around this, and play uses it as it is.


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


# --------------------
# Where dreams begin: rows of replay, of recorded episodes, or of a fresh episode in the real environment.
#
# Each is called with the number of dreams and a CPU generator, and gives rows (B, T, …) whose last one is not an end.


Starts = Callable[[int, torch.Generator], Batch]
# (observations (N, …) by name, is_first (N,)) -> actions (N, …)
Choose = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]

TRIES = 20  # episodes that ended too early before a start of a single row is given instead


class BufferStarts:
    """Sequences of `length` rows from a buffer (see buffers/replay.py)."""

    def __init__(self, buffer: Any, length: int) -> None:
        self.buffer = buffer
        self.length = length

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        # One row more than is used, so that the last one used is never an episode's last.
        spec = BatchSpec(count, self.length + 1, boundary="within")
        batch = self.buffer.sample(spec, generator=generator)
        return Batch({name: value[:, : self.length].clone() for name, value in batch.columns.items()})


class EpisodeStarts:
    """Sequences of `length` rows from whole episodes: columns (K+1, …) each, as a buffer stores them."""

    def __init__(self, episodes: Sequence[Mapping[str, np.ndarray]], length: int) -> None:
        self.episodes = [episode for episode in episodes if len(episode["reward"]) > length]
        self.length = length
        if not self.episodes:
            raise ConfigError(
                f"no episode has the {length} steps that a dream starts from: {len(episodes)} episodes, the longest has "
                f"{max([len(episode['reward']) - 1 for episode in episodes], default=0)}"
            )

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        rows = []
        for _ in range(count):
            episode = self.episodes[_draw(len(self.episodes), generator)]
            first = _draw(len(episode["reward"]) - self.length, generator)
            rows.append({name: value[first : first + self.length] for name, value in episode.items()})
        return Batch({name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]})


class EnvironmentStarts:
    """The first `length` rows of fresh episodes in a real environment (a VectorEnv, reset anew for every call).

    choose: the actions; None takes random ones
    """

    def __init__(self, environment: Any, length: int, choose: Choose | None = None) -> None:
        self.environment = environment
        self.length = length
        self.choose = choose or self._random
        self._numbers = np.random.default_rng(0)

    def __call__(self, count: int, generator: torch.Generator) -> Batch:
        self._numbers = np.random.default_rng(_draw(2**31 - 1, generator))
        taken: list[dict[str, np.ndarray]] = []
        for attempt in range(TRIES + count):
            length = self.length if attempt < TRIES else 1
            taken += self._play(_draw(2**31 - 1, generator), length)
            if len(taken) >= count:
                break
        shortest = min(len(rows["reward"]) for rows in taken[:count])
        names = taken[0].keys()
        return Batch(
            {n: torch.from_numpy(np.stack([rows[n][-shortest:] for rows in taken[:count]])) for n in names}
        )

    def _play(self, seed: int, length: int) -> list[dict[str, np.ndarray]]:
        """One start of each environment, those left out whose episode ended on the way."""
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
            return self._numbers.uniform(-1.0, 1.0, shape).astype(np.float32)
        return self._numbers.integers(0, np.asarray(action.choices).reshape(action.shape), shape)


def _draw(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (), generator=generator))


Observation = dict[str, np.ndarray]
StepResult = tuple[Observation, Any, Any, Any, dict[str, Any]]


class WorldModelEnv(gymnasium.Env):
    """One dream as a Gymnasium environment; `options` are those of `Dreams` (ends, horizon, flush_every, …)."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (Gymnasium's form)

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
        self.dreams = Dreams(workflow, spec, device=device, **options)
        self.render_mode = render_mode
        self.action_space = action_space(spec.action)
        self.observation_space = _dreamed_space(workflow, spec)
        self._choices = torch.Generator().manual_seed(0)
        self._seen: Observation = {}
        self._over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new dream. `options={"batch": rows (1, T, …)}` gives its start, in place of the usual ones."""
        super().reset(seed=seed)
        if seed is not None:
            self._choices.manual_seed(seed)
            self.dreams.seed(seed)
        batch = (options or {}).get("batch")
        self._seen = _first(self.dreams.start(self.starts(1, self._choices) if batch is None else batch))
        self._over = False
        return self._seen, {}

    def step(self, action: Any) -> StepResult:
        """`info["end_chance"]` is the model's probability that the episode ends here."""
        if self._over:
            raise LabError("this dream is over: call reset() first")
        taken = torch.as_tensor(np.asarray(action, dtype=self.lab_spec.action.dtype))[None]
        step = self.dreams.step(taken)
        self._seen = _first(step.obs)
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self._over = terminated or truncated
        return (
            self._seen,
            float(step.reward[0]),
            terminated,
            truncated,
            {"end_chance": float(step.end_chance[0])},
        )

    def agent_action(self, mode: ActMode | None = None) -> np.ndarray:
        """What the agent would do here, by its memory of this dream."""
        return self.dreams.act(mode or ActMode(sample=False))[0].cpu().numpy()

    def render(self) -> np.ndarray | None:
        """(H, W, 3) uint8: the decoded image; None where there is none."""
        if self.render_mode is None:
            return None
        images = [value for value in self._seen.values() if value.dtype == np.uint8 and value.ndim == 3]
        return picture(images[0]) if images else None


class WorldModelVectorEnv:
    """B dreams with `VectorEnv`'s interface: NextStep autoreset, dict observations, `is_first`.

    A Collector or an Evaluator steps it like a real one. It has no exact resume: dreams are begun anew.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012 (Gymnasium's form)
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
        self.dreams = Dreams(workflow, spec, device=device, seed=seed, **options)
        self.single_observation_space = _dreamed_space(workflow, spec)
        self.single_action_space = action_space(spec.action)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.is_first = np.ones(num_envs, bool)
        self.last_dones = np.zeros(num_envs, bool)
        self.last_obs: Observation = {}
        self._choices = torch.Generator().manual_seed(seed)
        self._sent: torch.Tensor | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new dream in every place."""
        if seed is not None:
            self._choices.manual_seed(seed)
            self.dreams.seed(seed)
        self.last_obs = _arrays(self.dreams.start(self.starts(self.num_envs, self._choices)))
        self.is_first = np.ones(self.num_envs, bool)
        self.last_dones = np.zeros(self.num_envs, bool)
        return self.last_obs, {}

    def step_async(self, actions: Any) -> None:
        """Keep the actions (N, …) for `step_wait`: a model has nobody else to step it."""
        shape = (self.num_envs, *self.spec.action.shape)
        taken = np.asarray(actions, dtype=self.spec.action.dtype)
        if taken.shape != shape:
            raise ConfigError(f"{self.num_envs} dreams take actions of shape {shape}, not {taken.shape}")
        if not self.dreams.count:
            raise LabError("call reset() before the first step")
        self._sent = torch.as_tensor(taken)

    def step_wait(self) -> StepResult:
        """Observations, reward (N,), terminated (N,), truncated (N,), infos. A dream that was over begins anew."""
        if self._sent is None:
            raise LabError("step_wait() without step_async(): no action is in flight")
        over = self.last_dones
        step = self.dreams.step(self._sent)
        self._sent = None
        obs = step.obs
        if over.any():
            obs = self.dreams.restart(torch.from_numpy(over), self.starts(self.num_envs, self._choices))
            if not over.all():  # those that go on show what their step led to
                obs = {n: _choose(over, value, step.obs[n]) for n, value in obs.items()}
        self.last_obs = _arrays(obs)
        reward, chance = step.reward.cpu().numpy(), step.end_chance.cpu().numpy()
        terminated, truncated = step.terminated.cpu().numpy() & ~over, step.truncated.cpu().numpy() & ~over
        self.is_first = over.copy()
        self.last_dones = terminated | truncated
        return (
            self.last_obs,
            np.where(over, 0.0, reward).astype(np.float32),
            terminated,
            truncated,
            {"end_chance": chance},
        )

    def step(self, actions: Any) -> StepResult:
        self.step_async(actions)
        return self.step_wait()

    def close(self) -> None:
        """Nothing to end; the model belongs to whoever made it."""


def _choose(which: np.ndarray, yes: torch.Tensor, no: torch.Tensor) -> torch.Tensor:
    mask = torch.from_numpy(which).to(yes.device).view(-1, *[1] * (yes.ndim - 1))
    return torch.where(mask, yes, no)


def _arrays(obs: dict[str, torch.Tensor]) -> Observation:
    return {name: value.cpu().numpy() for name, value in obs.items()}


def _dreamed_space(workflow: Any, spec: Spec) -> gymnasium.spaces.Dict:
    """Observations that the model decodes."""
    names = workflow.dreamed_observations(spec)
    return observation_space({name: spec.observations[name] for name in names})


def _first(obs: dict[str, torch.Tensor]) -> Observation:
    return {name: value[0] for name, value in _arrays(obs).items()}
