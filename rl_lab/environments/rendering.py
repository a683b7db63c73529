"""Rendering: the choice of MuJoCo's OpenGL backend, and videos of training episodes."""

from __future__ import annotations

import contextlib
import ctypes.util
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from rl_lab.errors import ConfigError, LabError
from rl_lab.utils.media import save_video
from rl_lab.utils.seeding import derive_seed


def find_renderer() -> str:
    """Return the backend of this machine: EGL (a GPU, or Mesa in software), else OSMesa, else "disable".

    "" leaves the choice to MuJoCo, if there is a display or the system is not Linux.
    """
    if ctypes.util.find_library("EGL"):
        return "egl"
    if ctypes.util.find_library("OSMesa"):
        return "osmesa"
    return "disable" if sys.platform.startswith("linux") and not os.environ.get("DISPLAY") else ""


def choose_renderer(needed: bool) -> str:
    """Set MUJOCO_GL before dm_control reads it, which happens only once; return the backend.

    A value set by the user is not changed. Raises LabError if frames are `needed` and no backend is
    available.
    """
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    if not chosen and "dm_control._render" not in sys.modules:
        chosen = find_renderer()
        if chosen:
            os.environ["MUJOCO_GL"] = chosen
    if needed and chosen in ("disable", "off", "false", "0"):
        raise LabError(
            "MuJoCo has no rendering backend: install EGL (apt install libegl1 libgl1-mesa-dri, or a GPU's "
            "driver) or OSMesa (apt install libosmesa6) and unset MUJOCO_GL, or use observe=proprio"
        )
    _load_triton_before_mesa()
    return chosen


def _load_triton_before_mesa() -> None:
    """Import Triton before Mesa: both contain LLVM, and the process crashes if Triton's is loaded second.

    torch imports Triton if it is installed, at the latest with the first optimizer. Worker processes do not
    import torch, so they do not need this.
    """
    if "torch" in sys.modules or multiprocessing.parent_process() is None:
        with contextlib.suppress(ImportError):
            import triton  # noqa: F401


# --- Videos of training episodes -------------------------------------------------------------------------

MAX_FRAMES = 1000  # a video shows the first decisions of an episode
MAX_SIDE = 256  # pixels; larger frames are reduced by an integer factor to save memory
MAX_SEARCHED_SEEDS = 200_000  # episode numbers to compare with a seed; takes less than a second

StepResult = tuple[Any, Any, bool, bool, dict[str, Any]]


@dataclass(frozen=True)
class VideoSettings:
    """Which episodes are recorded, and to which folder."""

    folder: str
    every: int
    run_seed: int  # to find the number of an episode from its seed

    @classmethod
    def checked(cls, folder: str | Path | None, every: Any, run_seed: int) -> VideoSettings:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ConfigError(
                f"environment.video_every={every!r} must be an integer: 10 records each tenth episode, 0 none"
            )
        if folder is None:
            raise ConfigError("video_every needs video_folder: set it to the folder for the videos")
        return cls(str(folder), every, run_seed)


@dataclass(frozen=True)
class RecordedFactory:
    """Environment factory that adds `EpisodeVideo` to the rendered environment, number 0."""

    factory: Callable[[bool], gymnasium.Env]
    settings: VideoSettings

    def __call__(self, render: bool = False) -> gymnasium.Env:
        env = self.factory(render)
        return EpisodeVideo(env, self.settings) if render else env

    def in_lane(self, lane: int) -> RecordedFactory:
        return replace(self, factory=self.factory.in_lane(lane))  # type: ignore[attr-defined]  # an EnvFactory


class EpisodeVideo(gymnasium.Wrapper):
    """Records episodes 0, N, 2N, … as `episode_<number>.mp4` (GIF without ffmpeg).

    The number is found from the seed of the episode, so that a resumed run continues to count correctly. The
    open episode is replayed on resume, so its video is complete.
    """

    def __init__(self, env: gymnasium.Env, settings: VideoSettings) -> None:
        super().__init__(env)
        self.settings = settings
        self.number = -1
        self._seeds_known = True
        self._frames: list[np.ndarray] | None = None
        self._failure = ""

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        result = self.env.reset(seed=seed, **kwargs)
        self.number = self._number(seed)
        self._frames = [] if self.number % self.settings.every == 0 else None
        self._capture()
        return result

    def step(self, action: Any) -> StepResult:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._capture()
        if self._frames and (terminated or truncated):
            self._write()
        return obs, reward, terminated, truncated, info

    def take_failure(self) -> str:
        """Return the traceback of a failure since the last call, or "". Without a video the episode goes on."""
        failure, self._failure = self._failure, ""
        return failure

    def _capture(self) -> None:
        if self._frames is not None and len(self._frames) < MAX_FRAMES:
            try:
                self._frames.append(_reduced(np.asarray(self.env.render())))
            except (Exception, SystemExit):
                self._frames, self._failure = None, traceback.format_exc()

    def _write(self) -> None:
        """Write the video file."""
        frames, self._frames = self._frames, None
        path = Path(self.settings.folder) / f"episode_{self.number:09d}"
        fps = float((self.env.metadata or {}).get("render_fps") or 30)
        try:
            save_video(path, np.stack(frames or []), fps)
        except Exception:
            self._failure = traceback.format_exc()

    def _number(self, seed: int | None) -> int:
        next_number = self.number + 1
        if seed is None or not self._seeds_known or self._seed_of(next_number) == seed:
            return next_number
        for number in range(MAX_SEARCHED_SEEDS):
            if self._seed_of(number) == seed:
                return number
        self._seeds_known = False  # seeds that this run did not derive: only count
        return next_number

    def _seed_of(self, number: int) -> int:
        """Return the seed that `VectorEnv` uses for this episode of environment 0."""
        return derive_seed(self.settings.run_seed, "env", 0, number) & 0x7FFFFFFF


def _reduced(frame: np.ndarray) -> np.ndarray:
    """Return (H, W, 3) uint8, reduced to at most `MAX_SIDE` pixels per side."""
    if frame.ndim != 3 or frame.dtype != np.uint8:
        raise ConfigError(
            "environment.video_every needs an environment whose render() returns (H, W, 3) uint8 frames: set it to 0"
        )
    factor = -(-max(frame.shape[:2]) // MAX_SIDE)
    if factor == 1:
        return frame.copy()
    from PIL import Image

    return np.asarray(Image.fromarray(frame).reduce(factor))
