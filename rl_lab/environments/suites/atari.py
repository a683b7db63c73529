"""Suite `atari`: Atari games in the 200-million-frame setting (sticky, all actions, 96×96 gray), and `AtariEnv`

Settings of DreamerV3's current preset `atari` (danijar/dreamerv3, configs.yaml and embodied/envs/atari.py),
with the protocol of Machado et al. 2018 and up to 30 no-ops. The ROMs are part of ale-py.

`AtariEnv` is also the environment of the suite `atari100k`. It resizes the emulator's 210×160 screen to
`size`, with Pillow's bilinear filter: to 96×96 by default in this suite, to 64×64 in `atari100k`. No other
wrapper resizes it (`HANDLES`). `_observe` resizes the maximum of the last two frames; with `resize_first`,
`_capture` resizes each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rl_lab.environments.pools import PooledEnv, require_backend
from rl_lab.errors import ConfigError, closest

EXTRA = "atari"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})

# ROM names of the 57 games of the benchmark (Hessel et al. 2018). Other games of ale-py work, too.
NAMES = (
    "alien amidar assault asterix asteroids atlantis bank_heist battle_zone beam_rider berzerk bowling boxing breakout "
    "centipede chopper_command crazy_climber defender demon_attack double_dunk enduro fishing_derby freeway frostbite "
    "gopher gravitar hero ice_hockey jamesbond kangaroo krull kung_fu_master montezuma_revenge ms_pacman "
    "name_this_game phoenix pitfall pong private_eye qbert riverraid road_runner robotank seaquest skiing solaris "
    "space_invaders star_gunner surround tennis time_pilot tutankham up_n_down venture video_pinball "
    "wizard_of_wor yars_revenge zaxxon"
)
GAMES = NAMES.split()


def tasks() -> list[str]:
    return list(GAMES)


def resolve(task: str) -> str:
    """Return the ROM name of a game: `space_invaders`, `SpaceInvaders` and `space-invaders` are the same."""
    import ale_py.roms

    games = {_plain(game): game for game in ale_py.roms.get_all_rom_ids()}
    if _plain(task) not in games:
        raise ConfigError(f"no Atari game '{task}'.{closest(task.lower(), games.values())}")
    return games[_plain(task)]


def step_seconds(task: str) -> float:
    return 800e-6


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    gray: bool = True,
    sticky: float = 0.25,
    full_actions: bool = True,
    noops: int = 30,
    life_loss: str = "off",
    backend: str = "gymnasium",
) -> gymnasium.Env:
    """`time_limit` is in decisions; None truncates a game after 108,000 frames (30 minutes)."""
    repeat = action_repeat or 4
    return backend_class(backend)(
        task,
        size=size or (96, 96),
        gray=gray,
        action_repeat=repeat,
        sticky=sticky,
        full_actions=full_actions,
        noops=(0, noops),
        max_frames=108_000 if time_limit is None else time_limit * repeat,
        life_loss=life_loss,
        render_mode="rgb_array" if render else None,
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


# --- Environment -----------------------------------------------------------------------------------------

# ITU-R BT.601, applied after resizing (DreamerV3, embodied/envs/atari.py)
GRAY = np.array([0.299, 0.587, 0.114])
NOOP = 0
LIFE_LOSS = ("off", "end", "restart")

StepResult = tuple[np.ndarray, float, bool, bool, dict[str, Any]]


class AtariEnv(gymnasium.Env):
    """One Atari game on the Arcade Learning Environment.

    One decision is `action_repeat` frames; the observation is the maximum of the last two. The code is written
    from the published descriptions: Mnih et al. 2015 (no-ops, pooling, frame skip), Machado et al. 2018 (sticky
    actions), and the settings of DreamerV3 and IRIS, which differ in the order of resizing and pooling.

    game:             ROM name in ale-py ("space_invaders")
    size:             height and width of the observation
    gray:             one channel instead of three
    sticky:           probability, for each frame, that the previous action is repeated
    full_actions:     all 18 actions, or only the minimal action set of the game
    noops:            (min, max) no-op frames after a reset, sampled uniformly; they count towards
                      `max_frames` if `count_noops`
    resize_first:     resize both frames, then take their maximum (IRIS); else take the maximum first
                      (DreamerV3)
    max_frames:       emulator frames after which the game is truncated
    life_loss:        "off": ignored. "end": a lost life ends the episode, and the next episode continues the
                      game after one no-op decision (IRIS). "restart": a lost life ends the episode and the
                      game.
    life_loss_within: detect a lost life at its frame (DreamerV3), or only at the end of the decision (IRIS)
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        game: str,
        *,
        size: tuple[int, int] = (64, 64),
        gray: bool = False,
        action_repeat: int = 4,
        sticky: float = 0.0,
        full_actions: bool = False,
        noops: tuple[int, int] = (0, 30),
        count_noops: bool = False,
        resize_first: bool = False,
        max_frames: int = 108_000,
        life_loss: str = "off",
        life_loss_within: bool = True,
        render_mode: str | None = None,
    ) -> None:
        import ale_py

        if life_loss not in LIFE_LOSS:
            raise ConfigError(f"environment.life_loss={life_loss!r}: use one of {', '.join(LIFE_LOSS)}")
        self.game = game
        self.size = size
        self.gray = gray
        self.action_repeat = action_repeat
        self.sticky = sticky
        self.noops = noops
        self.count_noops = count_noops
        self.resize_first = resize_first
        self.max_frames = max_frames
        self.life_loss = life_loss
        self.life_loss_within = life_loss_within
        self.render_mode = render_mode
        # Before the first emulator is created, which would print a banner.
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        # Sticky actions are sampled here, with the episode's seed: the emulator can only be seeded when it
        # loads a ROM, which takes a hundred milliseconds.
        self.ale.setFloat("repeat_action_probability", 0.0)
        rom = ale_py.roms.get_rom_path(game)
        if rom is None:
            raise ConfigError(f"no Atari ROM '{game}' in ale-py: use another game")
        self.ale.loadROM(rom)
        self._power_on_state = self.ale.cloneState()
        self._actions = self.ale.getLegalActionSet() if full_actions else self.ale.getMinimalActionSet()
        self._screen = np.zeros((*self.ale.getScreenDims(), 3), np.uint8)
        self._frames = np.zeros((2, *(size if resize_first else self._screen.shape[:2]), 3), np.uint8)
        self._newest_index = 0
        self._elapsed = 0  # frames of this game
        self._lives = 0
        self._last_action: Any = NOOP  # the action of the last frame
        self.reset_continues = False  # the last episode ended with a lost life, the game did not
        self.observation_space = spaces.Box(0, 255, (*size, 1 if gray else 3), np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start a new game, or continue the open one after a lost life unless `options={"restart": True}`."""
        super().reset(seed=seed)
        if self.reset_continues and not (options or {}).get("restart"):
            self.reset_continues = False
            self._act(NOOP)
            if not self._over():
                self._lives = self.ale.lives()
                return self._observe(), {}
        self.reset_continues = False
        # `reset_game` alone is not enough: some games (Assault, Tennis, …) then start in a state that depends
        # on the past.
        self.ale.restoreState(self._power_on_state)
        self.ale.reset_game()
        self._last_action = NOOP
        noops = int(self.np_random.integers(self.noops[0], self.noops[1] + 1))
        for _ in range(noops):
            self.ale.act(NOOP)
            if self.ale.game_over():
                self.ale.reset_game()
        self._elapsed = noops if self.count_noops else 0
        self._lives = self.ale.lives()
        self._capture()
        self._frames[1 - self._newest_index] = self._frames[self._newest_index]
        return self._observe(), {}

    def step(self, action: Any) -> StepResult:
        reward = self._act(self._actions[action])
        terminated = self.ale.game_over()
        lives = self.ale.lives()
        # Some games have zero lives for a while before they end, so zero is not a lost life.
        life_lost = self.life_loss != "off" and 0 < lives < self._lives
        truncated = not terminated and self._elapsed >= self.max_frames
        self.reset_continues = life_lost and self.life_loss == "end" and not (terminated or truncated)
        self._lives = lives
        return self._observe(), reward, terminated or life_lost, truncated and not life_lost, {}

    def render(self) -> np.ndarray:
        """Return the emulator's screen, (210, 160, 3) uint8."""
        return self.ale.getScreenRGB()

    def _act(self, action: Any) -> float:
        """Run the frames of one decision, or fewer if the game ends; return the sum of the rewards."""
        reward = 0.0
        check_lives = self.life_loss != "off" and self.life_loss_within
        for frame in range(self.action_repeat):
            if not self.sticky or self.np_random.random() >= self.sticky:
                self._last_action = action
            reward += self.ale.act(self._last_action)
            self._elapsed += 1
            if frame >= self.action_repeat - 2:
                self._capture()
            if self._over() or (check_lives and 0 < self.ale.lives() < self._lives):
                break
        return reward

    def _over(self) -> bool:
        return self.ale.game_over() or self._elapsed >= self.max_frames

    def _capture(self) -> None:
        self._newest_index = 1 - self._newest_index
        if self.resize_first:
            self.ale.getScreenRGB(self._screen)
            self._frames[self._newest_index] = _resize(self._screen, self.size)
        else:
            self.ale.getScreenRGB(self._frames[self._newest_index])

    def _observe(self) -> np.ndarray:
        """Return (H, W, C) uint8, at `size`."""
        image = np.maximum(self._frames[0], self._frames[1])
        if not self.resize_first:
            image = _resize(image, self.size)
        if not self.gray:
            return image
        red, green, blue = (image[..., channel] * GRAY[channel] for channel in range(3))
        return (red + green + blue).astype(np.uint8)[..., None]


def backend_class(backend: str) -> Callable[..., gymnasium.Env]:
    """Return the environment of `environment.backend`; both take the same arguments."""
    require_backend(backend)
    return PooledAtari if backend == "envpool" else AtariEnv


class PooledAtari(PooledEnv):
    """EnvPool's Atari: the same emulator, rewards and ends; images are resized differently.

    Sticky actions and no-ops come from its own generators, and there is at least one no-op.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012 (as in Gymnasium)

    def __init__(
        self,
        game: str,
        *,
        size: tuple[int, int],
        action_repeat: int,
        noops: tuple[int, int],
        max_frames: int,
        gray: bool = False,
        sticky: float = 0.0,
        full_actions: bool = False,
        life_loss: str = "off",
        resize_first: bool = False,
        render_mode: str | None = None,
        **others: Any,
    ) -> None:
        if life_loss != "off" or resize_first:
            raise ConfigError(
                "environment.backend=envpool has neither lost lives as ends nor the iris variant of Atari: set "
                "environment.backend=gymnasium"
            )
        super().__init__(
            "".join(word.capitalize() for word in game.split("_")) + "-v5",
            stack_num=1,
            frame_skip=action_repeat,
            noop_max=max(1, noops[1]),  # EnvPool crashes with 0
            use_fire_reset=False,
            gray_scale=gray,
            img_height=size[0],
            img_width=size[1],
            repeat_action_probability=sticky,
            full_action_space=full_actions,
            max_episode_steps=-(-max_frames // action_repeat),
        )
        self.action_repeat = action_repeat
        self.render_mode = render_mode
        self._image = np.zeros((*size, 1 if gray else 3), np.uint8)
        pool = self._new_pool(0)
        self.action_space = spaces.Discrete(int(pool.action_space.n))
        pool.close()
        self.observation_space = spaces.Box(0, 255, self._image.shape, np.uint8)

    def render(self) -> np.ndarray:
        """Return the last observation as (H, W, 3) uint8; EnvPool has no larger frame."""
        return np.broadcast_to(self._image, (*self._image.shape[:2], 3))

    def _read(self, obs: Any) -> np.ndarray:
        self._image = np.moveaxis(obs, 0, -1)
        return self._image


def _resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize (H, W, 3) uint8 to (height, width), with Pillow's bilinear filter, which antialiases."""
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))
