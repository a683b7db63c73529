"""Suite `dmc`: DeepMind Control, from state (proprio), pixels (vision) or both

    dmc/walker_walk, dmc/cup_catch, …      observe: proprio | vision | both

    backend: gymnasium  dm_control itself
             envpool    EnvPool's, in C++: only proprio; a seed leads to another start (see docs)

Defaults follow DreamerV3's presets `dmc_proprio` and `dmc_vision` (danijar/dreamerv3, embodied/envs/dmc.py):
action repeat 1, 64×64, camera 0 (quadruped: 2).
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.pools import NO_LIMIT, PooledEnv, require_backend
from rl_lab.environments.rendering import choose_renderer
from rl_lab.errors import ConfigError, closest

EXTRA = "dmc"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
OBSERVE = ("proprio", "vision", "both")
CAMERAS = {"quadruped": 2}
RENDER_SIZE = (256, 256)

# dm_control.suite.BENCHMARKING and a few more from papers; listed here so that the package is not needed.
NAMES = (
    "acrobot_swingup acrobot_swingup_sparse ball_in_cup_catch cartpole_balance cartpole_balance_sparse "
    "cartpole_swingup cartpole_swingup_sparse cartpole_three_poles cartpole_two_poles cheetah_run dog_fetch dog_run "
    "dog_stand dog_trot dog_walk finger_spin finger_turn_easy finger_turn_hard fish_swim fish_upright hopper_hop "
    "hopper_stand humanoid_CMU_run humanoid_CMU_stand humanoid_CMU_walk humanoid_run humanoid_run_pure_state "
    "humanoid_stand humanoid_walk manipulator_bring_ball manipulator_bring_peg manipulator_insert_ball "
    "manipulator_insert_peg pendulum_swingup point_mass_easy point_mass_hard quadruped_escape quadruped_fetch "
    "quadruped_run quadruped_walk reacher_easy reacher_hard stacker_stack_2 stacker_stack_4 swimmer_swimmer15 "
    "swimmer_swimmer6 walker_run walker_stand walker_walk"
)
TASKS = NAMES.split()


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> tuple[str, str]:
    """Return (domain, task) of a name such as walker_walk; `cup_…` is short for `ball_in_cup_…`."""
    name = task.replace("/", "_").replace("-", "_")
    name = f"ball_in_{name}" if name.startswith("cup_") else name
    if name not in TASKS:
        raise ConfigError(f"no task 'dmc/{task}'.{closest(name, TASKS)}")
    for domain in ("ball_in_cup", "humanoid_CMU", "point_mass"):
        if name.startswith(domain + "_"):
            return domain, name.removeprefix(domain + "_")
    domain, _, rest = name.partition("_")
    return domain, rest


def make(
    task: tuple[str, str],
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    observe: str = "proprio",
    camera: int | str | None = None,
    fast_render: bool = False,
    backend: str = "gymnasium",
) -> gymnasium.Env:
    """`fast_render`: no shadows, reflections, multisampling; 6× faster in software, but other images."""
    if observe not in OBSERVE:
        raise ConfigError(f"environment.observe={observe!r}:{closest(str(observe), OBSERVE)}")
    require_backend(backend)
    if backend == "envpool":
        if observe != "proprio" or render:
            raise ConfigError(
                "environment.backend=envpool renders no dm_control: set environment.observe=proprio, or "
                "environment.backend=gymnasium"
            )
        return PooledControl(*task, action_repeat=action_repeat or 1, time_limit=time_limit)
    choose_renderer(needed=render or observe != "proprio")
    return ControlEnv(
        *task,
        observe=observe,
        size=size or (64, 64),
        action_repeat=action_repeat or 1,
        time_limit=time_limit,
        camera=CAMERAS.get(task[0], 0) if camera is None else camera,
        fast_render=fast_render,
        render_mode="rgb_array" if render else None,
    )


class ControlEnv(gymnasium.Env):
    """A dm_control task. One decision is `action_repeat` control steps; only the last one is rendered."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        domain: str,
        task: str,
        *,
        observe: str,
        size: tuple[int, int],
        action_repeat: int,
        time_limit: int | None,
        camera: int | str,
        fast_render: bool,
        render_mode: str | None,
    ) -> None:
        from dm_control import suite

        # dm_control's limit is in seconds; a limit in decisions replaces it (mostly 1,000 control steps).
        arguments: dict[str, Any] = {"random": 0}
        if time_limit is not None:
            arguments["time_limit"] = float("inf")
        self._env = suite.load(domain, task, task_kwargs=arguments)
        self.domain = domain
        self.time_limit = time_limit
        self.action_repeat = action_repeat
        self.observe = observe
        self.size = size
        self.camera = camera
        self.render_mode = render_mode
        self._elapsed = 0
        self._flags: dict[str, bool] = {}
        if fast_render:
            self._flags = {"shadow": False, "reflection": False}
            visual = self._env.physics.model.vis
            visual.quality.offsamples = 0
            visual.quality.shadowsize = 0
            height, width = RENDER_SIZE if render_mode else size
            visual.global_.offheight, visual.global_.offwidth = max(height, size[0]), max(width, size[1])
        action = self._env.action_spec()
        low, high = (np.broadcast_to(bound, action.shape) for bound in (action.minimum, action.maximum))
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        parts: dict[str, spaces.Space] = {}
        if observe != "vision":
            for name, array in self._env.observation_spec().items():
                parts[name] = spaces.Box(-np.inf, np.inf, array.shape or (1,), np.float32)
        if observe != "proprio":
            parts["image"] = spaces.Box(0, 255, (*size, 3), np.uint8)
        self.observation_space = spaces.Dict(parts)
        self._shapes = {name: space.shape for name, space in parts.items()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._env.task.random.seed(seed)
        self._elapsed = 0
        return self._observe(self._env.reset()), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self.action_repeat):
            result = self._env.step(action)
            reward += result.reward or 0.0
            if result.last():
                break
        self._elapsed += 1
        terminated = result.last() and result.discount == 0.0
        truncated = result.last() or (self.time_limit is not None and self._elapsed >= self.time_limit)
        return self._observe(result), reward, terminated, truncated and not terminated, {}

    @property
    def physics(self) -> Any:
        """dm_control's physics, whose state `state_rendering` sets."""
        return self._env.physics

    @property
    def action_names(self) -> list[str]:
        """Names of the actuators in the model's file."""
        model = self._env.physics.model
        names = [model.id2name(index, "actuator").replace("_", " ") for index in range(model.nu)]
        return names if all(names) and self.action_space.shape == (len(names),) else []

    def render(self) -> np.ndarray:
        """Return (256, 256, 3) uint8, from the same camera as the observation."""
        return self._render_image(RENDER_SIZE)

    def close(self) -> None:
        self._env.close()

    def _observe(self, result: Any) -> dict[str, Any]:
        obs: dict[str, Any] = {}
        if self.observe != "vision":
            for name, value in result.observation.items():
                obs[name] = np.asarray(value, np.float32).reshape(self._shapes[name])
        if self.observe != "proprio":
            obs["image"] = self._render_image(self.size)
        return obs

    def _render_image(self, size: tuple[int, int]) -> np.ndarray:
        return self._env.physics.render(
            *size, camera_id=self.camera, render_flag_overrides=self._flags or None
        )


class PooledControl(PooledEnv):
    """EnvPool's dm_control, from state: the same models, rewards and ends, other starts for a seed."""

    def __init__(self, domain: str, task: str, *, action_repeat: int, time_limit: int | None) -> None:
        words = f"{domain}_{task}".split("_")
        name = "".join(word[:1].upper() + word[1:] for word in words) + "-v1"
        super().__init__(name, **({} if time_limit is None else {"max_episode_steps": NO_LIMIT}))
        self.action_repeat = action_repeat
        self.time_limit = time_limit
        self._elapsed = 0
        pool = self._new_pool(0)
        low, high = pool.action_space.low, pool.action_space.high
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        parts: dict[str, spaces.Space] = {
            key: spaces.Box(-np.inf, np.inf, value[0].shape or (1,), np.float32)
            for key, value in pool.reset()[0].items()
        }
        self.observation_space = spaces.Dict(parts)
        self._shapes = {key: space.shape for key, space in parts.items()}
        pool.close()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._elapsed = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(self.action_repeat):
            obs, reward, terminated, truncated, info = super().step(np.asarray(action, np.float64))
            total += reward
            if terminated or truncated:
                break
        self._elapsed += 1
        late = self.time_limit is not None and self._elapsed >= self.time_limit
        return obs, total, terminated, (truncated or late) and not terminated, info

    def _read(self, obs: Any) -> dict[str, Any]:
        return {key: np.asarray(obs[key], np.float32).reshape(shape) for key, shape in self._shapes.items()}
