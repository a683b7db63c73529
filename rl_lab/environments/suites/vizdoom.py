"""Suite `vizdoom`: scenarios of ViZDoom, first-person Doom from pixels (64×64 RGB)

    vizdoom/take_cover      monsters throw fireballs, move left or right; +1 per step until death (World Models)
    vizdoom/basic, deadly_corridor, defend_the_center, defend_the_line, health_gathering, health_gathering_supreme,
            my_way_home, predict_position

    actions: buttons        discrete: no button, or one of the scenario's
             thirds         only take_cover: one number, left below -1/3, right above 1/3, as in World Models

Rewards, buttons and limits are those of the package's scenario files. `take_cover` has no limit there: 2,100 steps of
1/35 s, as in World Models (hardmaru/WorldModelsExperiments @ fd982b9, doomrnn/extract.py), which also removes the
lowest sixth of the screen (`crop`) and repeats no action.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.suites.base import SeededEnv
from rl_lab.environments.wrappers import resize
from rl_lab.errors import ConfigError, LabError, closest, known_task, one_line

EXTRA = "vizdoom"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})
TASKS = (
    "take_cover",
    "basic",
    "deadly_corridor",
    "defend_the_center",
    "defend_the_line",
    "health_gathering",
    "health_gathering_supreme",
    "my_way_home",
    "predict_position",
)
ACTIONS = ("buttons", "thirds")
LIMITS = {"take_cover": 2100, "defend_the_line": 2100}  # tics, of scenarios whose file has none
CROP = 40  # rows of 240
THIRD = 1 / 3


def tasks() -> list[str]:
    return list(TASKS)


def resolve(task: str) -> str:
    return known_task("vizdoom", task, TASKS)


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    actions: str = "buttons",
    crop: bool = True,
) -> gymnasium.Env:
    """`crop` removes the lowest sixth of the screen."""
    if actions not in ACTIONS:
        raise ConfigError(f"environment.actions={actions!r}:{closest(str(actions), ACTIONS)}")
    if actions == "thirds" and task != "take_cover":
        raise ConfigError(
            f"environment.actions=thirds moves left and right in vizdoom/take_cover, not in vizdoom/{task}: "
            "use environment.actions=buttons"
        )
    return DoomEnv(
        task,
        size=size or (64, 64),
        action_repeat=action_repeat or 1,
        time_limit=time_limit,
        thirds=actions == "thirds",
        crop=crop,
        render_mode="rgb_array" if render else None,
    )


class DoomEnv(SeededEnv):
    """One game. One decision is `action_repeat` tics of 1/35 s."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 35}  # noqa: RUF012 (as in Gymnasium)
    SEEDS = 2**32

    def __init__(
        self,
        task: str,
        *,
        thirds: bool,
        crop: bool,
        **settings: Any,
    ) -> None:
        import vizdoom

        super().__init__(**settings)
        self.thirds = thirds
        self._rows = slice(None, -CROP) if crop else slice(None)
        self._game = game = vizdoom.DoomGame()
        game.load_config(str(Path(vizdoom.scenarios_path) / f"{task}.cfg"))
        game.set_doom_config_path(os.devnull)  # else it writes its settings to the working folder
        game.set_window_visible(False)
        game.set_sound_enabled(False)
        game.set_mode(vizdoom.Mode.PLAYER)  # it waits for actions
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        game.set_screen_resolution(vizdoom.ScreenResolution.RES_320X240)
        if self.time_limit is not None:
            game.set_episode_timeout(0)  # the decisions are counted here
        elif task in LIMITS:
            self.time_limit = -(-LIMITS[task] // self.action_repeat)
        game.set_seed(0)
        try:
            # It creates a folder `_vizdoom` where it starts.
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                game.init()
        except Exception as error:  # its own types, one for each cause
            raise LabError(f"vizdoom/{task} does not start: {one_line(error)}") from error
        count = game.get_available_buttons_size()
        self._buttons = [[0.0] * count, *np.eye(count).tolist()]
        self.observation_space = spaces.Box(0, 255, (*self.size, 3), np.uint8)
        self.action_space: spaces.Space = (
            spaces.Box(-1.0, 1.0, (1,), np.float32) if thirds else spaces.Discrete(count + 1)
        )
        self._image = np.zeros((240, 320, 3), np.uint8)  # the screen

    def _start(self, seed: int) -> np.ndarray:
        self._game.set_seed(seed)
        self._game.new_episode()
        return self._observe()

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.thirds:
            value = float(action[0])
            chosen = 1 if value < -THIRD else 2 if value > THIRD else 0
        else:
            chosen = int(action)
        reward = self._game.make_action(self._buttons[chosen], self.action_repeat)
        ended = self._game.is_episode_finished()
        self._elapsed += 1
        late = ended and self._game.is_episode_timeout_reached() and not self._game.is_player_dead()
        terminated = ended and not late
        return self._observe(), float(reward), terminated, late or (self.at_limit and not terminated), {}

    def close(self) -> None:
        self._game.close()

    def _observe(self) -> np.ndarray:
        state = self._game.get_state()
        if state is not None:  # after the end there is none: the last screen stays
            self._image = np.array(state.screen_buffer)
        image = np.ascontiguousarray(self._image[self._rows].transpose(2, 0, 1))
        return np.ascontiguousarray(resize(image, self.size).transpose(1, 2, 0))


def step_seconds(task: str) -> float:
    return 1e-3
