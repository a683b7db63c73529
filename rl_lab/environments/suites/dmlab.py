"""Suite `dmlab`: DeepMind Lab, first-person tasks of DMLab-30 (64×64 RGB)

    dmlab/explore_goal_locations_small, dmlab/rooms_collect_good_objects_train, …

Beattie et al. 2016, "DeepMind Lab". Settings as in danijar/dreamerv3 @ e3f0224, embodied/envs/dmlab.py: four frames a
decision; an episode's end is a termination, since the remaining time cannot be seen. The tasks `language_…` have
`instruction` as well: the first 32 words and signs of the instruction, each with a fixed random vector of 32 numbers.

    actions: popart (15) | impala (9)      sets of Hessel et al. 2018 and Espeholt et al. 2018

**Not run against the real one**: DeepMind Lab has no wheel and is built with Bazel. The adapter is tested against a
stand-in written from its source; docs/howto/minecraft_dmlab.md says how to set it up.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.base import SeededEnv
from rl_lab.errors import ConfigError, LabError, MissingPackageError, closest, known_task, one_line

EXTRA = ""
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
MODULE = "deepmind_lab"
SETUP = "docs/howto/minecraft_dmlab.md says how to build DeepMind Lab"
ACTION_REPEAT = 4
IMAGE, TEXT = "RGB_INTERLEAVED", "INSTR"
WORDS, WIDTH, BUCKETS = 32, 32, 64 * 1024  # of instructions
HELD_OUT_SEED = 0x600D5EED  # evaluation uses other levels than training
TASKS = [
    "explore_goal_locations_large",
    "explore_goal_locations_small",
    "explore_object_locations_large",
    "explore_object_locations_small",
    "explore_object_rewards_few",
    "explore_object_rewards_many",
    "explore_obstructed_goals_large",
    "explore_obstructed_goals_small",
    "language_answer_quantitative_question",
    "language_execute_random_task",
    "language_select_described_object",
    "language_select_located_object",
    "lasertag_one_opponent_large",
    "lasertag_one_opponent_small",
    "lasertag_three_opponents_large",
    "lasertag_three_opponents_small",
    "natlab_fixed_large_map",
    "natlab_varying_map_randomized",
    "natlab_varying_map_regrowth",
    "psychlab_arbitrary_visuomotor_mapping",
    "psychlab_continuous_recognition",
    "psychlab_sequential_comparison",
    "psychlab_visual_search",
    "rooms_collect_good_objects_test",
    "rooms_collect_good_objects_train",
    "rooms_exploit_deferred_effects_test",
    "rooms_exploit_deferred_effects_train",
    "rooms_keys_doors_puzzle",
    "rooms_select_nonmatching_object",
    "rooms_watermaze",
    "skymaze_irreversible_path_hard",
    "skymaze_irreversible_path_varied",
]
# Turn (degrees, as pixels), look up or down, sideways, forward or back, fire; jump and crouch are never used.
_POPART = (
    (0, 0, 0, 1, 0),
    (0, 0, 0, -1, 0),
    (0, 0, -1, 0, 0),
    (0, 0, 1, 0, 0),
    (-10, 0, 0, 0, 0),
    (10, 0, 0, 0, 0),
    (-60, 0, 0, 0, 0),
    (60, 0, 0, 0, 0),
    (0, 10, 0, 0, 0),
    (0, -10, 0, 0, 0),
    (-10, 0, 0, 1, 0),
    (10, 0, 0, 1, 0),
    (-60, 0, 0, 1, 0),
    (60, 0, 0, 1, 0),
    (0, 0, 0, 0, 1),
)
_IMPALA = (
    *_POPART[:4],
    (-20, 0, 0, 0, 0),
    (20, 0, 0, 0, 0),
    (-20, 0, 0, 1, 0),
    (20, 0, 0, 1, 0),
    (0, 0, 0, 0, 1),
)
ACTIONS = {"popart": _POPART, "impala": _IMPALA}


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("dmlab", task, TASKS, task.removeprefix("dmlab_"))


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    actions: str = "popart",
    evaluation: bool = False,
    renderer: str = "software",
    level_cache: str | None = None,
) -> gymnasium.Env:
    """
    evaluation:  held-out levels, where a task has some
    renderer:    software | hardware (EGL)
    level_cache: folder for compiled levels, which make the resets of generated ones faster
    """
    if actions not in ACTIONS:
        raise ConfigError(f"environment.actions={actions!r}:{closest(str(actions), ACTIONS)}")
    if renderer not in ("software", "hardware"):
        raise ConfigError(f"environment.renderer={renderer!r}: use software or hardware")
    return LabEnv(
        task,
        size=size or (64, 64),
        action_repeat=action_repeat or ACTION_REPEAT,
        time_limit=time_limit,
        actions=ACTIONS[actions],
        evaluation=evaluation,
        renderer=renderer,
        level_cache=level_cache,
        render_mode="rgb_array" if render else None,
    )


class LabEnv(SeededEnv):
    """One level of DeepMind Lab."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (as in Gymnasium)
    SEEDS = 2**31 - 1

    def __init__(
        self,
        task: str,
        *,
        actions: tuple[tuple[int, ...], ...],
        evaluation: bool,
        renderer: str,
        level_cache: str | None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        try:
            import deepmind_lab
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"dmlab needs the package 'deepmind_lab', which is not installed: {SETUP}"
            ) from error
        self.text = task.startswith("language_")
        self._actions = np.array([(*action, 0, 0) for action in actions], np.intc)
        config = {"height": str(self.size[0]), "width": str(self.size[1]), "logLevel": "WARN"}
        if evaluation:
            config |= {"allowHoldOutLevels": "true", "mixerSeed": str(HELD_OUT_SEED)}
        else:
            task = re.sub("_test$", "_train", task)  # the levels of `_test` are held out
        cache = None if level_cache is None else LevelCache(level_cache)
        try:
            self._lab = deepmind_lab.Lab(
                level=f"contributed/dmlab30/{task}",
                observations=[IMAGE, TEXT] if self.text else [IMAGE],
                config=config,
                renderer=renderer,
                level_cache=cache,
            )
        except RuntimeError as error:
            raise LabError(f"dmlab/{task} does not start: {one_line(error)}") from error
        parts: dict[str, spaces.Space] = {"image": spaces.Box(0, 255, self._image.shape, np.uint8)}
        if self.text:
            parts["instruction"] = spaces.Box(-np.inf, np.inf, (WORDS * WIDTH,), np.float32)
            self._vectors = np.random.default_rng(0).normal(0.0, 1.0, (BUCKETS, WIDTH)).astype(np.float32)
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Discrete(len(self._actions))

    def _start(self, seed: int) -> dict[str, Any]:
        # Some levels depend on the number of the episode, which Lab would count.
        self._lab.reset(episode=0, seed=seed)
        self._obs = self._observe()
        return self._obs

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        reward = self._lab.step(self._actions[int(action)], num_steps=self.action_repeat)
        self._elapsed += 1
        ended = not self._lab.is_running()
        if not ended:  # after the end there are no observations: the last one stays
            self._obs = self._observe()
        return self._obs, float(reward), ended, self.at_limit and not ended, {}

    def close(self) -> None:
        self._lab.close()

    def _observe(self) -> dict[str, Any]:
        raw = self._lab.observations()
        self._image = np.array(raw[IMAGE])
        obs: dict[str, Any] = {"image": self._image}
        if self.text:
            obs["instruction"] = self._embed(str(raw[TEXT]))
        return obs

    def _embed(self, text: str) -> np.ndarray:
        """Return (1024,) float32: words and groups of other signs, padded with the vector of bucket 0."""
        words = re.findall(r"[a-z_]+|[^a-z_ ]+", text.lower())[:WORDS]
        buckets = [zlib.crc32(word.encode()) % BUCKETS for word in words]
        return self._vectors[buckets + [0] * (WORDS - len(buckets))].reshape(-1)


class LevelCache:
    """Keeps compiled levels in a folder, under the hash of their key."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def fetch(self, key: str, pk3_path: str) -> bool:
        path = self._path(key)
        if not path.is_file():
            return False
        shutil.copyfile(path, pk3_path)
        return True

    def write(self, key: str, pk3_path: str) -> None:
        path = self._path(key)
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{id(self)}")  # several workers may share the folder
            shutil.copyfile(pk3_path, partial)
            partial.replace(path)

    def _path(self, key: str) -> Path:
        name = hashlib.sha256(key.encode()).hexdigest()
        return self.folder / name[:2] / f"{name[2:]}.pk3"


def step_seconds(task: str) -> float:
    return 10e-3
