"""What MuJoCo draws with, on this machine and in this process."""

from __future__ import annotations

import contextlib
import ctypes.util
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_lab.errors import ConfigError, LabError
from rl_lab.utils.media import save_video
from rl_lab.utils.seeding import derive_seed


def find_renderer() -> str:
    """What this machine can draw with: EGL (a GPU, or Mesa in software), else OSMesa, else "disable".

    "" leaves the choice to MuJoCo: there is a screen, or another system than Linux.
    """
    if ctypes.util.find_library("EGL"):
        return "egl"
    if ctypes.util.find_library("OSMesa"):
        return "osmesa"
    return "disable" if sys.platform.startswith("linux") and not os.environ.get("DISPLAY") else ""


def choose_renderer(needed: bool) -> str:
    """Settle MUJOCO_GL before dm_control reads it, which it does once.

    A choice that the user made stays. LabError when frames are `needed` and nothing can draw them.
    """
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if not chosen and "dm_control._render" not in sys.modules:
        chosen = find_renderer()
        if chosen:
            os.environ["MUJOCO_GL"] = chosen
    if needed and chosen in ("disable", "off", "false", "0"):
        raise LabError(
            "MuJoCo has nothing to draw frames with: install EGL (apt install libegl1 libgl1-mesa-dri, or a GPU's "
            "driver) or OSMesa (apt install libosmesa6) and unset MUJOCO_GL, or use observe=proprio"
        )
    _load_triton_before_mesa()
    return chosen


def _load_triton_before_mesa() -> None:
    """Mesa brings an LLVM, and so does Triton: loaded after Mesa's, Triton's crashes the process; before it, both work.

    torch loads Triton where it is installed, at the latest with the first optimizer. Workers never load torch, and stay
    small.
    """
    if "torch" in sys.modules or multiprocessing.parent_process() is None:
        with contextlib.suppress(ImportError):
            import triton  # noqa: F401


# --------------------
# Videos of training: every Nth episode of environment 0, drawn and written where it is played.


MAX_FRAMES = 1000  # decisions that a video shows, from the beginning
MAX_SIDE = 256  # pixels; larger frames are reduced by whole factors, or a long episode would fill the memory
SEARCHED = 200_000  # episodes among which a seed's number is looked for: under a second

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class VideoSettings:
    """Which episodes are filmed, and where the films go."""

    folder: str
    every: int
    run_seed: int  # with it an episode's number follows from its seed

    @classmethod
    def checked(cls, folder: str | Path | None, every: Any, run_seed: int) -> VideoSettings:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"environment.video_every={every!r} must be a whole number: 10 films each tenth episode, 0 none"
            )
        if folder is None:
            raise ConfigError("video_every needs video_folder, the folder that the videos go to")
        return cls(str(folder), every, run_seed)


@dataclass(frozen=True)
class Filmed:
    """A factory of environments, those made for rendering with a camera on them: environment 0."""

    factory: Callable[[bool], gymnasium.Env]
    settings: VideoSettings

    def __call__(self, render: bool = False) -> gymnasium.Env:
        env = self.factory(render)
        return EpisodeVideo(env, self.settings) if render else env


class EpisodeVideo(gymnasium.Wrapper):
    """Films episodes 0, N, 2N, … as `episode_<number>.mp4` (GIF where there is no ffmpeg).

    The number follows from the seed that the episode is reset with, so a resumed run goes on counting where it stood,
    and the open episode, which is replayed, is filmed from its beginning.
    """

    def __init__(self, env: gymnasium.Env, settings: VideoSettings) -> None:
        super().__init__(env)
        self.settings = settings
        self.number = -1
        self._seeds_known = True
        self._frames: list[np.ndarray] | None = None
        self._complained = False

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, **kwargs)
        self.number = self._number(seed)
        self._frames = [] if self.number % self.settings.every == 0 else None
        self._film()
        return result

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._film()
        if self._frames and (terminated or truncated):
            self._write()
        return obs, reward, terminated, truncated, info

    def _film(self) -> None:
        if self._frames is not None and len(self._frames) < MAX_FRAMES:
            self._frames.append(_reduced(np.asarray(self.env.render())))

    def _write(self) -> None:
        """The film as a file. One that cannot be written is said once and does not end the run."""
        frames, self._frames = self._frames, None
        path = Path(self.settings.folder) / f"episode_{self.number:09d}"
        fps = float((self.env.metadata or {}).get("render_fps") or 30)
        try:
            save_video(path, np.stack(frames or []), fps)
        except Exception as error:
            if not self._complained:
                warnings.warn(f"no video {path} ({type(error).__name__}: {error})", stacklevel=2)
            self._complained = True

    def _number(self, seed: int | None) -> int:
        following = self.number + 1
        if seed is None or not self._seeds_known or self._seed_of(following) == seed:
            return following
        for number in range(SEARCHED):
            if self._seed_of(number) == seed:
                return number
        self._seeds_known = False  # seeds of somebody else: count
        return following

    def _seed_of(self, number: int) -> int:
        """What `VectorEnv` resets environment 0 with for that episode."""
        return derive_seed(self.settings.run_seed, "env", 0, number) & 0x7FFFFFFF


def _reduced(frame: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 with sides of at most `MAX_SIDE`."""
    if frame.ndim != 3 or frame.dtype != np.uint8:
        raise ConfigError(
            "environment.video_every needs an environment whose render() gives (H, W, 3) uint8 frames: set it to 0"
        )
    factor = -(-max(frame.shape[:2]) // MAX_SIDE)
    if factor == 1:
        return frame.copy()
    from PIL import Image

    return np.asarray(Image.fromarray(frame).reduce(factor))
