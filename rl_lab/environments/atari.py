"""Suite `atari`: Atari games in the 200-million-frame setting (sticky, all actions, 96×96 gray)

Settings of DreamerV3's current preset `atari` (danijar/dreamerv3, configs.yaml and embodied/envs/atari.py), whose
protocol is Machado et al. 2018 with up to 30 no-ops. The ROMs come with ale-py.
"""

from __future__ import annotations

import gymnasium

from rl_lab.errors import ConfigError, closest

EXTRA = "atari"
HANDLES = frozenset({"size", "action_repeat", "time_limit"})

# The 57 games of the benchmark (Hessel et al. 2018), under their ROMs' names. Others in ale-py work too.
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
    """The ROM's name for a game: `space_invaders`, `SpaceInvaders` and `space-invaders` are one."""
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
) -> gymnasium.Env:
    """`time_limit` is in decisions; without one a game is truncated after 108,000 frames (30 minutes)."""
    from rl_lab.environments.atari_env import AtariEnv

    repeat = action_repeat or 4
    return AtariEnv(
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
