"""Replay of recorded episodes: .npz and .pt contain all columns, .mp4 and .gif only images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_lab.buffers.formats.dataset import stored_rows
from rl_lab.buffers.formats.files import SUFFIXES, EpisodeFiles
from rl_lab.errors import ConfigError, LabError, closest, install_line
from rl_lab.records import OBS_PREFIX, Batch, Spec
from rl_lab.tools.play.frame import Frame, Panel
from rl_lab.tools.play.pictures import Pictures

SPLITS = {
    "train": "episodes/train",
    "test": "episodes/test",
    "imagination": "episodes/imagination",
    "recordings": "recordings",
}
VIDEOS = (".mp4", ".gif")
LONGEST = 3000  # frames read from a video


class EpisodesSource:
    """Replays the recorded episodes of a run, by split."""

    def __init__(
        self, media: Path, spec: Spec, split: str | None = None, *, pictures: Pictures | None = None
    ) -> None:
        self.media = media
        self.pictures = pictures or Pictures(spec)
        self.spec = spec
        self.split = ""
        self.index = 0
        self.position = 0
        self._files: list[Path] = []
        self._rows: dict[str, np.ndarray] = {}
        self._video: np.ndarray | None = None
        have = [name for name in SPLITS if self.files(name)]
        if split is not None and split not in SPLITS:
            raise ConfigError(f"--split {split}: there is no such split.{closest(split, SPLITS)}")
        if not have or (split is not None and split not in have):
            folder = media / SPLITS[split or "test"]
            raise LabError(
                f"{folder} has no recorded episode"
                + (
                    f"; these splits have some: {', '.join(have)}"
                    if have
                    else ": record one with -s, or run rl-lab eval with --video"
                )
            )
        self.choose(split or ("test" if "test" in have else have[0]))

    def files(self, split: str) -> list[Path]:
        """Return the episodes of a split by name; a video is skipped if the same episode's data exist."""
        folder = self.media / SPLITS[split]
        found = [
            file for file in folder.glob("*") if file.suffix in (*SUFFIXES, *VIDEOS) and file.name[0] != "."
        ]
        with_data = {file.stem for file in found if file.suffix in SUFFIXES}
        return sorted(file for file in found if file.suffix in SUFFIXES or file.stem not in with_data)

    def choose(self, split: str, index: int = 0) -> Frame:
        """Open an episode; LabError if the split has none."""
        files = self.files(split)
        if not files:
            raise LabError(f"{self.media / SPLITS[split]} has no recorded episode")
        index %= len(files)
        rows, video = self._read(files[index])
        self.split, self._files, self.index, self.position = split, files, index, 0
        self._rows, self._video = rows, video
        return self.frame()

    def reset(self) -> Frame:
        """Open the next episode."""
        return self.choose(self.split, self.index + 1)

    def move(self, by: int) -> Frame:
        """Move forward or back by `by` episodes."""
        return self.choose(self.split, self.index + by)

    def rewind(self) -> Frame:
        return self.seek(-self.length)

    def seek(self, by: int) -> Frame:
        self.position = min(max(0, self.position + by), self.length - 1)
        return self.frame()

    def step(self, action: np.ndarray) -> Frame:
        """Move one step forward; the action is ignored."""
        return self.seek(1)

    def agent_action(self) -> np.ndarray:
        """Return a placeholder: a recorded episode ignores the action."""
        return np.zeros(self.spec.action.shape, self.spec.action.dtype)

    def inspect(self) -> dict[str, float]:
        return {}

    @property
    def length(self) -> int:
        return len(self._video) if self._video is not None else len(self._rows["reward"])

    def frame(self) -> Frame:
        at = self.position
        if self._video is not None:
            action = np.zeros(self.spec.action.shape, self.spec.action.dtype) if at else None
            reward = float("nan") if at else 0.0  # a video has no rewards
            return Frame({}, action, reward, truncated=at == self.length - 1)
        rows = self._rows
        obs = {n.removeprefix(OBS_PREFIX): value[at] for n, value in rows.items() if n.startswith(OBS_PREFIX)}
        return Frame(
            obs,
            rows["action"][at - 1] if at else None,
            float(rows["reward"][at]),
            bool(rows["terminated"][at]),
            bool(rows["truncated"][at]),
        )

    def return_so_far(self) -> float | None:
        """Return the sum of rewards up to here; None for a video, which has no rewards."""
        return None if self._video is not None else float(self._rows["reward"][: self.position + 1].sum())

    def panels(self, parts: bool) -> list[Panel]:
        if self._video is not None:
            return [Panel("video", self._video[self.position])]
        obs = self.frame().obs
        shown = [Panel("recorded", self.pictures.show(obs))]
        if parts and self.pictures.draws(obs):
            shown.append(Panel("recorded values", self.pictures.values(obs)))
        return shown

    def rows_until_here(self, most: int) -> Batch:
        """Return the rows up to the shown one, at most `most` of them, (1, T, …): a dream can start from them."""
        if self._video is not None:
            raise LabError(
                f"{self._files[self.index].name} is a video: a dream needs an episode with data (.npz)"
            )
        rows, end = self._rows, self.position + 1
        if rows["terminated"][self.position] or rows["truncated"][self.position]:
            raise LabError("the episode ends here: step back to dream from an earlier step")
        first = max(0, end - most)
        return Batch({name: torch.as_tensor(value[first:end])[None] for name, value in rows.items()})

    def status(self) -> dict[str, Any]:
        """Return split, file and position."""
        return {
            "split": self.split,
            "name": self._files[self.index].name,
            "index": self.index,
            "count": len(self._files),
            "position": self.position,
            "length": self.length,
        }

    def _read(self, file: Path) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        if file.suffix in VIDEOS:
            return {}, read_video(file)
        rows = stored_rows(EpisodeFiles([file]), 0, self.spec)
        return {name: np.asarray(value)[0] for name, value in rows.items()}, None


def read_video(file: Path) -> np.ndarray:
    """Read an mp4 or GIF as (T, H, W, 3) uint8."""
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
        raise LabError(f"{file} contains no frame")
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
