"""Suite `dmc`: DeepMind Control, from state (proprio), pixels (vision) or both

    dmc/walker_walk, dmc/cup_catch, …                  observe: proprio | vision | both
    dmc/manip_reach_site, dmc/manip_stack_2_bricks, …  dm_control.manipulation: an arm and bricks
    dmc/rodent_run_gaps, dmc/rodent_maze_forage, …     dm_control.locomotion: a rat with 38 actuators

    backend: gymnasium  dm_control itself
             envpool    EnvPool's, in C++: only proprio; a seed leads to another start (see docs)

Defaults follow DreamerV3's presets `dmc_proprio` and `dmc_vision` (danijar/dreamerv3, embodied/envs/dmc.py):
action repeat 1, 64×64, camera 0 (quadruped: 2, rodent: 4). Of the tasks of `manip` the vectors of `proprio` are those
of the `…_features` versions, with the positions of the objects; `both` has those of `…_vision`, without them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.pools import NO_LIMIT, PooledEnv, require_backend
from rl_lab.environments.rendering import choose_renderer
from rl_lab.errors import ConfigError, closest, known_task

EXTRA = "dmc"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
OBSERVE = ("proprio", "vision", "both")
CAMERAS = {"quadruped": 2, "rodent": 4}
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
MANIPULATION = (
    "lift_brick lift_large_box place_brick place_cradle reach_duplo reach_site reassemble_3_bricks_fixed_order "
    "reassemble_5_bricks_random_order stack_2_bricks stack_2_bricks_moveable_base stack_2_of_3_bricks_random_order "
    "stack_3_bricks stack_3_bricks_random_order"
)
WITHOUT_VISION = "stack_3_bricks_random_order"  # the only one without a version for cameras
RODENT = "escape_bowl maze_forage run_gaps two_touch"
# Their episodes depend on earlier ones and on numpy's global generator, so each gets a new environment, which takes
# one to two seconds, and its own state of that generator.
REMEMBERS = frozenset(
    {("manip", "reassemble_5_bricks_random_order"), ("rodent", "maze_forage"), ("rodent", "two_touch")}
)
TASKS = [
    *NAMES.split(),
    *(f"manip_{name}" for name in MANIPULATION.split()),
    *(f"rodent_{name}" for name in RODENT.split()),
]


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> tuple[str, str]:
    """Return (domain, task) of a name such as walker_walk; `cup_…` is short for `ball_in_cup_…`."""
    name = task.replace("/", "_").replace("-", "_")
    name = f"ball_in_{name}" if name.startswith("cup_") else name
    known_task("dmc", task, TASKS, name)
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
    domain, name = task

    def load() -> Any:
        if domain == "manip":
            from dm_control import manipulation

            seen = observe == "both" and name != WITHOUT_VISION
            return manipulation.load(f"{name}_vision" if seen else f"{name}_features", seed=0)
        if domain == "rodent":
            from dm_control.locomotion.examples import basic_rodent_2020

            return getattr(basic_rodent_2020, f"rodent_{name}")(random_state=np.random.RandomState(0))
        from dm_control import suite

        # dm_control's limit is in seconds; a limit in decisions replaces it (mostly 1,000 control steps).
        arguments: dict[str, Any] = {"random": 0}
        if time_limit is not None:
            arguments["time_limit"] = float("inf")
        return suite.load(domain, name, task_kwargs=arguments)

    return ControlEnv(
        load,
        observe=observe,
        size=size or (64, 64),
        action_repeat=action_repeat or 1,
        time_limit=time_limit,
        camera=CAMERAS.get(domain, 0) if camera is None else camera,
        fast_render=fast_render,
        recreate=task in REMEMBERS,
        own_random=task in REMEMBERS,
        domain=domain,
        render_mode="rgb_array" if render else None,
    )


class ControlEnv(gymnasium.Env):
    """A dm_control environment. One decision is `action_repeat` control steps; only the last one is rendered."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        load: Callable[[], Any],
        *,
        observe: str,
        size: tuple[int, int],
        action_repeat: int,
        time_limit: int | None,
        camera: int | str,
        fast_render: bool,
        render_mode: str | None,
        recreate: bool = False,
        own_random: bool = False,
        keys: str = "",
        domain: str = "",
    ) -> None:
        """load: creates it, of `dm_control.suite` or of `dm_control.composer`

        recreate: create it again for each episode, since episodes depend on earlier ones
        own_random: it draws from numpy's global generator, which gets a state of this environment's own
        keys: regular expression; only vectors whose name has a match are observed
        """
        self.domain = domain  # "" for one without a renderer of its states
        self._load = load
        self._closed = False
        self._recreate = recreate
        self._uses_global_random = own_random
        self._global_random = np.random.RandomState(0).get_state()
        self.time_limit = time_limit
        self._env = self._create()
        self.action_repeat = action_repeat
        self.observe = observe
        self.size = size
        self.camera = camera
        self.fast_render = fast_render
        self.render_mode = render_mode
        self._elapsed = 0
        self._flags = {"shadow": False, "reflection": False} if fast_render else {}
        self._set_visual()
        action = self._env.action_spec()
        low, high = (np.broadcast_to(bound, action.shape) for bound in (action.minimum, action.maximum))
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        parts: dict[str, spaces.Space] = {}
        if observe != "vision":
            for name, array in self._env.observation_spec().items():
                shape = (int(np.prod(array.shape)),) if self._composed else array.shape or (1,)
                if re.search(keys, name) and 0 not in shape:
                    parts[name] = spaces.Box(-np.inf, np.inf, shape, np.float32)
        self._vectors = {name: space.shape for name, space in parts.items()}
        if observe != "proprio":
            parts["image"] = spaces.Box(0, 255, (*size, 3), np.uint8)
        self.observation_space = spaces.Dict(parts)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        if self._recreate and seed is None:
            seed = int(self.np_random.integers(2**31))
        if seed is not None:
            self._global_random = np.random.RandomState(seed % 2**32).get_state()
        if self._recreate:
            self._env.close()
            with self._own_random():
                self._env = self._create()
        if seed is not None:
            (self._env.random_state if self._composed else self._env.task.random).seed(seed % 2**32)
        self._elapsed = 0
        with self._own_random():
            result = self._env.reset()
        if self._composed:
            self._set_visual()  # a composed model is compiled again for each episode
        return self._observe(result), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self.action_repeat):
            with self._own_random():
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
        if not self._closed:  # a composed environment can be closed only once
            self._closed = True
            self._env.close()

    def _create(self) -> Any:
        with _without_cameras():
            env = self._load()
        self._composed = not hasattr(env.task, "random")  # by composer: the environment has the generator
        if self._composed:
            if self.time_limit is not None:
                env._time_limit = float("inf")
            env.reset()  # the constructor's model is not used again
        return env

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Give numpy's global generator the state of this environment, if the task uses it."""
        if not self._uses_global_random:
            yield
            return
        others = np.random.get_state()
        np.random.set_state(self._global_random)
        try:
            yield
        finally:
            self._global_random = np.random.get_state()
            np.random.set_state(others)

    def _observe(self, result: Any) -> dict[str, Any]:
        obs: dict[str, Any] = {}
        for name, shape in self._vectors.items():
            obs[name] = np.asarray(result.observation[name], np.float32).reshape(shape)
        if self.observe != "proprio":
            obs["image"] = self._render_image(self.size)
        return obs

    def _set_visual(self) -> None:
        if self.fast_render:
            visual = self._env.physics.model.vis
            visual.quality.offsamples = 0
            visual.quality.shadowsize = 0
            height, width = RENDER_SIZE if self.render_mode else self.size
            visual.global_.offheight = max(height, self.size[0])
            visual.global_.offwidth = max(width, self.size[1])

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


@contextlib.contextmanager
def _without_cameras() -> Iterator[None]:
    """Create tasks of composer whose cameras are not observed: an image is rendered here, from `camera`.

    Some tasks enable a camera in their constructor and render there, which needs OpenGL even if no image is wanted.
    """
    from dm_control.composer.observation.observable import MJCFCamera

    MJCFCamera.enabled = property(lambda self: False, lambda self, value: None)
    try:
        yield
    finally:
        del MJCFCamera.enabled
