"""Recordings: what was seen as mp4, what happened as .npz that `buffer/offline` can train on.

The .npz is the plain episode of docs/howto/offline_data.md: observations (K+1), actions, rewards, terminated,
truncated (K). A recording that goes over an episode's end becomes one .npz for each episode.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from pathlib import Path

import numpy as np

from rl_lab.records import Spec
from rl_lab.tools.play.moment import Moment
from rl_lab.tools.play.movie import Movie
from rl_lab.utils.files import write_atomic


class Recorder:
    """From `add` to `keep` or `discard`."""

    def __init__(self, folder: Path, spec: Spec, *, fps: float, label: str = "") -> None:
        stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        self.spec = spec
        self.path = folder / f"{stamp}{'_' + label if label else ''}_{secrets.token_hex(2)}"
        self.movie = Movie(self.path, fps)
        self._episodes: list[list[Moment]] = []

    def add(self, moment: Moment, frame: np.ndarray) -> None:
        if moment.is_first or not self._episodes:
            self._episodes.append([])
        self._episodes[-1].append(moment)
        self.movie.add(frame)

    @property
    def frames(self) -> int:
        return self.movie.frames

    def keep(self) -> list[Path]:
        """Write the files; their paths, the film first."""
        film = self.movie.finish()
        files = [film] if film is not None else []
        told = [moments for moments in self._episodes if len(moments) > 1 and moments[0].obs]
        for number, moments in enumerate(told, start=1):
            name = self.path.name + (f"_{number}" if number > 1 else "") + ".npz"
            files.append(write_episode(self.path.with_name(name), moments, self.spec))
        return files

    def discard(self) -> None:
        self.movie.discard()


def write_episode(path: Path, moments: list[Moment], spec: Spec) -> Path:
    """K+1 moments as an episode of K steps."""
    names = list(moments[0].obs)
    single = len(spec.observations) == 1
    arrays = {
        ("observations" if single else f"observations/{name}"): np.stack(
            [moment.obs[name] for moment in moments]
        )
        for name in names
    }
    later = moments[1:]
    arrays["actions"] = np.stack([np.asarray(moment.action) for moment in later])
    arrays["rewards"] = np.array([moment.reward for moment in later], np.float32)
    arrays["terminated"] = np.array([moment.terminated for moment in later])
    arrays["truncated"] = np.array([moment.truncated for moment in later])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]
    return path
