"""Suite `atari100k`: 26 Atari games with 400 thousand frames (64×64 RGB, minimal action set, not sticky)

Two published variants:

    dreamer   DreamerV3's current preset `atari100k` (danijar/dreamerv3, configs.yaml): 0 to 30 no-ops, frames
              pooled and then resized, complete games of at most 108,000 frames, in training and evaluation
    iris      IRIS (eloialonso/iris, config/env/default.yaml): frames resized and then pooled. Training: 1 to 30
              no-ops, a lost life ends the episode, at most 20,000 frames. Evaluation: 1 no-op, complete games
              of at most 108,000 frames. No-ops count towards these limits.

Frames are resized in `AtariEnv` (suites/atari.py).
"""

from __future__ import annotations

from typing import Any

import gymnasium

from rl_lab.environments.suites.atari import HANDLES, resolve, step_seconds
from rl_lab.errors import ConfigError, closest

__all__ = ["EXTRA", "HANDLES", "make", "resolve", "step_seconds", "tasks"]

EXTRA = "atari"

# ROM names of the games of Kaiser et al. 2020, table 1.
NAMES = (
    "alien amidar assault asterix bank_heist battle_zone boxing breakout chopper_command crazy_climber demon_attack "
    "freeway frostbite gopher hero jamesbond kangaroo krull kung_fu_master ms_pacman pong private_eye qbert road_runner "
    "seaquest up_n_down"
)
GAMES = NAMES.split()

POOL_FIRST: dict[str, Any] = {"noops": (0, 30), "max_frames": 108_000}
RESIZE_FIRST: dict[str, Any] = {"resize_first": True, "count_noops": True, "life_loss_within": False}
# (variant, evaluation) -> arguments of `AtariEnv`
PRESETS: dict[tuple[str, bool], dict[str, Any]] = {
    ("dreamer", False): POOL_FIRST,
    ("dreamer", True): POOL_FIRST,
    ("iris", False): {**RESIZE_FIRST, "noops": (1, 30), "max_frames": 20_000, "life_loss": "end"},
    ("iris", True): {**RESIZE_FIRST, "noops": (1, 1), "max_frames": 108_000},
}


def tasks() -> list[str]:
    return list(GAMES)


def make(
    task: str,
    *,
    render: bool = False,
    size: tuple[int, int] | None = None,
    action_repeat: int | None = None,
    time_limit: int | None = None,
    variant: str = "dreamer",
    evaluation: bool = False,
    noops: int | None = None,
    life_loss: str | None = None,
    backend: str = "gymnasium",
) -> gymnasium.Env:
    """`evaluation` selects the evaluation settings of the variant; other arguments override its values.

    `time_limit` is in decisions of `action_repeat` frames.
    """
    from rl_lab.environments.suites.atari import backend_class

    if (variant, evaluation) not in PRESETS:
        raise ConfigError(f"environment.variant={variant!r}:{closest(str(variant), ['dreamer', 'iris'])}")
    settings = dict(PRESETS[variant, evaluation])
    repeat = action_repeat or 4
    if noops is not None:
        settings["noops"] = (min(settings["noops"][0], noops), noops)
    if life_loss is not None:
        settings["life_loss"] = life_loss
    if time_limit is not None:
        settings |= {"max_frames": time_limit * repeat, "count_noops": False}
    return backend_class(backend)(
        task,
        size=size or (64, 64),
        action_repeat=repeat,
        render_mode="rgb_array" if render else None,
        **settings,
    )
