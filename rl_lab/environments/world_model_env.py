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

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from rl_lab.environments.dream_starts import Starts
from rl_lab.environments.dreams import Dreams
from rl_lab.environments.spec import action_space, observation_space
from rl_lab.errors import ConfigError, LabError
from rl_lab.records import ActMode, Spec
from rl_lab.utils.media import picture

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
