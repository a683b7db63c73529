"""Recorded episodes, replayed: media/episodes/{train,test,imagination} and media/recordings of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rl_lab.buffers.episode_files import SUFFIXES, EpisodeFiles
from rl_lab.errors import ConfigError, LabError, closest
from rl_lab.records import OBS_PREFIX, Spec
from rl_lab.tools.play.moment import Moment, Panel
from rl_lab.tools.play.panels import observation_picture
from rl_lab.utils.install import install_line

SPLITS = {
    "train": "episodes/train",
    "test": "episodes/test",
    "imagination": "episodes/imagination",
    "recordings": "recordings",
}
FILMS = (".mp4", ".gif")
LONGEST = 3000  # frames that are read of a film


class EpisodesSource:
    """One episode at a time: .npz and .pt with everything, .mp4 and .gif with pictures only."""

    def __init__(self, media: Path, spec: Spec, split: str | None = None) -> None:
        self.media = media
        self.spec = spec
        self.split = ""
        self.index = 0
        self.position = 0
        self._files: list[Path] = []
        self._rows: dict[str, np.ndarray] = {}
        self._film: np.ndarray | None = None
        have = [name for name in SPLITS if self.files(name)]
        if split is not None and split not in SPLITS:
            raise ConfigError(f"no kind of episodes is called '{split}'.{closest(split, SPLITS)}")
        if not have or (split is not None and split not in have):
            where = media / SPLITS[split or "test"]
            raise LabError(
                f"no recorded episode in {where}"
                + (
                    f"; there are some in {', '.join(have)}"
                    if have
                    else ": play one with -s, or evaluate with --video"
                )
            )
        self.choose(split or ("test" if "test" in have else have[0]))

    def files(self, split: str) -> list[Path]:
        """Episodes of a kind, by name; a film beside the same episode's data is left out."""
        folder = self.media / SPLITS[split]
        found = [
            file for file in folder.glob("*") if file.suffix in (*SUFFIXES, *FILMS) and file.name[0] != "."
        ]
        whole = {file.stem for file in found if file.suffix in SUFFIXES}
        return sorted(file for file in found if file.suffix in SUFFIXES or file.stem not in whole)

    def choose(self, split: str, index: int = 0) -> Moment:
        """Go to an episode; LabError where there is none of that kind."""
        files = self.files(split)
        if not files:
            raise LabError(f"no recorded episode in {self.media / SPLITS[split]}")
        index %= len(files)
        rows, film = self._read(files[index])
        self.split, self._files, self.index, self.position = split, files, index, 0
        self._rows, self._film = rows, film
        return self.look()

    def reset(self) -> Moment:
        """The next episode."""
        return self.choose(self.split, self.index + 1)

    def move(self, by: int) -> Moment:
        """An episode forward or back."""
        return self.choose(self.split, self.index + by)

    def rewind(self) -> Moment:
        return self.seek(-self.length)

    def seek(self, by: int) -> Moment:
        self.position = min(max(0, self.position + by), self.length - 1)
        return self.look()

    def step(self, action: np.ndarray) -> Moment:
        """One step on, whatever the action."""
        return self.seek(1)

    def agent_action(self) -> np.ndarray:
        """What was done here; it is recorded already, so nothing follows from it."""
        return np.zeros(self.spec.action.shape, self.spec.action.dtype)

    def think(self) -> dict[str, float]:
        return {}

    @property
    def length(self) -> int:
        return len(self._film) if self._film is not None else len(self._rows["reward"])

    def look(self) -> Moment:
        at = self.position
        if self._film is not None:
            action = np.zeros(self.spec.action.shape, self.spec.action.dtype) if at else None
            return Moment({}, action, truncated=at == self.length - 1)
        rows = self._rows
        obs = {n.removeprefix(OBS_PREFIX): value[at] for n, value in rows.items() if n.startswith(OBS_PREFIX)}
        return Moment(
            obs,
            rows["action"][at - 1] if at else None,
            float(rows["reward"][at]),
            bool(rows["terminated"][at]),
            bool(rows["truncated"][at]),
        )

    def return_so_far(self) -> float | None:
        """None for a film, which tells no rewards."""
        return None if self._film is not None else float(self._rows["reward"][: self.position + 1].sum())

    def panels(self, parts: bool) -> list[Panel]:
        if self._film is not None:
            return [Panel("film", self._film[self.position])]
        return [Panel("recorded", observation_picture(self.look().obs))]

    def status(self) -> dict[str, Any]:
        """Where it stands."""
        return {
            "split": self.split,
            "name": self._files[self.index].name,
            "index": self.index,
            "count": len(self._files),
            "position": self.position,
            "length": self.length,
        }

    def _read(self, file: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        if file.suffix in FILMS:
            return {}, read_film(file)
        files = EpisodeFiles([file], self.spec)
        _, rows = next(iter(files.pieces(self.spec.row_columns())))
        return {name: np.asarray(value)[0] for name, value in rows.items()}, None


def read_film(file: Path) -> np.ndarray:
    """(T, H, W, 3) uint8 of an mp4 or GIF."""
    frames: list[np.ndarray] = []
    try:
        if file.suffix == ".gif":
            from PIL import Image, ImageSequence

            with Image.open(file) as image:
                for frame in ImageSequence.Iterator(image):
                    frames.append(np.asarray(frame.convert("RGB")))
                    if len(frames) >= LONGEST:
                        break
        else:
            frames = _mp4_frames(file)
    except ImportError as error:
        raise LabError(f"{file.name} needs imageio-ffmpeg: {install_line('video')}") from error
    except (OSError, RuntimeError, ValueError, SyntaxError) as error:
        raise LabError(f"{file} cannot be read: {str(error).strip()[:200]}") from error
    if not frames:
        raise LabError(f"{file} holds no frame")
    return np.stack(frames)


def _mp4_frames(file: Path) -> list[np.ndarray]:
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(file))
    frames: list[np.ndarray] = []
    try:
        width, height = next(reader)["size"]
        for data in reader:
            frames.append(np.frombuffer(data, np.uint8).reshape(height, width, 3))
            if len(frames) >= LONGEST:
                break
    finally:
        reader.close()
    return frames
