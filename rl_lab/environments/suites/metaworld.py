"""Suite `metaworld`: Meta-World, 50 manipulation tasks of one robot arm, from a vector of 39 numbers or from pixels

    metaworld/reach, metaworld/mw-push, metaworld/door-open-v3     observe: proprio | vision | both

Yu et al. 2019, "Meta-World: A Benchmark and Evaluation for Multi-Task and Meta Reinforcement Learning". The settings
are those of TD-MPC2 (nicklashansen/tdmpc2, envs/metaworld.py): the goal is observed and changes with the episode, each
decision is two steps, 100 decisions, and one step without motion follows a reset. The package is version 3, of
Gymnasium; TD-MPC2's results are of version 2. `log/success` is 1 for an episode whose last decision was a success.

The package pins mujoco 3.3.0, so it does not go with the suite `dmc` in one interpreter.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.rendering import choose_renderer
from rl_lab.environments.suites.base import SeededEnv
from rl_lab.errors import ConfigError, closest, known_task

EXTRA = "metaworld"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
OBSERVE = ("proprio", "vision", "both")
ACTION_REPEAT = 2
LENGTH = 100  # decisions
STEPS = 500  # of the package, after which it refuses to go on
CAMERA = "corner2"
CAMERA_POSITION = (0.75, 0.075, 0.7)  # nearer than the package's, as in TD-MPC2
RENDER_SIZE = (256, 256)
TASKS = [
    "assembly",
    "basketball",
    "bin-picking",
    "box-close",
    "button-press",
    "button-press-topdown",
    "button-press-topdown-wall",
    "button-press-wall",
    "coffee-button",
    "coffee-pull",
    "coffee-push",
    "dial-turn",
    "disassemble",
    "door-close",
    "door-lock",
    "door-open",
    "door-unlock",
    "drawer-close",
    "drawer-open",
    "faucet-close",
    "faucet-open",
    "hammer",
    "hand-insert",
    "handle-press",
    "handle-press-side",
    "handle-pull",
    "handle-pull-side",
    "lever-pull",
    "peg-insert-side",
    "peg-unplug-side",
    "pick-out-of-hole",
    "pick-place",
    "pick-place-wall",
    "plate-slide",
    "plate-slide-back",
    "plate-slide-back-side",
    "plate-slide-side",
    "push",
    "push-back",
    "push-wall",
    "reach",
    "reach-wall",
    "shelf-place",
    "soccer",
    "stick-pull",
    "stick-push",
    "sweep",
    "sweep-into",
    "window-close",
    "window-open",
]


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    name = task.removeprefix("mw-").replace("_", "-").removesuffix("-v3")
    return known_task("metaworld", task, TASKS, name)


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    observe: str = "proprio",
) -> gymnasium.Env:
    if observe not in OBSERVE:
        raise ConfigError(f"environment.observe={observe!r}:{closest(str(observe), OBSERVE)}")
    choose_renderer(needed=render or observe != "proprio")
    repeat, limit = action_repeat or ACTION_REPEAT, time_limit or LENGTH
    if repeat * limit >= STEPS:
        raise ConfigError(
            f"environment.time_limit={limit} with action_repeat={repeat} is longer than the {STEPS - 1} steps of a "
            "Meta-World episode: use a lower limit"
        )
    return MetaWorldEnv(
        task,
        observe=observe,
        size=size or (64, 64),
        action_repeat=repeat,
        time_limit=limit,
        render_mode="rgb_array" if render else None,
    )


class MetaWorldEnv(SeededEnv):
    """One task with an observed, changing goal."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 40}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        task: str,
        *,
        observe: str,
        **settings: Any,
    ) -> None:
        import metaworld
        import mujoco

        super().__init__(**settings)
        self._mujoco = mujoco
        height, width = RENDER_SIZE  # of `render`, from which the image of an observation is scaled down
        cls = metaworld.ALL_V3_ENVIRONMENTS[f"{task}-v3"]
        self._env = cls(render_mode="rgb_array", camera_name=CAMERA, width=width, height=height)
        self._env._partially_observable = False  # what the package does in its goal-observable classes
        del self._env.sawyer_observation_space  # computed with the goal hidden
        self._env._set_task_called = True
        self._env.model.cam(CAMERA).pos[:] = CAMERA_POSITION
        self._env._freeze_rand_vec = False  # another goal in each episode
        self._env.seeded_rand_vec = True  # drawn from the environment's own generator
        self.observe = observe
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        parts: dict[str, spaces.Space] = {}
        if observe != "vision":
            parts["state"] = spaces.Box(-np.inf, np.inf, self._env.observation_space.shape, np.float32)
        if observe != "proprio":
            parts["image"] = spaces.Box(0, 255, (*self.size, 3), np.uint8)
        self.observation_space = spaces.Dict(parts)

    def _start(self, seed: int) -> dict[str, Any]:
        self._env.seed(seed)
        self._mujoco.mj_resetData(
            self._env.model, self._env.data
        )  # the package keeps contacts and the gripper's place
        self._env.reset()
        state, *_ = self._env.step(np.zeros(4, np.float32))
        return self._observe(state)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        reward = 0.0
        for _ in range(self.action_repeat):
            state, gained, _, _, info = self._env.step(np.asarray(action, np.float32))
            reward += float(gained)
        self._elapsed += 1
        ended = self.at_limit
        return self._observe(state), reward, False, ended, {"log/success": float(ended and info["success"])}

    def render(self) -> np.ndarray:
        """Return (256, 256, 3) uint8."""
        # The package's image is upside down.
        return np.ascontiguousarray(self._env.render()[::-1])

    def close(self) -> None:
        self._env.close()

    def _observe(self, state: np.ndarray) -> dict[str, Any]:
        obs: dict[str, Any] = {}
        if self.observe != "vision":
            obs["state"] = state.astype(np.float32)
        if self.observe != "proprio":
            from PIL import Image

            image = self.render()
            if image.shape[:2] != self.size:
                scaled = Image.fromarray(image).resize(self.size[::-1], Image.Resampling.BILINEAR)
                image = np.asarray(scaled)
            obs["image"] = image
        return obs


def step_seconds(task: str) -> float:
    return 0.5e-3
